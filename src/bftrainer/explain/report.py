"""Explanation of a script: the values that the analysis returns, and their JSON form.

Lines are numbered from 1, in the script as it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """A line that shows what kind of script this is."""

    file: str
    line: int
    text: str
    what: str


@dataclass(frozen=True)
class LineChange:
    """A line to change. Without `before`, `after` is inserted before `line`; without `after`, the line is removed."""

    file: str
    line: int
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Notice:
    """Something to know about a line, and what to do. `refused`: BFTrainer stops with an error there."""

    file: str
    line: int
    what: str
    remedy: str
    refused: bool = False


@dataclass(frozen=True)
class Explanation:
    """Which way makes a script elastic, why, which lines to change, and what to look at."""

    script: str
    way: str
    command: str
    evidence: tuple[Evidence, ...] = ()
    changes: tuple[LineChange, ...] = ()
    notices: tuple[Notice, ...] = ()
    diff: str = ""

    @property
    def warnings(self) -> tuple[Notice, ...]:
        """What works, but may not be meant."""
        return tuple(notice for notice in self.notices if not notice.refused)

    @property
    def refused(self) -> tuple[Notice, ...]:
        """What BFTrainer refuses as it is."""
        return tuple(notice for notice in self.notices if notice.refused)

    def as_json(self) -> dict[str, Any]:
        """Return the explanation for programs. The keys stay the same from version to version."""
        return {
            "script": self.script,
            "way": self.way,
            "command": self.command,
            "evidence": [asdict(one) for one in self.evidence],
            "changes": [asdict(one) for one in self.changes],
            "warnings": [_told(one) for one in self.warnings],
            "refused": [_told(one) for one in self.refused],
        }


def _told(notice: Notice) -> dict[str, Any]:
    return {key: value for key, value in asdict(notice).items() if key != "refused"}
