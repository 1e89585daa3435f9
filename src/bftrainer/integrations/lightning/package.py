"""Package of Lightning: the same code is published as `lightning.pytorch` and as `pytorch_lightning`.

Classes of one are foreign to the other, so the classes of the package that the script uses are looked up by its name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from bftrainer.errors import InputError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package_of_script() -> str:
    """Return the name of the package that the script has imported."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    if len(imported) == 1:
        return imported[0]
    if imported:
        return _PACKAGES[1] if _main_uses(_PACKAGES[1]) and not _main_uses("lightning") else _PACKAGES[0]
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    raise InputError("ElasticStrategy needs Lightning: pip install 'bftrainer[lightning]'")


def package_of(trainer: Any) -> str:
    """Return the name of the package that a Trainer comes from."""
    kinds = [kind.__module__ for kind in type(trainer).__mro__]
    return next(name for name in _PACKAGES if any(kind.startswith(f"{name}.") for kind in kinds))


@functools.cache
def lookup(package: str, path: str) -> Any:
    """Return a module or an object of a package, such as `strategies.Strategy`."""
    found, place = importlib.import_module(package), package
    for name in path.split("."):
        place = f"{place}.{name}"
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(place)
    return found


def _main_uses(package: str) -> bool:
    """Return whether the main script has a name for this package, or for something of it."""
    names = vars(sys.modules.get("__main__", sys)).values()
    origins = [getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in names]
    return any(isinstance(origin, str) and f"{origin}.".startswith(f"{package}.") for origin in origins)
