"""Entry of the ddp launcher: `python -m bftrainer.elastic.ddp SCRIPT [ARGS…]` runs an unchanged DDP script in place.

Launchers start it on each node, in place of the script. See `elastic.torch.ddp`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bftrainer.elastic import protocol
from bftrainer.explain import what_keeps_from_place
from bftrainer.processes.forker import run_as_main


def main() -> None:
    """Put the stand-ins in place and run the script, unless its text shows that it cannot train in place."""
    from bftrainer.elastic.torch.ddp.standing_in import stand_in

    words = tuple(sys.argv[1:])
    notice = what_keeps_from_place(words, Path.cwd())
    if notice is not None:
        raise SystemExit(f"{protocol.CANNOT_STAND_IN}: {notice.file}:{notice.line}: {notice.what}; {notice.remedy}")
    stand_in()
    run_as_main(words)


if __name__ == "__main__":
    main()
