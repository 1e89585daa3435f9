"""Messages between a user's lender and the controller.

A lender submits and cancels pilots as its user (`cluster/lend`). It says who it is (`Offer`), the controller asks for
pilots and for their end, and the lender answers every request by its number. The types of the fields carry the bounds
that `decode` checks; what a request may contain beyond that is for the rules of the lender to say, never for the
controller.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter, ValidationError

from bftrainer.cluster.wire.checks import Flag, Name, NaturalNumber, Words, first_problem
from bftrainer.elastic.protocol import ProtocolError

LENDER_PATH = "/v1/lenders"
"""The URL path where lenders connect, each with a token of its user."""
LENDER_VERSION = 1
REFUSED_CODE = 4003
"""The code with which the controller closes the connection of a lender that it does not take, after `OfferRefused`."""
NO_TOKEN = "the token was revoked or has expired: get another one from the operator"  # noqa: S105 - a sentence
MOST_CLOSE_BYTES = 123
MOST_LENT = 10_000
"""Limit of the pilots of one lender, and of those in one message."""
MOST_LENDER_FRAME_BYTES = 4 << 20
LENDER_BEAT_S = 10.0
"""Seconds between two heartbeats of a lender. Each is answered, so that both sides notice a dead connection."""

ShortText = Annotated[str, Field(strict=True, max_length=512)]
PilotIds = Annotated[tuple[Name, ...], Field(max_length=MOST_LENT)]


# Messages from the lender.


@dataclass(frozen=True, slots=True)
class Offer:
    """The first message of every connection: whose pilots this lender submits, and how many it allows."""

    account: Name
    """The name of its Unix account."""
    uid: NaturalNumber
    most_pilots: NaturalNumber
    version: NaturalNumber = LENDER_VERSION


@dataclass(frozen=True, slots=True)
class LenderBeat:
    """The lender is alive."""


@dataclass(frozen=True, slots=True)
class Lent:
    """The pilot of a request was submitted."""

    request: NaturalNumber
    job: NaturalNumber


@dataclass(frozen=True, slots=True)
class NotLent:
    """The pilot of a request was not submitted. With `maybe`, Slurm did not answer, so it may exist all the same."""

    request: NaturalNumber
    reason: Words
    maybe: Flag = False


@dataclass(frozen=True, slots=True)
class PilotsCancelled:
    """The request to cancel pilots was carried out, unless there was a `problem`."""

    request: NaturalNumber
    problem: Words = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The lender ends. Its waiting pilots are cancelled; those that run go on."""

    reason: Words = ""


# Messages from the controller.


@dataclass(frozen=True, slots=True)
class OfferTaken:
    """The controller takes the offer. Pilots have the name `bftrainer-STATE_ID` in Slurm."""

    state_id: ShortText
    owner: ShortText = ""
    """The owner whose trainers the agents are for."""


@dataclass(frozen=True, slots=True)
class OfferRefused:
    """The controller does not take the offer, or not any more. It closes the connection after this message.

    The reason that ends a websocket has room for 123 bytes only, which is too little for a remedy.
    """

    reason: Words


@dataclass(frozen=True, slots=True)
class LenderHeard:
    """The controller is alive: the answer to a heartbeat."""


@dataclass(frozen=True, slots=True)
class LendPilot:
    """Submit a pilot."""

    request: NaturalNumber
    pilot: ShortText
    """Its id, never used before."""
    node: ShortText
    partition: ShortText
    minutes: NaturalNumber
    """Its time limit."""
    secret: ShortText = field(repr=False)
    """The secret with which its agent joins. It is good for this pilot only."""
    least_minutes: NaturalNumber = 0
    """The least that Slurm may cut the time limit down to; 0: not at all."""
    account: ShortText = ""
    qos: ShortText = ""
    constraint: ShortText = ""
    gpus: ShortText = ""
    """The GPUs of the node as `--gres` takes them."""
    mark: ShortText = ""
    """Text of the controller by which it recognises its pilots among jobs."""


@dataclass(frozen=True, slots=True)
class CancelLent:
    """Cancel pilots; with `only_waiting`, only those that have not started."""

    request: NaturalNumber
    pilots: PilotIds
    only_waiting: Flag = False


FromLender = Offer | LenderBeat | Lent | NotLent | PilotsCancelled | Withdrawn
ToLender = OfferTaken | OfferRefused | LenderHeard | LendPilot | CancelLent
LenderMessage = FromLender | ToLender

_KINDS: Mapping[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(LenderMessage)}
_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


def encode_lending(message: LenderMessage) -> str:
    """Return the frame of a message."""
    return json.dumps({"type": type(message).__name__.lower(), **dataclasses.asdict(message)})


def close_reason(reason: str) -> str:
    """Return as much of a reason as the end of a websocket has room for."""
    return reason.encode(errors="replace")[:MOST_CLOSE_BYTES].decode(errors="ignore")


def decode_lending(frame: str | bytes) -> LenderMessage | None:
    """Return the message of a frame; None if this version does not know its kind. Raises `ProtocolError`.

    An error never shows the frame: it may contain a secret.
    """
    try:
        data = json.loads(frame)
        adapter = _ADAPTERS.get(data["type"])
        message: LenderMessage | None = None if adapter is None else adapter.validate_python(data)
    except ValidationError as error:
        where = "secret" if any("secret" in map(str, each["loc"]) for each in error.errors()) else ""
        raise ProtocolError(f"invalid message: {where or first_problem(error)}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise ProtocolError(f"a frame must be a JSON object with a `type`: {type(problem).__name__}") from None
    return message
