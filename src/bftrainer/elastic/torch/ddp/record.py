"""Records of a ddp script, as part of the training's state: what the ranks have agreed on outside of steps.

A worker that joins later runs the script from its top. Its loops over batches are empty for epochs that are over, and
its reductions between them return what `GapRecord` has. So values that the script keeps, such as the best accuracy,
come out as on the other ranks. `TopRecord` shows whether the code before the training did the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from bftrainer.elastic.torch.ddp.refused import refuse
from bftrainer.elastic.torch.meetings.shared_values import packed

_MOST_BYTES = 16 << 20


class GapRecord:
    """Results by gap: the script's code between two loops over training batches. Gap n follows loop n - 1."""

    def __init__(self) -> None:
        self._results: dict[int, list[Any]] = {}
        self._loops: dict[int, list[int]] = {}
        self._bytes = 0

    def has(self, gap: int, number: int) -> bool:
        """Return whether result `number` of a gap is known."""
        return number < len(self._results.get(gap, ()))

    def get(self, gap: int, number: int) -> Any:
        """Return result `number` of a gap."""
        return self._results[gap][number]

    def batches(self, gap: int, number: int) -> int:
        """Return how many batches a repeated loop over an evaluation set needs, by the number of the loop in its gap.

        It is one, unless there were reductions within the loop.
        """
        known = self._loops.get(gap, [])
        return known[number] if number < len(known) else 1

    def add_loop(self, gap: int, number: int, batches: int) -> None:
        """Record how many batches a loop over an evaluation set needs when it is repeated."""
        known = self._loops.setdefault(gap, [])
        if number == len(known):
            known.append(batches)

    def add(self, gap: int, number: int, result: Any) -> None:
        """Record a result, unless it came with the state of another rank."""
        if self.has(gap, number):
            return
        self._bytes += len(packed(result, "a reduction"))
        if self._bytes > _MOST_BYTES:
            refuse(
                f"reductions outside of steps have given more than {_MOST_BYTES >> 20} MiB, which newcomers would need"
            )
        self._results.setdefault(gap, []).append(result)

    def state_dict(self) -> dict[str, Any]:
        """Return all results as plain values."""
        gaps = [[gap, list(results)] for gap, results in self._results.items()]
        loops = [[gap, list(batches)] for gap, batches in self._loops.items()]
        return {"bytes": self._bytes, "gaps": gaps, "loops": loops}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what another rank knows, and keep the rest: all ranks have the same results in the same order."""
        self._bytes = max(self._bytes, state["bytes"])
        for known, found in ((self._results, state["gaps"]), (self._loops, state["loops"])):
            for gap, entries in found:
                if len(entries) > len(known.get(gap, ())):
                    known[gap] = list(entries)


class TopRecord:
    """What the script's code before the training has loaded and exchanged. It must be the same on all ranks."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def note(self, what: str, value: object) -> None:
        """Add something that must be the same on all ranks."""
        self._lines.append(f"{what} {hashlib.sha256(repr(value).encode()).hexdigest()[:16]}")

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return {"lines": list(self._lines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with the record of another rank."""
        theirs = list(state["lines"])
        if theirs != self._lines:
            pairs = zip([*theirs, ""], [*self._lines, ""], strict=False)
            other, mine = next((other, mine) for other, mine in pairs if other != mine)
            refuse(
                f"before the training this rank has `{_shown(mine)}`, but the others have `{_shown(other)}`. All ranks "
                "must load and exchange the same before the training"
            )


def _shown(line: str) -> str:
    return line.rpartition(" ")[0] or "nothing more"
