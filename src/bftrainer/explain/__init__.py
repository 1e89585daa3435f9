"""Explanation of training scripts: which way makes a script elastic, and which of its lines change.

`bftrainer submit --explain` calls `explain`. Scripts are read as text: nothing is imported or run, and PyTorch is not
needed. `reading` knows what names mean, `training` finds the loop and its objects, `checks` finds what BFTrainer
refuses, `ways` has one module per kind of script, and `deciding` chooses. `lines` has all lines of our API.
"""

from bftrainer.explain.deciding import explain, kept_values, what_keeps_from_place
from bftrainer.explain.report import Explanation

__all__ = ["Explanation", "explain", "kept_values", "what_keeps_from_place"]
