"""Settings that a controller stores in its database, for the commands that work on its state folder without it.

`serve` may be started with `--config` and `--set`, of which such a command knows nothing: `bftrainer prune` would
remove what the controller keeps. `serve` calls `store_settings`, and commands call `with_stored`.
"""

from __future__ import annotations

import getpass
import json
import os
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from bftrainer.cluster.config.keys import KEYS, Config, PoolSettings
from bftrainer.cluster.owners.modes import ACCOUNT_KEY
from bftrainer.cluster.store.store import Store

SETTINGS_KEY = "settings"
"""Key in the store of the settings, and of where they came from."""
SINCE_KEY = "retention_since"
"""Key in the store of the time from which the ages of finished trainers count at the earliest: the first start of a
controller that removes files. So an upgrade removes nothing by age at its first start."""
_NAMES = (
    *(f"retention.{key}" for key in KEYS["retention"]),
    "trainers.keep_events",
    "api.token_lifetime",
    "users.mode",
)


def store_settings(store: Store, config: Config, now: float) -> None:
    """Store a controller's settings and its account, and at the first start the time."""
    if store.kept(SINCE_KEY) is None:
        store.keep(SINCE_KEY, now)
    store.keep(ACCOUNT_KEY, [getpass.getuser(), os.geteuid()])
    values = {name: _value(config, name) for name in _NAMES}
    pool: dict[str, Any] = {
        "kind": config.pool.kind,
        "settings": json.loads(json.dumps({**config.pool.settings}, default=str)),
    }
    names = (*_NAMES, "pool.kind", *(f"pool.{key}" for key in pool["settings"]))
    outside = [name for name in names if not _is_from_file(config, name)]
    store.keep(SETTINGS_KEY, {"values": values, "file": _file(config), "outside_file": outside, "pool": pool})


def with_stored(config: Config, store: Store, *, named: bool) -> Config:
    """Return a command's configuration with the settings that a controller has stored.

    What the environment sets is not replaced, nor what the configuration file sets if it was `named` by the user or is
    the controller's own. Settings of the pool are replaced only if no file was named and the pool is of the same kind.
    """
    kept: dict[str, Any] = store.kept(SETTINGS_KEY, {})
    changes: dict[str, dict[str, Any]] = {}
    for name, value in kept.get("values", {}).items():
        in_environment = not _is_from_file(config, name)
        in_named_file = named and name in config.sources
        in_own_file = kept["file"] == _file(config) and name not in kept["outside_file"]
        if name in _NAMES and not (in_environment or in_named_file or in_own_file):
            section, _, key = name.partition(".")
            changes.setdefault(section, {})[key] = value
    parts: dict[str, Any] = {section: replace(getattr(config, section), **new) for section, new in changes.items()}
    if "pool" in kept and not named:
        parts["pool"] = _pool(config, kept)
    return replace(config, **parts)


def _pool(config: Config, kept: dict[str, Any]) -> PoolSettings:
    """Return the settings of the pool that a controller has stored, and those that the environment sets instead."""
    own_file = kept["file"] == _file(config)

    def stays(name: str) -> bool:
        return not _is_from_file(config, name) or (
            own_file and name in config.sources and name not in kept["outside_file"]
        )

    stored, given = kept["pool"], config.pool
    if stays("pool.kind") and given.kind != stored["kind"]:
        return given
    own = {key: value for key, value in given.settings.items() if stays(f"pool.{key}")}
    return PoolSettings(stored["kind"], MappingProxyType({**stored["settings"], **own}))


def _value(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def _is_from_file(config: Config, name: str) -> bool:
    """Whether the file sets it, or nothing does."""
    return config.sources.get(name, str(config.file)) == str(config.file)


def _file(config: Config) -> str | None:
    return None if config.file is None else str(config.file.resolve())
