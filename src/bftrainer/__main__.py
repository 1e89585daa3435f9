"""`python -m bftrainer` is the `bftrainer` command."""

from bftrainer.cli.main import main

main()
