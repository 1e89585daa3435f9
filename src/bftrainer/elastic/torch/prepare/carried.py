"""Carried variables: plain variables of the script's module that newcomers and resumed runs receive with the state.

`elastic.prepare(…, carry=("best",))` names them. The script uses them as before. This module reads them from the
globals of the script's module and writes received values there. It refuses what ranks could not receive alike.
"""

from __future__ import annotations

import dis
import inspect
import keyword
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bftrainer.elastic.torch.state.transfer import FreshState
from bftrainer.elastic.torch.value import plain
from bftrainer.errors import InputError

Globals = dict[str, Any]
"""The variables of a module by name."""
_PACKAGE = __name__.partition(".")[0]
_INSTALLED = re.compile(r"(site|dist)-packages|python3\.\d+")
"""Folders of packages and of Python's own modules."""


class CarriedVariables(FreshState):
    """Variables that the script has named in its calls of `elastic.prepare`."""

    def __init__(self) -> None:
        self._homes: dict[str, Globals] = {}  # the module of each variable

    def checked(self, carry: str | Collection[str], frame: FrameType) -> dict[str, Globals]:
        """Check the variables that a call names, and return each with its module. `frame` is that of the caller."""
        names = _names(carry)
        for name in names:
            if name in self._homes or names.count(name) > 1:
                raise InputError(f"`{name}` was given to `carry` twice; give each name once")
            if name in _locals_of(frame):
                raise InputError(
                    f"`{name}` is a local variable of {frame.f_code.co_name}(), but `carry` takes variables of the "
                    f"script's module; {_remedy(name)}"
                )
            if name not in frame.f_globals:
                raise InputError(
                    f"`carry` names `{name}`, but the module that calls elastic.prepare() has no such variable yet; "
                    f"set it before that call. If it is a local variable of a function, {_remedy(name)}"
                )
            script = _script_of(frame)
            if frame.f_globals is not script and name in script:
                raise InputError(
                    f"`carry` names `{name}`, which both the script and the module {frame.f_globals['__name__']}, "
                    "which calls elastic.prepare(), have: call it in the script, or rename one of them"
                )
        found = dict.fromkeys(names, frame.f_globals)
        _read({**self._homes, **found})
        return found

    def add(self, variables: Mapping[str, Globals]) -> None:
        """Carry the variables that `checked` has returned."""
        self._homes |= variables

    @property
    def names(self) -> Collection[str]:
        """The variables that are carried."""
        return self._homes.keys()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the values. A variable that holds a numpy number is set to the plain number.

        Newcomers receive plain numbers, so all ranks go on with these.
        """
        state = _read(self._homes)
        for name, value in state.items():
            if type(self._homes[name][name]) is not type(value):
                self._homes[name][name] = value
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the variables to received values. Lists and dicts are changed in place, for other names they have."""
        if state.keys() != self._homes.keys():
            theirs, ours = ", ".join(sorted(state)), ", ".join(sorted(self._homes))
            raise InputError(f"it has the carried variables {theirs}, but this script carries {ours}")
        used: set[int] = set()
        for name, value in state.items():
            home = self._homes[name]
            home[name] = _put_into(home.get(name), value, used)

    def refuse_hidden(self, frame: FrameType | None) -> None:
        """Refuse a training loop in a function with a local variable that has the name of a carried one.

        The loop changes the local variable then. An argument that is the carried list or dict itself is fine. `frame`
        is where the loop runs.
        """
        while frame is not None and self._homes:
            for name, home in self._homes.items():
                self._refuse_other_module(name, home, frame)
            for name in _locals_of(frame) & self._homes.keys():
                home = self._homes[name]
                if _is_of_script(frame, home) and not _is_shared(home.get(name), frame.f_locals.get(name)):
                    function = frame.f_code.co_name
                    raise InputError(
                        f"`carry` names the variable `{name}` of the module, but {function}(), in which the training "
                        f"loop runs, has a local variable `{name}`, which would be lost; write `global {name}` in "
                        f"{function}(), or {_remedy(name)}"
                    )
            frame = frame.f_back

    def _refuse_other_module(self, name: str, home: Globals, frame: FrameType) -> None:
        """Refuse a training loop in another module of the script that has a variable of its own of that name."""
        module = frame.f_globals
        if module is home or name not in module or not _is_of_script(frame, home):
            return
        changes = name in _assigned(frame.f_code) or isinstance(module[name], list | dict)
        if changes and name in frame.f_code.co_names and not _is_shared(home.get(name), module[name]):
            raise InputError(
                f"`carry` names the variable `{name}` of the module {home['__name__']}, but {frame.f_code.co_name}(), "
                f"in which the training loop runs, uses that of the module {module['__name__']}, which would be lost; "
                f"call elastic.prepare() in that module, or {_remedy(name)}"
            )


