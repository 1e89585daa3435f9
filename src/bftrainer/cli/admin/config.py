"""`bftrainer config` lists every key of the configuration, its current value and its origin."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from bftrainer.cli.common.connection import Json, State, printable, say, screen
from bftrainer.cli.common.output import print_json
from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.config.load import ConfigRow, describe, load_config
from bftrainer.errors import InputError


def config(
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Configuration file; default: $BFTRAINER_CONFIG, the state folder's, /etc's.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the configuration; exit status 2 if it is wrong.")
    ] = False,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Show the configuration: every key, its value, and where the value came from.

    Keys are set in a TOML file ([server] port = 0), or by variables such as BFTRAINER_SERVER__PORT=0.
    """
    found = load_config(file, overrides={"server.state": state})
    rows = [row for row in describe(found) if row.key == "pool.kind" or not row.key.startswith("pool.")]
    rows += _pool_rows(found)
    if check:
        from bftrainer.allocate.registry import make_allocator
        from bftrainer.core.objective import find_objective

        find_objective(found.policy.objective)
        make_allocator(found.policy.allocator)
    if as_json:
        print_json({"file": None if found.file is None else str(found.file), "keys": [asdict(row) for row in rows]})
    elif check:
        say(f"{found.file}: is right" if found.file else "no file, and the rest is right")
    else:
        _show(found, rows)


def _pool_rows(found: Config) -> list[ConfigRow]:
    """The settings of the chosen pool. An unknown or wrong setting is an error."""
    from bftrainer.cluster.pools.registry import read_settings, settings_of  # loads all that pools need

    kind, given = found.pool.kind, found.pool.settings
    try:
        known = settings_of(kind)
    except InputError as problem:
        raise InputError(f"{found.sources.get('pool.kind', 'pool.kind')}: {problem}") from None
    checked = read_settings(kind, given)
    rows: list[ConfigRow] = []
    for one in fields(known):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        source = found.sources.get(f"pool.{one.name}", "default")
        value = getattr(checked, one.name)
        rows.append(ConfigRow(f"pool.{one.name}", plain(default), plain(value), source, one.metadata.get("doc", "")))
    return rows


def plain(value: Any) -> Any:
    """A setting of a pool as a value of JSON and TOML."""
    if value is MISSING or value is None:
        return None
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _show(found: Config, rows: list[ConfigRow]) -> None:
    """Print the configuration as a valid TOML file, so that it can be copied."""
    console = screen()

    def put(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    put(f"# read from {found.file}" if found.file else "# no file was found; these are the defaults", "dim")
    section = ""
    for row in rows:
        before, (section, _, key) = section, row.key.partition(".")
        if section != before:
            put("")
            put(f"[{section}]", "bold")
        put(f"# {printable(row.doc)}", "dim")
        if row.value is None:
            put(f"# {_key(key)} is not set", "dim")
            continue
        changed = row.source != "default"
        default = f", default {_toml(row.default)}" if row.default is not None else ""
        put(f"{_key(key)} = {_toml(row.value)}" + (f"  # from {printable(row.source)}{default}" if changed else ""))


def _toml(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool | int | float | str):
        return json.dumps(value)
    return str(value)  # dates and times


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("config")(config)
