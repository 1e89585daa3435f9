"""Becomes another program: how the agent starts a worker that is no Python script.

It is forked from a parent that kills the whole process group when the agent is gone. Started directly, only the program
itself would die with the agent, and what the program has started would be left behind.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line given as arguments in place of this process."""
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would be handed on
        signal.signal(signum, signal.SIG_DFL)
    program, *arguments = sys.argv[1:]
    try:
        os.execvp(program, [program, *arguments])  # noqa: S606 - running what the caller asks for is the purpose
    except OSError as problem:
        print(f"bftrainer: cannot start {program}: {problem}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
