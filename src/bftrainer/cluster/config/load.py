"""The configuration loader reads a TOML file, the environment and the command line.

A variable such as `BFTRAINER_SERVER__PORT=0` overrides the file; the command line overrides both. `load_config` returns
a `Config` for `serve`. `describe` lists every key with its default, value and source, for `bftrainer config`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from bftrainer.cluster.config.keys import KEYS, SECTIONS, Config, PoolSettings
from bftrainer.cluster.config.rules import PLACEMENTS, some_path
from bftrainer.errors import InputError
from bftrainer.util.suggest import unknown

STATE = "BFTRAINER_STATE"
CONFIG = "BFTRAINER_CONFIG"
CLIENT_FILE = "client.json"
"""The file in the state folder with the controller's URL and the token of the user who started it."""
DATABASE_FILE = "bftrainer.db"
"""The controller's database in its state folder."""
_PREFIX = "BFTRAINER_"
_SYSTEM_FILE = Path("/etc/bftrainer.toml")
_MOST_BYTES = 1 << 20
_PATHS = ("server.state", "policy.placement", "api.certificate", "api.key", "api.authority", "log.file")
_NO_PATHS = (*PLACEMENTS, "none")


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One key as `bftrainer config` shows it."""

    key: str
    default: Any
    value: Any
    source: str
    doc: str


def state_folder(env: Mapping[str, str], option: str | Path | None = None) -> Path:
    """Return the state folder: from an option, from `BFTRAINER_STATE`, or the default below the XDG state folder."""
    chosen = option or env.get(STATE) or env.get(f"{_PREFIX}SERVER__STATE")
    if chosen:
        try:
            return some_path(str(chosen))
        except ValueError:
            raise InputError(f"the state folder must be the path of a folder, but got {str(chosen)!r:.80}") from None
    base = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or str(Path.home()), ".local", "state")  # noqa: PTH118
    return Path(base).absolute() / "bftrainer"


def load_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Load the configuration: a file, then the environment, then `overrides` by `section.key` (None: not given)."""
    env = os.environ if env is None else env
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    option = given.get("server.state")
    default_state = state_folder(env, str(option) if option is not None else None)
    file = _find(path, env, default_state)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        for section, table in _tables(file).items():
            for key, value in table.items():
                _take(values, sources, section, key, _beside(file, section, key, value), str(file))
    for name, text in sorted(env.items()):
        section, separator, key = name.removeprefix(_PREFIX).lower().partition("__")
        if name.startswith(_PREFIX) and separator:
            _take(values, sources, section, key, _from_text(section, key, text), f"${name}")
    if env.get(STATE):
        _take(values, sources, "server", "state", env[STATE], f"${STATE}")
    for name, value in given.items():
        section, _, key = name.partition(".")
        plain = str(value) if isinstance(value, Path) else value
        plain = _from_text(section, key, plain) if isinstance(plain, str) else plain
        _take(values, sources, section, key, plain, "command line")
    return _built(values, sources, file, default_state)


def _built(values: Mapping[str, Any], sources: Mapping[str, str], file: Path | None, default_state: Path) -> Config:
    values = {"server.state": default_state, **values}
    state = values["server.state"]
    if file == default_state / "config.toml" and state != default_state:
        raise InputError(
            f"{sources['server.state']}: server.state must be {default_state}, where the file {file} was found, "
            f"but got {str(state)!r}"
        )
    parts: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        if section == "pool":
            name = own.pop("kind", PoolSettings().kind)
            parts[section] = PoolSettings(name, MappingProxyType(own))
        else:
            parts[section] = kind(**own)
    return Config(**parts, file=file, sources=MappingProxyType(dict(sources)))


def _find(path: Path | None, env: Mapping[str, str], state: Path) -> Path | None:
    """Return the file to read. A file that was named by the user must exist."""
    if path is not None:
        return path
    if env.get(CONFIG):
        return Path(env[CONFIG])
    return next((file for file in (state / "config.toml", _SYSTEM_FILE) if file.is_file()), None)


def _tables(file: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a file."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(f"{file}: must be at most {_MOST_BYTES >> 20} MiB")
        found = tomllib.loads(content.decode())
    except OSError as problem:
        raise InputError(f"{file}: {problem.strerror or problem}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise InputError(f"{file}: must be TOML, but {problem}") from None
    for section, table in found.items():
        if not isinstance(table, dict):
            hint = next((name for name, keys in KEYS.items() if section in keys), None)
            advice = f"put it below [{hint}]" if hint else f"sections are {', '.join(SECTIONS)}"
            raise InputError(f"{file}: {section} must be in a section: {advice}")
    return found


def _beside(file: Path, section: str, key: str, value: object) -> object:
    """Make a path in a file relative to the file's folder, because a daemon may be started anywhere."""
    path = isinstance(value, str) and value and f"{section}.{key}" in _PATHS
    if not path or value in _NO_PATHS:
        return value
    return str(file.absolute().parent / os.path.expanduser(str(value)))  # noqa: PTH111 - pathlib's may raise


def _take(values: dict[str, Any], sources: dict[str, str], section: str, key: str, value: object, source: str) -> None:
    """Check one value and add it to `values` and `sources`."""
    if section not in SECTIONS:
        raise InputError(f"{source}: {unknown('section', section, SECTIONS)}")
    known = KEYS[section]
    name = f"{section}.{key}"
    if key in known:
        try:
            value = known[key].type.validate_python(value)
        except ValidationError:
            raise InputError(f"{source}: {name} must be {known[key].rule}, but got {value!r:.80}") from None
    elif section != "pool":
        raise InputError(f"{source}: {unknown(f'key in [{section}]', key, known)}")
    values[name], sources[name] = value, source


def _from_text(section: str, key: str, text: str) -> object:
    """Return the value that a text from the environment or the command line stands for."""
    known = KEYS.get(section, {}).get(key)
    if known is not None and known.is_text:
        return text
    try:
        # Read numbers, true and false, and lists as TOML does. Anything else is a text.
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def describe(config: Config) -> list[ConfigRow]:
    """Return every key with its default, its value and the value's source, then the pool's own settings."""
    rows: list[ConfigRow] = []
    for section, keys in KEYS.items():
        part = getattr(config, section)
        for key, known in keys.items():
            name = f"{section}.{key}"
            default = shown(known.default) if name != "server.state" else None
            source = config.sources.get(name, "default")
            rows.append(ConfigRow(name, default, shown(getattr(part, key)), source, known.doc))
    for key, value in config.pool.settings.items():
        name = f"pool.{key}"
        doc = f"a setting of the {config.pool.kind} pool"
        rows.append(ConfigRow(name, None, value, config.sources.get(name, "default"), doc))
    return rows


def shown(value: Any) -> Any:
    """Return a value as it is written in a file."""
    if value is None:
        return "auto"
    return str(value) if isinstance(value, Path) else value
