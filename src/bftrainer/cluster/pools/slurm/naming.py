"""Names and comments of pilots, by which they are recognised among the jobs of Slurm."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "bftrainer-"
"""Prefix of the names of all pilots. The id of the state folder of their controller follows."""


@dataclass(frozen=True, slots=True)
class PilotComment:
    """What the comment of a pilot's job says."""

    node: str
    mark: str
    """Fingerprint of the controller that its agent connects to."""
    id: str = ""
    """Where pilots have owners: the pilot's id."""


def pilot_comment(state_id: str, node: str, mark: str, pilot: str = "") -> str:
    """Return the comment of a pilot's job."""
    return f"bftrainer:{state_id}:{node}:{mark}" + (f":{pilot}" if pilot else "")


def read_comment(text: str, state_id: str = "") -> PilotComment | None:
    """Return what a comment says; None if it is not a pilot's, or one of another controller than `state_id`."""
    parts = text.split(":")
    if len(parts) not in (4, 5) or parts[0] != "bftrainer" or (state_id and parts[1] != state_id):
        return None
    if not text.isprintable():
        return None
    return PilotComment(*parts[2:])
