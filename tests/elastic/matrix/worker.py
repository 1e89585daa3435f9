"""Runs one row of the matrix as the training script of one rank: `worker.py ROW FOLDER`."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matrix import recorder
from matrix.registry import ROWS

torch.manual_seed(os.getpid())  # what a rank starts with must not matter
(row,) = (row for row in ROWS if row.name == sys.argv[1])
row.script()
recorder.end()
