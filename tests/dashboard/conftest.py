"""A browser for all tests that want one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dashboard import CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()
