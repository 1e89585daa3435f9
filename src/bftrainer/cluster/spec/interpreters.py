"""Interpreters: which Python runs a trainer's script if its user names none.

A program that submits, through `Client` or a search, passes on its own interpreter. The command `submit` prefers that
of the active environment, because the one it runs in may be installed for commands only. Nodes must have the
interpreter under the same path.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.errors import InputError

_LOOK = "import importlib.util as u; print(*(n for n in ('torch', 'bftrainer') if u.find_spec(n)))"
_LOOK_S = 60.0
"""How long an interpreter may take to answer: its packages may be on a slow file system."""


def own_python() -> str:
    """Return the interpreter of this program, if PyTorch is installed there; otherwise it cannot run trainers."""
    return sys.executable if importlib.util.find_spec("torch") is not None else ""


def active_environment(variables: Mapping[str, str]) -> str:
    """Return the folder of the active virtual or conda environment, if it is not that of this program."""
    active = variables.get("VIRTUAL_ENV") or variables.get("CONDA_PREFIX") or ""
    return active if active and os.path.realpath(active) != os.path.realpath(sys.prefix) else ""


def in_active_environment(
    specs: Sequence[TrainerSpec], variables: Mapping[str, str], warn: Callable[[str], None]
) -> list[TrainerSpec]:
    """Return the specs with the interpreter of the active environment, unless they name one, or it has no PyTorch.

    Raises `InputError` if an elastic script would run there without BFTrainer.
    """
    active = active_environment(variables)
    if not active or all(spec.python for spec in specs):
        return list(specs)
    python = str(Path(active) / "bin" / "python")
    packages = _packages(python)
    if "torch" not in packages:
        own = own_python() or "the interpreter of the agents"
        warn(f"the environment {active} is active, but has no PyTorch: the script runs under {own}")
        return list(specs)
    if "bftrainer" not in packages and any(not spec.python and spec.launcher in ("elastic", "ddp") for spec in specs):
        raise InputError(
            f"the environment {active} is active, but has no BFTrainer, which an elastic script imports: install it "
            f"there with `{python} -m pip install bftrainer`, or choose another interpreter with --python"
        )
    chosen = {"submitted_python": python}
    return [spec if spec.python else spec.model_copy(update=chosen) for spec in specs]


def _packages(python: str) -> set[str]:
    """Return which of the packages torch and bftrainer an interpreter has; none if it cannot be run."""
    try:
        # In another folder, because a package in the current one is not installed.
        done = subprocess.run(  # noqa: S603 - the user's own interpreter
            [python, "-c", _LOOK], cwd=os.sep, capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(done.stdout.split()) if done.returncode == 0 else set()
