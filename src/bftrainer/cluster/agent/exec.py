"""The exec module turns its process into a worker's program.

The agent uses it for a program that is not a Python script. The process is forked from the warm parent, which kills the
whole process group when the agent is gone. If the agent started the program directly, only the program itself would die
with the agent; processes that the program had started would be left behind.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line given as arguments in place of this process."""
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the program would inherit that
        signal.signal(signum, signal.SIG_DFL)
    program, *arguments = sys.argv[1:]
    try:
        os.execvp(program, [program, *arguments])  # noqa: S606 - running what the caller asks for is the purpose
    except OSError as problem:
        print(f"bftrainer: cannot start {program}: {problem}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
