"""Every command of ours that a page shows exists, with the options it is shown with, also where no test can run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.docs.pages import PAGES, ROOT, blocks
from support.docs.terminal import known


def shown(page: Path) -> list[str]:
    """Lines of blocks that call `bftrainer`; placeholders such as NAME and `…` are left out."""
    lines = [
        line for block in blocks(page) if block.language in ("", "sh", "console") for line in block.text.splitlines()
    ]
    found = [re.sub(r"^(\$ )?(PYTHONPATH=\. )?|\s+#.*$", "", line) for line in lines]
    return [line for line in found if line.startswith("bftrainer ") and not re.search(r"[…\[\]◄─►|>]", line)]


@pytest.mark.parametrize("page", [p for p in PAGES if shown(p)], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    for command in shown(page):
        known(command)
