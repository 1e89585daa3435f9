"""Command `python -m bftrainer.elastic.run`: runs a training on this machine."""

import sys

from bftrainer.elastic.local.main import main

if __name__ == "__main__":
    sys.exit(main())
