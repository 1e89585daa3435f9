"""The wheel has all that an installed BFTrainer needs, and is imported where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bftrainer
from bftrainer.dashboard import files

pytest.importorskip("hatchling")

pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("wheel")]  # it is built once

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as `make wheel` builds it, with the builder of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, ROOT], check=True, timeout=300)
    (found,) = folder.iterdir()
    return found


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"bftrainer-{bftrainer.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"bftrainer-{bftrainer.__version__}.dist-info/entry_points.txt").decode()
    source = {path.relative_to(SOURCE).as_posix() for path in (SOURCE / "bftrainer").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    examples = {f"bftrainer/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "examples").glob("*.py")}
    assert {"bftrainer/py.typed", *(f"bftrainer/dashboard/{name}" for name in ("index.html", *files.STATIC))} <= source
    assert len(examples) >= 3
    assert source | examples <= names
    beyond = {name for name in names - source if not name.startswith(("bftrainer/examples/", "bftrainer-"))}
    assert beyond == set()
    assert "bftrainer = bftrainer.cli.main:main" in entry_points


def test_the_wheel_is_imported_and_its_command_runs_without_pytorch(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sys.modules['torch'] = None\n"
        "import bftrainer, bftrainer.elastic.membership, bftrainer.simulate.study\n"
        "assert bftrainer.__file__.startswith(sys.argv[1]), bftrainer.__file__\n"
        "from bftrainer.dashboard import files\n"
        "assert files.read('index.html')\n"
        "from bftrainer.cli.main import run\n"
        "sys.exit(run(['submit', '--help']) or run(['--version']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"bftrainer {bftrainer.__version__}"
