"""Import report: what an import did with each line of a log, and warnings about the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bftrainer.core.trace import Window
from bftrainer.traces.readers.jobs import MALFORMED, NOT_A_JOB


@dataclass(slots=True)
class ReasonCount:
    """How often a reason occurred, and the first line where it did."""

    count: int = 0
    first_line: int = 0


@dataclass(slots=True)
class ImportReport:
    """Report of an import, filled while a log is read; every line is either used or skipped for a reason."""

    format: str
    used: int = 0
    skipped: dict[str, ReasonCount] = field(default_factory=dict)
    nodes: int = 0
    window: Window | None = None
    busy_share: float | None = None
    """Node-time in use, of all nodes over the whole window, before any trimming. None for logs of idleness."""
    trimmed_node_hours: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """All lines of the log."""
        return self.used + sum(tally.count for tally in self.skipped.values())

    @property
    def jobs(self) -> int:
        """Lines that stand for a job, used or not: no comments, job steps or other records."""
        return self.lines - sum(t.count for reason, t in self.skipped.items() if reason.startswith(NOT_A_JOB))

    @property
    def malformed(self) -> int:
        """Lines that are broken."""
        return sum(tally.count for reason, tally in self.skipped.items() if reason.startswith(MALFORMED))

    def skip(self, line: int, reason: str) -> None:
        """Account for a line that gave no job."""
        tally = self.skipped.get(reason)
        if tally is None:
            tally = self.skipped[reason] = ReasonCount(first_line=line)
        tally.count += 1
        tally.first_line = min(tally.first_line, line)

    def reasons(self) -> str:
        """The skipped lines summarised in one line of text, most frequent reason first."""
        ordered = sorted(self.skipped.items(), key=lambda item: -item[1].count)
        return "; ".join(f"{tally.count} {reason} (first: line {tally.first_line})" for reason, tally in ordered)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for `--json` and for the trace's provenance."""
        return {
            "format": self.format,
            "lines": self.lines,
            "jobs": self.jobs,
            "used": self.used,
            "skipped": {
                reason: {"lines": tally.count, "first_line": tally.first_line}
                for reason, tally in sorted(self.skipped.items())
            },
            "nodes": self.nodes,
            "window": [self.window.start, self.window.end] if self.window else None,
            "busy_share": self.busy_share,
            "trimmed_node_hours": self.trimmed_node_hours,
            "notes": list(self.notes),
        }
