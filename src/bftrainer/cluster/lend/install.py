"""The systemd user unit that keeps a lender running on a login node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

UNIT = "bftrainer-lend.service"


def unit_path(home: Path) -> Path:
    """Return the file of the unit."""
    return home / ".config" / "systemd" / "user" / UNIT


def unit_text(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the unit. It runs `command`, and has no secret: the command names the file with the token."""
    lines = (
        "[Unit]",
        "Description=BFTrainer lender: submits pilots to Slurm as this user",
        "After=network-online.target",
        "",
        "[Service]",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(environment.items())),
        f"ExecStart={' '.join(map(_quoted, command))}",
        "Restart=always",
        "RestartSec=15",
        "RestartPreventExitStatus=2",  # the call or a file is wrong: starting it again does not help
        "TimeoutStopSec=60",
        "NoNewPrivileges=yes",
        "UMask=0077",
        "MemoryMax=512M",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    )
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """Quote a word for a unit, in which % and $ have a meaning."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'
