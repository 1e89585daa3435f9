"""A refusal is printed as the line of the user's script and one sentence; other errors keep their traceback."""

from __future__ import annotations

import contextlib
from pathlib import Path

from bftrainer.elastic import refusal_line
from bftrainer.errors import BFTrainerError, InputError


def caught(path: Path, text: str) -> BaseException:
    """The error that a script raises."""
    path.write_text(text)
    try:
        exec(compile(text, str(path), "exec"), {"InputError": InputError, "BFTrainerError": BFTrainerError})
    except Exception as problem:
        return problem
    raise AssertionError("the script raised nothing")


def shown(path: Path, text: str) -> str | None:
    problem = caught(path, text)
    return refusal_line.as_line(problem, problem.__traceback__)


def test_a_refusal_is_one_line_with_the_place_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = "def step():\n    raise InputError('the batch is empty')\n\nstep()\n"
    assert shown(script, text) == f"bftrainer: {script}:2: the batch is empty"


def test_frames_inside_bftrainer_and_installed_packages_are_no_place(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "torch.py"
    installed.parent.mkdir()
    problem = caught(installed, "raise InputError('no')\n")
    here = problem.__traceback__
    assert here is not None
    assert refusal_line.as_line(problem, here.tb_next) == "bftrainer: no"
    assert refusal_line.as_line(problem, None) == "bftrainer: no"
    assert not refusal_line._is_users(str(Path(refusal_line.__file__)))
    assert not refusal_line._is_users("<frozen runpy>")
    assert not refusal_line._is_users(str(Path(contextlib.__file__)))


def test_a_folder_whose_name_begins_like_the_packages_is_the_users(tmp_path: Path) -> None:
    package = Path(refusal_line.__file__).resolve().parents[1]
    assert refusal_line._is_users(str(package.with_name(f"{package.name}-scripts") / "train.py"))


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    assert shown(tmp_path / "train.py", "raise ValueError('no')\n") is None


def test_a_refusal_that_another_error_led_to_keeps_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    body = "try:\n    [][0]\nexcept IndexError as problem:\n    raise InputError('no'){}\n"
    assert shown(path, body.format("")) is None
    assert shown(path, body.format(" from problem")) is None
    assert shown(path, body.format(" from None")) == f"bftrainer: {path}:4: no"
