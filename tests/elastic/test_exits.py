"""Exit handlers can tell a script that ended well from one that did not, without torch or a manager."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits

WATCH = """
import atexit, sys
from bftrainer.processes import exits
atexit.register(lambda: print(exits.ended_well(), flush=True))
exits.watch()
"""
AS_MAIN = "import sys; from bftrainer.processes.forker import run_as_main; run_as_main((sys.argv[1],))"
"""How a forked worker runs its script."""
GOOD = ["pass", "sys.exit(0)", "raise SystemExit"]
BAD = ["sys.exit(3)", "sys.exit('no data')", "1 / 0"]
ONLY_AS_MAIN = ["raise SystemExit(3)", "exit(3)"]
"""A plain interpreter tells its exit handlers nothing of these."""


def seen(folder: Path, end: str, *python: str) -> tuple[str, int]:
    """What an exit handler saw at the end of a script, and the status of its process."""
    script = folder / "script.py"
    script.write_text(f"{WATCH}\n{end}\n")
    done = subprocess.run([sys.executable, *python, str(script)], capture_output=True, text=True, timeout=60)
    return done.stdout.strip(), done.returncode


@pytest.mark.parametrize("python", [(), ("-c", AS_MAIN)], ids=["plain", "forked"])
@pytest.mark.parametrize("end", GOOD)
def test_a_good_end_is_seen(end: str, python: tuple[str, ...], tmp_path: Path) -> None:
    assert seen(tmp_path, end, *python) == ("True", 0)


@pytest.mark.parametrize(
    ("end", "python"),
    [(end, ()) for end in BAD] + [(end, ("-c", AS_MAIN)) for end in BAD + ONLY_AS_MAIN],
)
def test_a_bad_end_is_seen(end: str, python: tuple[str, ...], tmp_path: Path) -> None:
    words, status = seen(tmp_path, end, *python)
    assert words == "False"
    assert status > 0


def test_an_exception_that_the_script_catches_is_no_bad_end(tmp_path: Path) -> None:
    assert seen(tmp_path, "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass") == ("True", 0)
