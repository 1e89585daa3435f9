"""The pages of the documentation, taken apart: blocks, commands, headings and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])

_FENCE = re.compile(r"^(```+)(\w*)([^\n]*)\n(.*?)^\1 *$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its file name if it has one, its text, and why tests do not run it."""

    language: str
    title: str
    text: str
    not_run: str = ""


@dataclass(frozen=True)
class Step:
    """A command that a reader is to type, and the lines that a page says it prints."""

    command: str
    shows: tuple[str, ...] = ()
    not_run: str = ""


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page. `<!-- not run: REASON -->` before one says that its commands are only checked."""
    found = []
    text = page.read_text()
    for fence in _FENCE.finditer(text):
        _, language, more, body = fence.groups()
        title = re.search(r'title="([^"]+)"', more)
        mark = re.search(r"<!-- not run: (.+?) -->\s*\Z", text[: fence.start()])
        found.append(Block(language, title[1] if title else "", body, mark[1] if mark else ""))
    return found


def steps(page: Path) -> list[Step]:
    """What a reader is to type, in order: `sh` blocks, and what follows the prompt in `console` blocks."""
    found: list[Step] = []
    for block in blocks(page):
        if block.language == "sh" and not block.text.startswith("#!"):
            lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
            found += [Step(_bare(line), (), block.not_run) for line in lines]
        elif block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, *shows = part.splitlines()
                found.append(Step(_bare(command), tuple(line for line in shows if line.strip()), block.not_run))
    return found


def _bare(command: str) -> str:
    return re.sub(r"\s+# .*$", "", command)


def write_files(page: Path, folder: Path) -> None:
    """Put every block that has a file name where the page's commands look for it."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`, by the rule that GitHub and our site share."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        unique, number = slug, 0
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def links(page: Path) -> list[str]:
    """Where a page points, outside its blocks and code."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text)
