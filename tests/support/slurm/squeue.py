"""Output of squeue as the `slurm` pool asks for it, made of fields."""

from __future__ import annotations

from bftrainer.cluster.pools.slurm.read import JOB_FIELDS, Jobs, read_jobs

SEPARATOR = "\x1f0123456789abcdef"
HEADER = "".join(f"{name}{SEPARATOR}" for name in ("JOBID", *JOB_FIELDS[1:]))
DEFAULTS = {
    **{"State": "PENDING", "UserID": "1000", "Partition": "main", "NumNodes": "1", "PriorityLong": "0"},
    **{"TimeLimit": "", "StartTime": "N/A", "PreemptTime": "N/A", "tres-per-node": "N/A", "Name": "job"},
}


def table(*jobs: dict[str, str]) -> str:
    """The header and one row per job; fields that are not given have usual values."""
    rows = ["".join(f"{({**DEFAULTS, **job}).get(name, '')}{SEPARATOR}" for name in JOB_FIELDS) for job in jobs]
    return "\n".join((HEADER, *rows)) + "\n"


def read(text: str, name: str = "bftrainer-abc", user: int = 7) -> Jobs:
    """The jobs in such an output."""
    return read_jobs(text, name, user, SEPARATOR)
