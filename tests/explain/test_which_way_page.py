"""The page "Which way for my script?": it shows what the command prints, and the lines that the command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.cli.main import run
from bftrainer.explain import Explanation, lines
from bftrainer.explain.lines import WAYS
from support.docs.pages import DOCS, blocks, prose, write_files

PAGE = DOCS / "which-way.md"


def test_the_shown_output_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = {block.language: block.text for block in blocks(PAGE) if not block.title}
    assert run(shown["sh"].split()[1:]) == 0
    assert capsys.readouterr().out == shown["text"]


def test_every_way_has_its_row() -> None:
    text = prose(PAGE)
    assert [way for way in WAYS if f"| `{way}` |" not in text] == []


def test_the_lines_of_each_way_are_those_that_the_command_writes() -> None:
    diff = next(block.text for block in blocks(PAGE) if block.language == "diff")
    for line in (
        lines.IMPORT_ELASTIC,
        f"= {lines.PREPARE}(",
        f"in {lines.EPOCHS}(n)",
        lines.IMPORT_TRANSFORMERS,
        lines.ELASTIC_TRAINER.format(trainer="Trainer"),
        lines.IMPORT_ACCELERATOR.format(name="Accelerator"),
        lines.IMPORT_LIGHTNING,
        f"strategy={lines.ELASTIC_STRATEGY}",
    ):
        assert line in diff
    for name in (lines.STEPS, lines.MICRO_STEPS, lines.VALUE, lines.SYNCHRONIZE, lines.IS_MAIN):
        assert name in PAGE.read_text()


def test_the_json_keys_are_all_described() -> None:
    text = prose(PAGE)
    assert [key for key in Explanation("s", "none", "").as_json() if f"`{key}`" not in text] == []
