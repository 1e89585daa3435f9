"""Output of squeue as the `slurm` pool asks for it, made of fields."""

from __future__ import annotations

from bftrainer.cluster.pools.slurm.read import JOB_FIELDS, TEXT_WIDTHS, Jobs, read_jobs

SEPARATOR = "\x1f01234567"
DEFAULTS = {
    **{"State": "PENDING", "UserID": "1000", "Partition": "main", "NumNodes": "1", "PriorityLong": "0"},
    **{"TimeLimit": "", "StartTime": "N/A", "PreemptTime": "N/A", "tres-per-node": "N/A", "Name": "job"},
}


def row(**fields: str) -> str:
    """One row as squeue prints it: it pads and cuts the texts of users, byte by byte."""
    cells = []
    for name in JOB_FIELDS:
        text = fields.get(name, "").encode().decode("latin-1")
        width = TEXT_WIDTHS.get(name)
        cells.append(text if width is None else f"{text[:width]:{width}}")
    return "".join(f"{cell}{SEPARATOR}" for cell in cells)


HEADER = row(**{name: "JOBID" if name == "JobArrayID" else name.upper() for name in JOB_FIELDS}) + "\n"


def table(*jobs: dict[str, str]) -> str:
    """The header and one row per job; fields that are not given have usual values."""
    return HEADER + "".join(f"{row(**{**DEFAULTS, **job})}\n" for job in jobs)


def read(text: str, name: str = "bftrainer-abc", user: int = 7) -> Jobs:
    """The jobs in such an output."""
    return read_jobs(text, name, user, SEPARATOR)
