"""All rows of the matrix, in the order of the page."""

from matrix import loops, models, optimizers
from matrix import rows as shared
from matrix.rows import Row

__all__ = ["ROWS", "Row"]

_ORDER = [module.__name__ for module in (models, optimizers, loops)]
ROWS = sorted(shared.ROWS, key=lambda row: _ORDER.index(row.script.__module__))
