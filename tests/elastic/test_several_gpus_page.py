"""The script on the page about several GPUs trains as the page says, with two ranks on each of two nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = (Path(__file__).resolve().parents[2] / "docs/several-gpus.md").read_text()


@pytest.mark.docs
def test_the_script_of_the_page_has_two_ranks_on_each_of_two_nodes(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    argv = [sys.executable, "-m", "bftrainer.elastic.run", "--nodes", "2", "--ranks-per-node", "2", "train.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"node \d of .*", done.stdout))
    assert said == ["node 0 of 2 has 2 of 4 ranks"] * 3 + ["node 1 of 2 has 2 of 4 ranks"] * 3
