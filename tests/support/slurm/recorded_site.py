"""The site of which the output of a real Slurm 22.05 was recorded, with whatever changes a test wants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bftrainer.slurm.ask import gather
from bftrainer.slurm.check import SiteFinding, choose, examine
from bftrainer.slurm.site import Site, SlurmError

RECORDED = Path(__file__).resolve().parents[2] / "slurm" / "recorded"
NOW = 1_794_758_326.0  # the instant in recorded/config.txt

Changes = Mapping[str, str]


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def site(
    config: Changes | None = None,
    main: Changes | None = None,
    scavenger: Changes | None = None,
    *,
    qos: str | None = None,
    assoc: str = "",
    state: Path | None = None,
    **given: str,
) -> Site:
    """The recorded site with some settings changed, read as `gather` reads it."""
    shown = recorded("config")
    if qos is not None:
        config = {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "PreemptType": "preempt/qos",
            **(config or {}),
        }
    for key, value in (config or {}).items():
        pattern = rf"^{re.escape(key)}( *)= .*$"
        if re.search(pattern, shown, re.MULTILINE):
            shown = re.sub(pattern, lambda old, k=key, v=value: f"{k}{old[1]}= {v}", shown, flags=re.MULTILINE)
        else:
            shown += f"{key} = {value}\n"
    partitions = recorded("partitions").splitlines()
    for number, changes in enumerate((main or {}, scavenger or {})):
        for key, value in changes.items():
            partitions[number] = re.sub(rf"\b{key}=\S+", f"{key}={value}", partitions[number])
    answers = {
        "scontrol show config": shown,
        "scontrol show partition": "\n".join([*partitions, given.get("partition", "")]),
        "scontrol show node": given.get("nodes", recorded("nodes")),
        "sinfo -a -h": given.get("gres", "(null)|n[01-04]"),
        "scontrol show topology": given.get("topology", ""),
        "sacctmgr show qos": qos or "",
        "sacctmgr -nP show": assoc,
        "sacctmgr show assoc": given.get("limits", recorded("limits")),
    }

    def ask(argv: Sequence[str]) -> str:
        answer = answers[" ".join(argv[:3])]
        if not answer.strip():
            raise SlurmError(f"{' '.join(argv[:3])}: no answer")
        return answer

    return gather(state, ask, lambda: NOW)


def found(findings: list[SiteFinding], check: str) -> SiteFinding:
    """The worst finding of a check."""
    some = [finding for finding in findings if finding.check == check]
    assert some, f"no finding {check!r} among {[finding.check for finding in findings]}"
    return max(some, key=lambda finding: ("ok", "warning", "error").index(finding.level))


def judged(one: Site, partition: str = "", qos: str = "", refusal: str | None = None) -> list[SiteFinding]:
    return examine(one, choose(one, partition, qos), refusal)


def program(folder: Path, name: str, script: str) -> Path:
    """An executable that a test puts in the place of a command."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
