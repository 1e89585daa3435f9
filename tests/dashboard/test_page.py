"""What the page makes of what it is told: names that are meant badly, figures that are no numbers, long words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsing import Watched, needs_browser, until
from stage import NOW, TOKEN, Stage, trainer

pytestmark = needs_browser


@pytest.fixture(scope="module")
def served() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.fixture(scope="module")
def window(browser: Any, served: Stage) -> Iterator[Watched]:
    """One for all tests: it takes a while to open, and to read Plotly."""
    with Watched(browser, served.url) as found:
        found.page.set_default_timeout(20_000)
        found.page.goto(f"{served.url}/#token={TOKEN}")
        yield found


@pytest.fixture
def stage(served: Stage, window: Watched) -> Iterator[Stage]:
    """What the page is told; it begins as after another login, and it must not complain."""
    served.reset()
    window.page.set_viewport_size({"width": 1280, "height": 900})
    yield served
    complaints, window.complaints[:] = list(window.complaints), []
    assert complaints == []


@pytest.fixture
def page(stage: Stage, window: Watched) -> Any:
    return window.page


def enter(page: Any) -> None:
    """Log in."""
    if page.is_visible("#leave"):
        page.click("#leave") if not page.is_visible("dialog[open]") else page.reload()
    if page.is_visible("#login"):
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
    page.wait_for_selector("#link.live")
    page.wait_for_selector("#gantt[data-runs]")


def details(page: Any) -> None:
    """Log in and open the first trainer."""
    enter(page)
    page.click("#trainers tr button")
    page.wait_for_selector("#detail .plot .main-svg")


def test_a_metric_cannot_put_a_link_into_the_page(page: Any, stage: Stage) -> None:
    name = '<a href="https://evil.example/x">loss</a>'
    points = [{"time": NOW - 30 + i, "samples": i, "metrics": {name: 3.0 + i, "b&amp;c": 1.0}} for i in range(9)]
    stage.show(trainer(name="<a href='https://evil.example/y'>x</a>", metrics={name: 3.0}), points)
    details(page)
    page.wait_for_selector("#detail .small-plots .main-svg")
    until(page, "document.querySelectorAll('#detail .small-plots .main-svg').length >= 4")  # two for each plot
    assert page.evaluate("document.querySelectorAll('a:not(.skip)').length") == 0
    assert "loss</a>" in page.inner_text("#detail .small-plots"), "it is written as it was given"


def test_each_metric_has_its_own_scale(page: Any, stage: Stage) -> None:
    names = ["lr", "loss", "perplexity", *(f"m{i}" for i in range(7))]
    points = [{"time": NOW - 30 + i, "samples": i, "metrics": dict.fromkeys(names, 1.0 + i)} for i in range(9)]
    for i, point in enumerate(points):
        point["metrics"] |= {"lr": 1e-4 / (1 + i), "loss": 3.0 - i / 9, "perplexity": 500.0 - i}
    stage.show(trainer(), points)
    lines = "document.querySelectorAll('#detail .small-plots .scatterlayer path.js-line')"
    heights = f"[...{lines}].map((line) => line.getBBox().height)"
    details(page)
    until(page, f"{heights}.length === 8")
    assert min(page.evaluate(heights)) > 50, "no line is flat"
    page.click("text=All 10 metrics")
    until(page, f"{heights}.length === 10")
    page.click("text=Only the first 8")
    until(page, f"{heights}.length === 8")
