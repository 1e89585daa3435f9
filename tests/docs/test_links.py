"""Every link of every page resolves, with the place in the page that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.docs.pages import DOCS, PAGES, ROOT, anchors, links

NAVIGATION = (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES])
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_found_from_the_first_one() -> None:
    """From the README, by way of pages that are linked there, or in the site's navigation."""
    found: set[Path] = set()
    looking = [ROOT / "README.md", *(DOCS / name for name in re.findall(r"\b(\w+\.md)$", NAVIGATION, re.MULTILINE))]
    while looking:
        page = looking.pop()
        if page in found or page.suffix != ".md" or not page.exists():
            continue
        found.add(page)
        looking += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link]
    assert sorted(set(DOCS.glob("*.md")) - found) == []
