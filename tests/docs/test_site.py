"""The site builds without a warning, has every page and all of the reference, and asks nobody else for anything."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from bftrainer.cli.main import COMMANDS
from support.docs.pages import DOCS, ROOT

pytestmark = pytest.mark.docs


def reference() -> ModuleType:
    """The script that fills the reference."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: make setup")
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*argv, "--site-dir", str(folder)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        fetches = given.get("src") or (given.get("href") if tag == "link" else None)
        if fetches and given.get("rel") not in ("next", "prev", "canonical"):
            self.addresses.append(fetches)


def test_the_site_has_every_page_and_needs_nothing_from_elsewhere(site: Path) -> None:
    for page in DOCS.glob("*.md"):
        html = site / page.with_suffix(".html").name
        assert html.is_file(), page.name
        parser = Fetched()
        parser.feed(html.read_text())
        assert parser.addresses
        assert [one for one in parser.addresses if re.match(r"(https?:)?//", one)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet.name
    for script in site.rglob("*.js"):
        assert not re.search(r"https://(unpkg|cdn|fonts)", script.read_text()), script.name


def test_the_site_has_the_examples_that_its_pages_name(site: Path) -> None:
    for example in re.findall(r"\(\.\./(examples/\w+\.py)\)", (DOCS / "elastic.md").read_text()):
        assert (site / example).read_text() == (ROOT / example).read_text()


def test_the_reference_of_the_site_is_filled(site: Path) -> None:
    text = (site / "reference.html").read_text()
    assert "<!-- " + "commands" not in text
    for words in ("bftrainer trace import", "GET /v1/status", "bftrainer.elastic.init", "allocate.problem.Claim"):
        assert words in text, words


def test_the_reference_has_every_command_and_every_request() -> None:
    made = reference()
    commands = made.commands()
    assert [name for name in COMMANDS if f"### `bftrainer {name}" not in commands] == []
    assert "### `bftrainer slurm check`" in commands
    requests = made.http()
    for path, methods in made.openapi()["paths"].items():
        for method in methods:
            assert f"### `{method.upper()} {path}`" in requests


def test_the_reference_of_python_has_all_that_it_names_with_what_it_is_for() -> None:
    made = reference()
    text = made.python()
    for module, names in made.PYTHON:
        if made.source(module) is None:
            continue  # not built yet
        for name in names:
            section = text.partition(f"### `{module}.{name}`\n")[2].partition("\n### ")[0]
            assert re.search(r"[a-z]{3}", re.sub(r"```.*?```", "", section, flags=re.DOTALL)), f"{module}.{name}"
