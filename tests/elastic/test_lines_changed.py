"""The lines that a user changes to make a script elastic: at most five for each script in a well-known shape.

The ordinary script is made from the elastic one by a table of replacements. It runs by itself.
"""

from __future__ import annotations

import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from support.elastic.jobs import script

torch = pytest.importorskip("torch")

MOST_LINES = 5
IMPORT = "from bftrainer import elastic\n"

# What the user had before, by what stands in the elastic script.
ORDINARY = {
    "mnist_like": {
        f"\n{IMPORT}": "",
        "    model, optimizer, train_loader, scheduler = "
        "elastic.prepare(model, optimizer, train_loader, scheduler)\n": "",
    },
    "imagenet_like": {
        f"\n{IMPORT}": "",
        "model, optimizer, scheduler, scaler = "
        'elastic.prepare(model, optimizer, scheduler, scaler, carry="best")\n': "",
        "train_loader = elastic.prepare(train_loader)\n": "",
        "in elastic.epochs(epochs):": "in range(epochs):",
        "if is_best and elastic.is_main():": "if is_best:",
    },
    "gan_like": {
        f"\n{IMPORT}": "",
        "net_d, net_g, optimizer_d, optimizer_g, loader = "
        "elastic.prepare(net_d, net_g, optimizer_d, optimizer_g, loader)\n": "",
        "in elastic.epochs(epochs):": "in range(epochs):",
    },
    "nanogpt_like": {
        f"\n{IMPORT}": "",
        "model, optimizer = elastic.prepare(model, optimizer, seed=seed)\n": "",
        "in elastic.steps(max_iters):": "in range(max_iters):",
        "in elastic.micro_steps(gradient_accumulation_steps):": "in range(gradient_accumulation_steps):",
    },
    "vae_like": {
        f"\n{IMPORT}": "",
        "model, optimizer, loader = elastic.prepare(model, optimizer, loader)\n": "",
    },
}
ARGUMENTS = {
    "mnist_like": (2,),
    "imagenet_like": (2, 1),
    "gan_like": (2,),
    "nanogpt_like": (5, 0),
    "vae_like": (2, 0),
}


def elastic_text(name: str) -> str:
    return Path(script(f"prepared/{name}.py")).read_text()


def ordinary_text(name: str) -> str:
    """The script as its user had it before."""
    text = elastic_text(name)
    for new, old in ORDINARY[name].items():
        assert text.count(new) == 1, new
        text = text.replace(new, old)
    return text


def changed_lines(before: str, after: str) -> int:
    """The lines that are added, removed or changed. A changed line counts once, and blank lines do not count."""
    one, other = ([line for line in text.splitlines() if line.strip()] for text in (before, after))
    parts = SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in parts if tag != "equal")


def test_changed_lines_are_counted_once() -> None:
    assert changed_lines("a\nb\nc\n", "a\n\nb\nc\n") == 0
    assert changed_lines("a\nb\nc\n", "a\nB\nc\n") == 1
    assert changed_lines("a\nb\nc\n", "x\na\nB\nC\nd\n") == 4
    assert changed_lines("a\nb\nc\n", "a\n") == 2


@pytest.mark.parametrize("name", ORDINARY)
def test_at_most_five_lines_of_a_script_change(name: str) -> None:
    before, after = ordinary_text(name), elastic_text(name)
    count = changed_lines(before, after)
    print(f"{name}: {count} lines of {len(before.splitlines())}")
    assert 0 < count <= MOST_LINES


@pytest.mark.waits
@pytest.mark.parametrize("name", ORDINARY)
def test_the_ordinary_script_knows_nothing_of_bftrainer_and_trains(name: str, tmp_path: Path) -> None:
    text = ordinary_text(name)
    assert "bftrainer" not in text
    assert "elastic" not in text
    path = tmp_path / "train.py"
    path.write_text(text)
    words = [sys.executable, str(path), str(tmp_path), *map(str, ARGUMENTS[name])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "model.pt")
