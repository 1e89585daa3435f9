"""Rules of a lender: which requests of the controller it carries out.

`LendRules` are what the user has allowed. A request is refused unless every value in it obeys a strict pattern and the
user's rules: nothing that the controller sends is ever run, and no text of it reaches a shell. The functions have no
clock and start nothing; `lender.py` calls them before it does anything.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from bftrainer.cluster.wire.lender_messages import MOST_LENT, LendPilot
from bftrainer.errors import BFTrainerError, InputError

PILOT_ID = re.compile(r"[a-z0-9]{8,64}")
STATE_ID = re.compile(r"[A-Za-z0-9]{1,64}")
OWNER = re.compile(r"[A-Za-z0-9_.@+ -]{1,200}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~=-]{15,511}")
_MARK = re.compile(r"[A-Za-z0-9._-]{0,200}")
_GPUS = re.compile(r"(?:gpu(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?:[0-9]{1,4}(?:,(?!$)|$)){0,16}")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@:/-]{0,127}")
_FEATURES = re.compile(rf"{_WORD.pattern}(?:[&|]{_WORD.pattern})*")
_BURST = 50
"""Pilots that may be submitted at once, whatever the rate."""


class RefusedByRules(BFTrainerError):  # noqa: N818 - it names what happened
    """The lender does not carry out a request."""


@dataclass(frozen=True, slots=True)
class LendRules:
    """What a user allows the controller to ask for. An empty text stands for Slurm's default."""

    partitions: frozenset[str]
    accounts: frozenset[str] = frozenset({""})
    qos: frozenset[str] = frozenset({""})
    constraints: frozenset[str] = frozenset({""})
    most_minutes: int = 240
    """The longest time limit of a pilot."""
    most_pilots: int = 100
    """The most pilots, pending and running."""
    per_minute: int = 300
    """The most pilots submitted per minute, after a burst."""
    options: tuple[str, ...] = ()
    """More options of sbatch for each pilot. They are the user's own, never the controller's."""

    def __post_init__(self) -> None:
        if not self.partitions:
            raise InputError("--partition must name the partition for pilots; `sinfo -s` lists the partitions")
        for name, pattern in (("partitions", _WORD), ("accounts", _WORD), ("qos", _WORD), ("constraints", _FEATURES)):
            for value in sorted(getattr(self, name)):
                if (value or name == "partitions") and not pattern.fullmatch(value):
                    raise InputError(f"{name} must be names as Slurm has them, but got {value!r:.80}")
        for option, value, most in (
            ("--max-minutes", self.most_minutes, 60 * 24 * 365),
            ("--max-pilots", self.most_pilots, MOST_LENT),
            ("--per-minute", self.per_minute, 60_000),
        ):
            if not 1 <= value <= most:
                raise InputError(f"{option} must be a whole number from 1 to {most}, but got {value}")
        for option in self.options:
            if not option.startswith("--") or not option.isprintable():
                raise InputError(f"--option must be an option of sbatch such as --licenses=lustre, but got {option!r}")


def check_submission(rules: LendRules, request: LendPilot, known: Collection[str], present: int) -> None:
    """Raise `RefusedByRules` unless a pilot may be submitted.

    `known` has the ids of all pilots that this lender ever submitted and remembers; `present` is the number of those
    that have not ended.
    """
    for what, value, pattern in (
        ("pilot's id", request.pilot, PILOT_ID),
        ("node", request.node, _NODE),
        ("gpus", request.gpus, _GPUS),
        ("mark", request.mark, _MARK),
    ):
        if not pattern.fullmatch(value):
            raise RefusedByRules(f"the {what} {value!r:.60} is not one that this lender accepts")
    if not _SECRET.fullmatch(request.secret):
        raise RefusedByRules("the secret is not one that this lender accepts")
    if request.pilot in known:
        raise RefusedByRules(f"the pilot {request.pilot} was submitted before: each id is good for one pilot")
    for what, value, allowed in (
        ("partition", request.partition, rules.partitions),
        ("account", request.account, rules.accounts),
        ("qos", request.qos, rules.qos),
        ("constraint", request.constraint, rules.constraints),
    ):
        if value not in allowed:
            offered = ", ".join(sorted(each or "Slurm's default" for each in allowed))
            raise RefusedByRules(f"{what} {value!r:.60} is not among those that the user allows: {offered}")
    if not 1 <= request.minutes <= rules.most_minutes:
        raise RefusedByRules(
            f"{request.minutes} minutes are not from 1 to the {rules.most_minutes} that the user allows"
        )
    if request.least_minutes > request.minutes:
        raise RefusedByRules("the least time is more than the time limit")
    if present >= rules.most_pilots:
        raise RefusedByRules(f"the user allows {rules.most_pilots} pilots, and there are {present}")


@dataclass(slots=True)
class SubmissionRate:
    """Bounds how fast pilots are submitted: `per_minute`, after a burst. Times are passed in."""

    per_minute: int
    _room: float = field(default=_BURST, init=False)
    _at: float | None = field(default=None, init=False)

    def take(self, now: float) -> None:
        """Count one submission. Raises `RefusedByRules` if it would be one too many."""
        if self._at is not None:
            self._room = min(float(_BURST), self._room + max(0.0, now - self._at) * self.per_minute / 60)
        self._at = now
        if self._room < 1:
            raise RefusedByRules(f"the user allows {self.per_minute} pilots a minute")
        self._room -= 1
