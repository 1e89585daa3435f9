"""What `git clone` and `make setup` leave behind, without the minutes that they take: a copy of this tree."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from support.docs.pages import ROOT

VENV = ROOT / ".venv"
STAMP = ".bftrainer-setup"


def clone(folder: Path) -> None:
    """Copy what git knows, or would take in, and borrow this tree's environment.

    `scripts/setup.sh` must find the environment up to date in its new place; the pages' tests see to it that it does.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # and not deleted just now
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for compiled in (ROOT / "tests").rglob("*.pyc"):  # of modules that have not changed: to find all tests takes less
        with suppress(FileNotFoundError):
            (folder / compiled.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(compiled, folder / compiled.relative_to(ROOT))
    (folder / ".venv").mkdir()
    for entry in VENV.iterdir():
        if entry.name != STAMP:
            (folder / ".venv" / entry.name).symlink_to(entry)
    contents = b"".join(
        (folder / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh")
    )
    python = subprocess.run(
        [os.environ.get("PYTHON", "python3"), "-V"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (folder / ".venv" / STAMP).write_text(f"{hashlib.sha256(contents).hexdigest()}-{python}-{folder}")