def calling_frame() -> FrameType:
    """Return the frame of the script that has called this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_of_package(frame):
        frame = frame.f_back
    assert frame is not None
    return frame


def _script_of(frame: FrameType) -> Globals:
    """Return the variables of the script's module; nothing if no frame of it is found."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_globals.get("__name__") == "__main__" and not _is_of_package(outer):
            return outer.f_globals
        outer = outer.f_back
    return {}


def _is_of_script(frame: FrameType, module: Globals) -> bool:
    """Return whether a frame runs code of a module, or of another one of the user's below the same folder."""
    if frame.f_globals is module:
        return True
    script = module.get("__file__")
    if script is None or _is_of_package(frame):
        return False
    path, folder = _resolved(frame.f_code.co_filename), _resolved(script).parent
    return path.is_relative_to(folder) and not any(map(_INSTALLED.fullmatch, path.relative_to(folder).parts))


def _is_shared(one: Any, other: Any) -> bool:
    """Return whether two variables hold the same list or dict, so that a change of either is one of both."""
    return isinstance(one, list | dict) and one is other


@lru_cache(maxsize=256)
def _assigned(code: CodeType) -> frozenset[str]:
    """Return the variables of its module that some code assigns to."""
    stores = ("STORE_GLOBAL", "STORE_NAME")
    return frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname in stores)


@lru_cache(maxsize=256)
def _resolved(path: str) -> Path:
    return Path(path).resolve()


def _is_of_package(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


def _remedy(name: str) -> str:
    return f"write {name} = elastic.Value(…), give it to elastic.prepare() and use {name}.value"


def _names(carry: object) -> list[str]:
    names = [carry] if isinstance(carry, str) else carry
    if not isinstance(names, list | tuple | set | frozenset):
        raise InputError(
            '`carry` must be the names of variables, such as carry=("best", "patience"), and not their values, but got '
            f"{type(carry).__name__}"
        )
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise InputError(
                '`carry` must be the names of variables of the script\'s module, such as carry=("best", "patience"), '
                f"but got {name!r}; an attribute or an item becomes an elastic.Value, given to elastic.prepare()"
            )
    return list(names)


def _locals_of(frame: FrameType) -> set[str]:
    """Return the names of the local variables of the function that a frame runs; none for a module."""
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED:
        return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return set() if frame.f_locals is frame.f_globals else set(frame.f_locals)


def _read(homes: Mapping[str, Globals]) -> dict[str, Any]:
    """Return a copy of the values of variables."""
    seen: dict[int, str] = {}
    state = {}
    for name, home in homes.items():
        if name not in home:
            raise InputError(f"`{name}`, which `carry` names, was deleted; set it to None instead")
        value = home[name]
        if hasattr(value, "state_dict"):
            raise InputError(
                f"`{name}`, which `carry` names, is an object with state_dict(), not a plain value; give it to "
                f"elastic.prepare() itself: elastic.prepare({name}, …)"
            )
        _refuse_shared(name, value, seen)
        state[name] = plain(value, f"`{name}`, which `carry` names,")
    return state


def _refuse_shared(name: str, value: Any, seen: dict[int, str]) -> None:
    """Refuse a list or dict that carried variables hold twice: a rank that receives them would have two."""
    if isinstance(value, list | dict):
        if id(value) in seen:
            kind = type(value).__name__
            other = f"in `{seen[id(value)]}`" if seen[id(value)] != name else "in another place of it"
            raise InputError(
                f"`{name}`, which `carry` names, is or holds a {kind} that is also {other}, but a node that joins "
                f"later would have two of them; make a copy: {kind}(…)"
            )
        seen[id(value)] = name
    if isinstance(value, list | dict | tuple):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for item in items:
            if isinstance(item, list | dict | tuple):
                _refuse_shared(name, item, seen)


def _put_into(old: Any, new: Any, used: set[int]) -> Any:
    """Return a copy of the value `new`. It is the list or dict `old`, changed in place, if that has the same type.

    `used` are lists and dicts that have received a value already: a second one must not change them again.
    """
    fits = type(old) is type(new) and id(old) not in used
    if isinstance(new, list | tuple):
        held = list(old) if fits else []
        items = [_put_into(held[at] if at < len(held) else None, item, used) for at, item in enumerate(new)]
        if isinstance(new, tuple):
            return tuple(items)
        if not fits:
            return items
        used.add(id(old))
        old[:] = items
        return old
    if isinstance(new, dict):
        pairs = {key: _put_into(old.get(key) if fits else None, item, used) for key, item in new.items()}
        if not fits:
            return pairs
        used.add(id(old))
        old.clear()
        old.update(pairs)
        return old
    return new
