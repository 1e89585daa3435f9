"""Conditions: what a script computes with and finds at its start, which no import ahead of it may change.

`branch.py` leaves out modules whose import changes them. A module that seeds the random numbers, say, has to be
imported by the script itself, at its place in the script.
"""

from __future__ import annotations

import importlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NUMPY = "numpy.random"
_NAMESPACES = {
    "builtins": ("builtins",),
    "random": ("random",),
    "torch": (
        "torch",
        "torch.nn",
        "torch.nn.functional",
        "torch.nn.init",
        "torch.optim",
        "torch.optim.lr_scheduler",
        "torch.utils.data",
    ),
}
"""Modules whose names, and those of their classes, no import may replace, by the module that loads them."""


class NoArguments(list[str]):
    """`sys.argv` of an interpreter that runs no script, `[""]`. It notes whether it is used."""

    def __init__(self) -> None:
        super().__init__([""])
        self._used = False

    def is_used(self) -> bool:
        """Whether something has looked at the arguments, or has changed them."""
        return bool(object.__getattribute__(self, "_used"))

    def __getattribute__(self, name: str) -> Any:
        if name not in {"__class__", "is_used"}:
            self._used = True
        return super().__getattribute__(name)

    def __getitem__(self, index: Any) -> Any:
        self._used = True
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._used = True
        super().__setitem__(index, value)

    def __delitem__(self, index: Any) -> None:
        self._used = True
        super().__delitem__(index)

    def __iter__(self) -> Iterator[str]:
        self._used = True
        return super().__iter__()

    def __len__(self) -> int:
        self._used = True
        return super().__len__()

    def __contains__(self, item: object) -> bool:
        self._used = True
        return super().__contains__(item)

    def __add__(self, other: Any) -> Any:
        self._used = True
        return super().__add__(other)

    def __repr__(self) -> str:
        self._used = True
        return super().__repr__()


class Conditions:
    """The conditions before an import. Those of a library that the import itself loads are as it was loaded."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._names: dict[str, tuple[object, dict[str, Any]]] = {}
        """What each namespace belongs to, and its contents."""
        self._seen: set[str] = set()
        for library in (*_NAMESPACES, _NUMPY):
            self._see(library)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at libraries that are loaded meanwhile, before their importer can change anything in them."""
        bootstrap: Any = importlib._bootstrap
        loads = bootstrap._find_and_load

        def load(name: str, import_: Any) -> Any:
            module = loads(name, import_)
            if name == _NUMPY or name in _NAMESPACES:
                self._see(name)
            return module

        bootstrap._find_and_load = load
        try:
            yield
        finally:
            bootstrap._find_and_load = loads

    def changed(self) -> str:
        """Return what has changed since, or an empty text."""
        for library in self._seen:
            for what, state in _states(library).items():
                if state() != self._states[what]:
                    return f"changes {what}"
        for where, (owner, before) in self._names.items():
            present = vars(owner)
            for name, value in before.items():
                if present.get(name, before) is not value and not _is_torchs_own(where, name):
                    return f"replaces {where}.{name}"
        return ""

    def _see(self, library: str) -> None:
        if library in self._seen or not _is_loaded(library):
            return
        self._seen.add(library)
        self._states |= {what: state() for what, state in _states(library).items()}
        for name in _NAMESPACES.get(library, ()):
            module = sys.modules[name]
            self._names[name] = module, dict(vars(module))
            for each, value in vars(module).items():
                if isinstance(value, type):
                    self._names[f"{name}.{each}"] = value, dict(vars(value))


def _is_loaded(library: str) -> bool:
    """Whether a library is loaded completely."""
    module = sys.modules.get(library)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _states(library: str) -> Mapping[str, Callable[[], Any]]:
    """Return the states that come with a library, and how to look at them."""
    module: Any = sys.modules[library]
    match library:
        case "builtins":
            return {
                "the current directory": _current_directory,
                "sys.argv or reads it": lambda: isinstance(sys.argv, NoArguments) and not sys.argv.is_used(),
                "the first folder of sys.path": lambda: sys.path[:1],
            }
        case "random":
            return {"the state of random": random.getstate}
        case "torch":
            return {
                "the state of torch's random numbers": lambda: bytes(module.default_generator.get_state().tolist()),
                "torch's default dtype": module.get_default_dtype,
                "torch's use of deterministic algorithms": module.are_deterministic_algorithms_enabled,
                "whether torch computes gradients": module.is_grad_enabled,
            }
    return {"the state of numpy.random": lambda: pickle.dumps(module.get_state(legacy=False))}


def _current_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text
    except FileNotFoundError:
        return ""


def _is_torchs_own(where: str, name: str) -> bool:
    """Whether torch itself has replaced a name, as `torch._dynamo` does with one function when it is imported."""
    if (where, name) != ("torch", "manual_seed"):
        return False
    torch = sys.modules["torch"]
    code = getattr(torch.manual_seed, "__code__", None)
    return code is not None and Path(str(torch.__file__)).parent in Path(code.co_filename).parents
