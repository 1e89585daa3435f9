"""`bftrainer doctor` checks whether a controller's state is consistent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import state_of
from bftrainer.cli.common.output import print_json
from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.doctor.doctor import examine
from bftrainer.cluster.doctor.invariants import DoctorFinding
from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.errors import BFTrainerError

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="State folder; default: $BFTRAINER_STATE, or your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check the state of a controller, running or not: its database, secrets, disk and processes.

    Nothing is changed. The exit status is 0 without errors, 1 with errors, 2 if there is no database.
    """
    folder = state_of(state)
    accounts, problem = _accounts(folder)
    findings = examine(folder, accounts)
    if problem:
        findings.append(DoctorFinding("warning", problem, "accounts of owners were not looked at"))
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    if as_json:
        print_json(
            {
                "state": str(folder),
                "errors": errors,
                "warnings": warnings,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        _show(folder, findings, errors, warnings)
    if errors:
        raise typer.Exit(1)


def _accounts(folder: Path) -> tuple[Accounts | None, str]:
    """Return the accounts of owners that the configuration names, or what is wrong with it."""
    try:
        return load_config(overrides={"server.state": folder}).users.as_accounts(), ""
    except BFTrainerError as problem:
        return None, str(problem)


def _show(folder: Path, findings: list[DoctorFinding], errors: int, warnings: int) -> None:
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=3)
    table.add_column(overflow="fold", ratio=2, style="dim")
    for finding in findings:
        table.add_row(
            Text(finding.level, _STYLES[finding.level]), Text(_plain(finding.what)), Text(_plain(finding.advice))
        )
    console.print(table)
    verdict = f"{errors} errors, {warnings} warnings" if errors or warnings else "all in order"
    console.print(f"{_plain(str(folder))}: {verdict}", soft_wrap=True, markup=False)


def _plain(text: str) -> str:
    """Strip control characters that a terminal would obey: the text may hold anything from the database."""
    return "".join(character if character.isprintable() else "?" for character in text)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(doctor)
