"""SVG drawing for the simulation report: a few marks as inline SVG.

Numbers come in, strings of SVG go out; `charts.py` and `gantt.py` call it. Colours are CSS variables of the page, so
one drawing serves light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bftrainer.core.trace import Window, utc
from bftrainer.dashboard.html import escape

WIDTH = 1040
_TIME_STEPS_S = (60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, *(86400 * d for d in (1, 2, 4, 7, 14, 28)))
_LONGEST_NAME = 120


def shortened(name: str, most: int = _LONGEST_NAME) -> str:
    """A name of bounded length that keeps both ends, since names tend to differ in either."""
    if len(name) <= most:
        return name
    tail = (most - 1) // 2
    return f"{name[: most - 1 - tail]}…{name[-tail:]}"


def px(value: float) -> str:
    """A coordinate rounded to a tenth, as short as possible: thousands of them determine the size of the page."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Frame:
    """Position of a chart over time, and the scale of its axes."""

    window: Window
    low: float
    high: float
    height: float
    """Height of the whole picture, axes included."""
    left: float = 56.0
    right: float = 12.0
    top: float = 24.0
    bottom: float = 40.0

    def x(self, time: float) -> float:
        """Horizontal position of a time."""
        return self.left + (time - self.window.start) / self.window.seconds * (WIDTH - self.left - self.right)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        inside = self.height - self.top - self.bottom
        return self.top + (self.high - value) / ((self.high - self.low) or 1.0) * inside

    def axes(self, unit: str) -> str:
        """The grid, the values on the left and the times below."""
        parts = [f'<text class="unit" x="{px(self.left)}" y="{px(self.top - 10)}">{escape(unit)}</text>']
        for value in value_ticks(self.low, self.high):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{px(self.left)} {px(y)}H{px(WIDTH - self.right)}"/>')
            parts.append(f'<text class="end" x="{px(self.left - 7)}" y="{px(y + 4)}">{value:,g}</text>')
        parts.append(self.time_axis())
        return "".join(parts)

    def time_axis(self) -> str:
        """The times below, in UTC; the date is written under the first time of each day."""
        floor = self.height - self.bottom
        parts = []
        day_before = ""
        step, times = time_ticks(self.window)
        for time in times:
            x, (day, _, clock) = self.x(time), utc(time).partition("T")
            parts.append(f'<path class="grid" d="M{px(x)} {px(self.top)}V{px(floor + 5)}"/>')
            words = [day[5:]] if step >= 86400 else [clock[:5], day[5:] if day != day_before else ""]
            for line, word in enumerate(filter(None, words)):
                parts.append(f'<text class="mid" x="{px(x)}" y="{px(floor + 18 + 14 * line)}">{word}</text>')
            day_before = day
        return "".join(parts)

    def across(self, value: float, style: str) -> str:
        """A horizontal line from side to side."""
        return f'<path class="{style}" d="M{px(self.left)} {px(self.y(value))}H{px(WIDTH - self.right)}"/>'


def picture(height: float, label: str, parts: Iterable[str], kind: str = "wide") -> str:
    """The whole drawing, as wide as the page; `label` is for screen readers. A `narrow` drawing may shrink."""
    return (
        f'<div class="{kind}"><svg viewBox="0 0 {WIDTH} {px(height)}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>\n"
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colours and their meaning."""
    items = (f'<li><i style="background:{colour}"></i>{escape(text)}</li>' for colour, text in entries)
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def value_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from `low` to `high`, at most about `most` of them."""
    raw = (high - low) / most
    if not (math.isfinite(raw) and raw > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def time_ticks(window: Window, most: int = 14) -> tuple[float, Sequence[float]]:
    """Round times in a window, and the step from one to the next."""
    coarse = math.ceil(window.seconds / most / 86400) * 86400
    step = next((s for s in _TIME_STEPS_S if window.seconds / s <= most), coarse)
    first = math.ceil(window.start / step) * step
    return step, [first + i * step for i in range(int((window.end - first) // step) + 1)]
