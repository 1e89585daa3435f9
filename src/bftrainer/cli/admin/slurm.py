"""`bftrainer slurm` checks the settings of a Slurm site for harvesting, and sets up users."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from bftrainer.cli.common.connection import ConfigFile, Json, State, printable, say, screen
from bftrainer.cli.common.output import print_json, warn
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.files import replace_file

if TYPE_CHECKING:
    from bftrainer.cluster.config.keys import Config
    from bftrainer.slurm.findings import SiteFinding
    from bftrainer.slurm.gpus import PilotRequest
    from bftrainer.slurm.owners import PilotOwnersSetup

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_ORDER = ("error", "warning", "ok")
_SETTINGS = """In slurm.conf, then scontrol reconfigure (PreemptType and ProctrackType: restart the daemons).
Of a PartitionName line that is there already, change these words:"""

Named = Annotated[str, typer.Option("--partition", "-p", metavar="NAME", help="Partition whose idle nodes to use.")]


def check(
    partition: Named = "",
    qos: Annotated[
        str, typer.Option(metavar="NAME", help="QOS of the pilots, at sites where the QOS decides about preemption.")
    ] = "",
    file: ConfigFile = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Check a site: what is fine, what would delay main jobs, and the lines of slurm.conf that fix it.

    Nothing is changed or submitted. Without --partition, the configured partition is checked, or the one that looks
    meant for preemptible jobs. The configuration is that of the controller that runs or ran last on the state folder,
    unless --config or the environment gives another. The exit status is 0 without errors, 1 with errors or no Slurm,
    2 for a wrong call.
    """
    from bftrainer.slurm.ask import gather, try_pilot
    from bftrainer.slurm.check import PILOT_S, choose, examine, slurm_conf
    from bftrainer.slurm.site import seconds
    from bftrainer.slurm.user import account_for

    folder, given, request, owners = _configured(state, file)
    site = gather(folder)
    harvest = choose(site, partition or given.get("partition", ""), qos or given.get("qos", ""))
    refusal = None
    if harvest.partition is not None:
        wanted = harvest.qos.name if harvest.qos else qos or given.get("qos", "")
        account = given.get("account") or account_for(site, harvest.partition, harvest.qos)
        refusal = try_pilot(harvest.partition.name, wanted, account, gpus=request.words(site, harvest.partition))
    limit_s = seconds(given["time_limit"]) if "time_limit" in given else PILOT_S
    findings = examine(site, harvest, refusal, limit_s, request, owners)
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    lines = slurm_conf(findings)
    if as_json:
        print_json(
            {
                "cluster": site.config.get("ClusterName", ""),
                "slurm": site.config["SLURM_VERSION"],
                "partition": harvest.partition.name if harvest.partition else None,
                "qos": harvest.qos.name if harvest.qos else None,
                "errors": errors,
                "warnings": warnings,
                "findings": [asdict(finding) for finding in findings],
                "slurm_conf": lines,
            }
        )
    else:
        _show(findings, lines)
        verdict = f"{errors} errors, {warnings} warnings" if errors or warnings else "all in order"
        where = (
            f"{site.config.get('ClusterName', '')}, partition {harvest.partition.name if harvest.partition else '?'}"
        )
        say(printable(f"{where}: {verdict}"))
    if errors:
        raise typer.Exit(1)


def setup_user(
    partition: Named = "",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the configuration to a new file instead."),
    ] = None,
    state: State = None,
) -> None:
    """Print a configuration for harvesting without administrator's rights.

    Finds a partition, or a QOS, that you may use and that main jobs preempt. Start the controller with it:
    bftrainer serve --config FILE
    """
    from bftrainer.slurm.ask import gather, try_pilot
    from bftrainer.slurm.gpus import PilotRequest
    from bftrainer.slurm.user import places, render

    folder, *_ = _configured(state)
    if output is not None and output.exists():
        raise InputError(f"{output}: already exists; name a new file with -o")
    site = gather(folder)
    found = places(site, partition)
    refusals: list[str] = []
    for place in found:
        gpus = PilotRequest().words(site, place.partition)
        refusal = try_pilot(place.partition.name, place.qos.name if place.qos else "", place.account, gpus=gpus)
        if not refusal:
            break
        refusals.append(f"{place.partition.name}: {refusal}")
    else:
        raise BFTrainerError(f"Slurm refuses your pilots: {'; '.join(refusals[:5])}; ask your administrators")
    for finding in place.errors:
        warn(printable(f"{finding.what}: {finding.why}"))
    text = render(site, place)
    if output is None:
        say(text.rstrip("\n"))
        return
    replace_file(output, text, 0o666)
    say(f"{output}: written; start with `bftrainer serve --config {output}`")


def _configured(
    state: Path | None, file: Path | None = None
) -> tuple[Path, dict[str, str], PilotRequest, PilotOwnersSetup]:
    """The state folder, and the configuration's settings for pilots, their GPUs and owners, if its pool is Slurm's."""
    from bftrainer.cluster.config.load import load_config
    from bftrainer.slurm.gpus import PilotRequest
    from bftrainer.slurm.owners import PilotOwnersSetup

    config, owner_count = _as_served(load_config(file, overrides={"server.state": state}), named=file is not None)
    given = config.pool.settings if config.pool.kind == "slurm" else {}
    options = given.get("options", ())
    words = shlex.split(options) if isinstance(options, str) else [str(word) for word in options]
    named = {key: str(given[key]) for key in ("partition", "qos", "account", "time_limit") if given.get(key)}
    run_as, prefix = given.get("submit") == "run-as", bool(given.get("submit_as"))
    owners = PilotOwnersSetup(config.users.own, run_as, prefix, owner_count)
    return config.state, named, PilotRequest(str(given.get("gpus", "all")), tuple(words)), owners


def _as_served(config: Config, *, named: bool) -> tuple[Config, int]:
    """The configuration of the controller that runs or ran last, and how many owners have trainers (0: not known).

    A configuration that the user named is not changed.
    """
    from bftrainer.cluster.config.load import CONFIG, DATABASE_FILE

    try:
        from bftrainer.cluster.retention.stored import with_stored
        from bftrainer.cluster.store.store import Store

        if not (config.state / DATABASE_FILE).exists():
            return config, 0
        with Store.open(config.state / DATABASE_FILE, read_only=True) as store:
            if not (named or CONFIG in os.environ):
                config = with_stored(config, store, named=False)
            return config, len({row.owner for row in store.trainers(brief=True)})
    except (BFTrainerError, ImportError, OSError):
        return config, 0


def _show(findings: list[SiteFinding], lines: list[str]) -> None:
    console = screen()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        text = Text(printable(finding.what))
        if finding.why:
            text.append(f"\n{printable(finding.why)}", style="dim")
        table.add_row(Text(finding.level, _STYLES[finding.level]), text)
    console.print(table)
    commands = [line for line in lines if line.startswith("sacctmgr ")]
    settings = [line for line in lines if line not in commands]
    for head, some in ((_SETTINGS, settings), ("Run:", commands)):
        if some:
            say("\n".join(("", head, *(f"  {printable(line)}" for line in some))))
    say("")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Check a Slurm site, and set up harvesting.")
    group.command("check")(check)
    group.command("setup-user")(setup_user)
    app.add_typer(group, name="slurm")
