"""Command `python -m bftrainer.elastic.control`: controls a training that runs on this machine."""

import sys

from bftrainer.elastic.local.commands import main

if __name__ == "__main__":
    sys.exit(main())
