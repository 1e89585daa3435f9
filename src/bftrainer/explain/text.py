"""Text form of an explanation, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from bftrainer.explain.lines import WAYS
from bftrainer.explain.report import Evidence, Explanation, Notice

WIDTH = 110


def as_text(explanation: Explanation) -> str:
    """Return an explanation as lines of text."""
    return "\n".join(_lines(explanation))


def _lines(explanation: Explanation) -> Iterator[str]:
    way = WAYS[explanation.way]
    yield f"{explanation.script}: {way.title}" if explanation.way != "none" else f"{explanation.script}: no way found"
    yield way.meaning
    yield from _evidence(explanation.evidence)
    if explanation.diff:
        yield from ("", "Change these lines:", "")
        yield from (f"  {line}".rstrip() for line in explanation.diff.splitlines())
    restarts = explanation.way == "torchrun"  # what is refused is why there is no other way
    yield from _notices("Why no other way:" if restarts else "Refused as it is:", explanation.refused)
    yield from _notices("Look at:" if explanation.way != "none" else "What is possible:", explanation.warnings)
    if explanation.command:
        mended = explanation.refused and not restarts
        first = "When that is mended, submit it:" if mended else "Submit it:"
        yield from ("", "Then submit it:" if explanation.changes else first, "", f"  {explanation.command}")


def _evidence(evidence: Sequence[Evidence]) -> Iterator[str]:
    if evidence:
        yield from ("", "Why:", "")
    rows = [(_place(one), one.text if len(one.text) <= 60 else f"{one.text[:57]}…", one.what) for one in evidence]
    places = max((len(place) for place, _, _ in rows), default=0)
    texts = max((len(text) for _, text, _ in rows), default=0)
    for place, text, what in rows:
        yield f"  {place:{places}}  {text:{texts}}  {what}"


def _notices(title: str, notices: Sequence[Notice]) -> Iterator[str]:
    if notices:
        yield from ("", title)
    for one in sorted(notices, key=lambda notice: (notice.file, notice.line)):
        yield ""
        yield from textwrap.wrap(f"{_place(one)}  {one.what}.", WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield from textwrap.wrap(f"→ {one.remedy}.", WIDTH, initial_indent="    ", subsequent_indent="      ")


def _place(one: Evidence | Notice) -> str:
    return f"{one.file}:{one.line}"
