"""Other programs: scripts without PyTorch training, and what is possible for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bftrainer.explain.places import evidence, notice
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Evidence, Notice
from bftrainer.explain.training.loops import backward_calls

_PACKAGES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "jax": "JAX",
    "flax": "JAX",
    "sklearn": "scikit-learn",
    "xgboost": "XGBoost",
    "lightgbm": "LightGBM",
    "mxnet": "MXNet",
    "fastai": "fastai",
    "composer": "Composer",
}
_STARTS = re.compile(
    r"\b(torchrun|accelerate launch|torch\.distributed\.(run|launch)|deepspeed|horovodrun|mpirun|srun)\b"
)
_MEMBERSHIP = (
    "any iterative program can be a trainer by bftrainer.elastic.membership; a program that saves and loads its state "
    "can restart at each change with --launcher torchrun, and one that asks where it may run fits --launcher hosts"
)


def restart_evidence(program: Program) -> list[Evidence]:
    """Return the lines that show a training that can only restart, such as that of Lightning Fabric."""
    names = ("lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric")
    fabrics = [call for call in program.calls if program.name(call.func) in names]
    return [evidence(program, call, "Fabric makes the process group itself") for call in fabrics]


def other_evidence(program: Program) -> list[Evidence]:
    """Return the lines that show what a script is that does not train with PyTorch."""
    return [evidence(program, node, what) for node, what in _signs(program)]


def other_notices(program: Program) -> list[Notice]:
    """Say what is possible for such a script."""
    script = program.files[0]
    signs = list(_signs(program))
    starter = next((node for node, what in signs if what.startswith("starts")), None)
    if starter is not None:
        what = "the script starts another one that trains"
        return [notice(program, starter, what, "submit the script that trains, not its launcher")]
    if signs:
        node, what = signs[0]
        return [notice(program, node, f"{what}: there is no adapter for it", _MEMBERSHIP)]
    backwards = backward_calls(program)
    if backwards:
        what = "gradients are computed here, but no optimizer was found that is stepped"
        return [notice(program, backwards[0], what, "update the weights with an optimizer of torch.optim")]
    what = "no line computes gradients and steps an optimizer, in this file and in the modules beside it"
    remedy = f"name the script that holds the training loop. Apart from that, {_MEMBERSHIP}"
    return [Notice(script.name, 1, what, remedy)]


def _signs(program: Program) -> Iterator[tuple[ast.AST, str]]:
    for file in program.files:
        for node in ast.walk(file.tree):
            packages = []
            if isinstance(node, ast.Import):
                packages = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                packages = [(node.module or "").partition(".")[0]]
            for package in packages:
                if package in _PACKAGES:
                    yield node, f"uses {_PACKAGES[package]}"
    for call in program.calls:
        if program.name(call.func).partition(".")[0] not in ("subprocess", "os"):
            continue
        for node in ast.walk(call):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = _STARTS.search(node.value)
                if found:
                    yield node, f"starts {found[0]}"
