"""A page in a browser, watched: it may ask nobody but its own controller and must have nothing to complain about."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dashboard import CHROMIUM
from support.waiting import wait_until

needs_browser = pytest.mark.skipif(
    importlib.util.find_spec("playwright") is None or not Path(CHROMIUM).exists(),
    reason="needs the playwright package and Debian's chromium",
)
DEADLINE_MS = 60_000


class Watched:
    """A page, and all that it asked for and complained about."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(DEADLINE_MS)
        self.url = url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._said)

    def _said(self, message: Any) -> None:
        # The browser itself notes an answer of 401; that it came is what one test is about.
        if message.type in ("error", "warning") and "401" not in message.text:
            self.complaints.append(message.text)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()
        if error[0] is None:
            assert self.complaints == []
            outside = [url for url in self.asked if not url.startswith((self.url, "data:", "blob:"))]
            assert outside == []
            assert not any("bft_" in url for url in self.asked if "#" not in url)


def until(page: Any, condition: str) -> None:
    """Wait for a condition. The browser's own waiting evaluates text in the page, which the page's policy forbids."""
    wait_until(lambda: page.evaluate(condition), condition, DEADLINE_MS / 1000)
