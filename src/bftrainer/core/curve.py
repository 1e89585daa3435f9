"""Scaling curves give a trainer's rate as a function of its node count.

A curve is piecewise linear through measured points, in samples per second. It may rise, fall or bend either way.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bftrainer.errors import InputError

_MOST_TABLES = 32


@dataclass(frozen=True, slots=True)
class Curve:
    """Rate by node count. On no nodes the rate is 0; beyond the last point it stays constant."""

    nodes: tuple[int, ...]
    """Node counts of the points, rising from 0."""
    rates: tuple[float, ...]
    """Samples per second at each point, 0 at 0 nodes."""
    _tables: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def through(cls, nodes: Sequence[int], rates: Sequence[float], where: str = "curve") -> Curve:
        """A checked curve through points; `where` names the curve in messages. (0, 0) is added when it is missing."""
        if len(nodes) != len(rates):
            raise InputError(f"{where}: must have as many values as nodes, but got {len(rates)} and {len(nodes)}")
        if len(nodes) == 0:
            raise InputError(f"{where}: must have at least one point")
        for n in nodes:
            if not _is_finite_number(n) or n != int(n) or n < 0:
                raise InputError(f"{where}: nodes must be whole numbers, 0 or more, but got {n!r}")
        for rate in rates:
            if not _is_finite_number(rate) or rate < 0:
                raise InputError(f"{where}: values must be finite numbers, 0 or more, but got {rate!r}")
        counts, values = [int(n) for n in nodes], [float(r) for r in rates]
        if any(b <= a for a, b in itertools.pairwise(counts)):
            raise InputError(f"{where}: nodes must rise from point to point, but got {counts}")
        if counts[0] > 0:
            counts, values = [0, *counts], [0.0, *values]
        if values[0] != 0:
            raise InputError(f"{where}: the value at 0 nodes must be 0, but got {values[0]!r}")
        if len(counts) == 1:
            raise InputError(f"{where}: must have a point above 0 nodes")
        return cls(tuple(counts), tuple(values))

    @classmethod
    def amdahl(cls, parallel: float, one_node_rate: float, max_nodes: int) -> Curve:
        """Amdahl's law for a `parallel` share of the work, with points at the powers of two up to `max_nodes`."""
        if not 0 <= parallel <= 1:
            raise InputError(f"`parallel` must be a share from 0 to 1, but got {parallel}")
        if max_nodes < 1:
            raise InputError(f"`max_nodes` must be 1 or more, but got {max_nodes}")
        counts = [2**k for k in range(max_nodes.bit_length()) if 2**k < max_nodes] + [max_nodes]
        rates = [one_node_rate / ((1 - parallel) + parallel / n) for n in counts]
        return cls.through(counts, rates, "Amdahl curve")

    @classmethod
    def from_csv(cls, text: str, where: str = "curve") -> Curve:
        """A curve from two columns, nodes and samples per second, with an optional header line."""
        nodes: list[int] = []
        rates: list[float] = []
        names_may_come = True
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            # Between semicolons a comma is a decimal comma: refused, not taken for a third column.
            fields = line.split(";" if ";" in line else ",")
            if names_may_come and len(fields) >= 2 and not any(map(_is_number_text, fields[:2])):
                names_may_come = False
                continue
            names_may_come = False
            try:
                count, rate = float(fields[0]), float(fields[1])
                if count != int(count):
                    raise ValueError
            except (ValueError, IndexError, OverflowError):
                raise InputError(f"{where}:{number}: must be `nodes,samples per second`, but got {line!r}") from None
            nodes.append(int(count))
            rates.append(rate)
        return cls.through(nodes, rates, where)

    def rate(self, nodes: float) -> float:
        """Samples per second on `nodes` nodes."""
        if nodes <= 0:
            return 0.0
        if nodes >= self.nodes[-1]:
            return self.rates[-1]
        above = bisect_right(self.nodes, nodes)
        low, high = self.nodes[above - 1], self.nodes[above]
        rate = self.rates[above - 1]
        return (self.rates[above] - rate) / (high - low) * (nodes - low) + rate

    def at(self, nodes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Samples per second on each of many node counts."""
        rates: npt.NDArray[np.float64] = np.interp(np.asarray(nodes, dtype=np.float64), self.nodes, self.rates)
        return rates

    def up_to(self, top: int) -> npt.NDArray[np.float64]:
        """Samples per second on 0, 1, …, `top` nodes; read-only. Every decision asks for it, so it is cached."""
        table = self._tables.get(top)
        if table is None:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            table = self._tables[top] = self.at(np.arange(top + 1))
            table.flags.writeable = False
        return table

    def scaled(self, factor: float) -> Curve:
        """The curve with every rate multiplied."""
        return Curve(self.nodes, tuple(rate * factor for rate in self.rates))


def _is_finite_number(value: object) -> bool:
    """Whether a value of unknown origin is a finite number; True and False are not."""
    return (
        isinstance(value, int | float | np.integer | np.floating) and type(value) is not bool and math.isfinite(value)
    )


def _is_number_text(text: str) -> bool:
    """Whether a field of a file holds a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
