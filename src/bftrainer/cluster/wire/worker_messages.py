"""Worker messages are validated here before they are applied, because worker programs are untrusted.

The `Reconciler` passes every message and report of a worker to `parse_worker_message`. The result has the types that
`elastic.protocol` promises, with numbers in bounds that can be summed, stored and shown. Anything else raises
`ProtocolError`, which fails that trainer only. The bounds stand here and not in `elastic.protocol`, which training
scripts import and which needs nothing but Python.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NotRequired

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    InstanceOf,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from bftrainer.cluster.wire.checks import MOST_WHOLE, NaturalNumber, Whole, first_problem
from bftrainer.cluster.wire.messages import MOST_MODULES
from bftrainer.elastic import protocol
from bftrainer.elastic.defaults import MOST_RANKS
from bftrainer.elastic.metrics import MOST as MOST_METRICS
from bftrainer.util.text import text

LEAST, MOST = 1e-9, 1e15
"""Bounds of rates and weights. Sums of values beyond them are not meaningful."""
MOST_S = 1e9
"""The longest time in a message, in seconds: no change of members takes longer."""
MOST_NODES = 1 << 20
MOST_SIZES = 1000
"""The most world sizes with a rate in one report."""


def _cut(most: int) -> AfterValidator:
    return AfterValidator(lambda value: text(value[:most]))


def _first(most: int) -> BeforeValidator:
    """Drop all entries of an object but the first ones: a script may use a new name in every report."""
    return BeforeValidator(
        lambda value: (
            dict(itertools.islice(value.items(), most)) if isinstance(value, Mapping) and len(value) > most else value
        )
    )


def _measured(seconds: float) -> float:
    """Check a time. A negative one means that none was measured, and becomes NaN."""
    if seconds > MOST_S:
        raise ValueError(f"must be at most {MOST_S:g} seconds")
    return seconds if seconds >= 0 else math.nan


def _plausible(rates: Mapping[int, float]) -> dict[str, float]:
    return {str(size): rate for size, rate in rates.items() if size <= MOST_NODES and LEAST <= rate <= MOST}


MetricName = Annotated[InstanceOf[str], _cut(100)]
Address = Annotated[InstanceOf[str], _cut(300)]
ErrorText = Annotated[InstanceOf[str], _cut(4000)]
TracebackText = Annotated[InstanceOf[str], AfterValidator(lambda value: text(value)[-20_000:])]
Duration = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]
MeasuredTime = Annotated[float, AfterValidator(_measured)]
Place = Annotated[list[NaturalNumber], Field(min_length=3, max_length=3), FailFast()]
"""Epochs, steps and samples done."""
WorldSize = Annotated[int, Field(ge=0, lt=MOST_WHOLE)]
Rates = Annotated[dict[WorldSize, float], _first(MOST_SIZES), AfterValidator(_plausible)]


StayRate = Annotated[float, AfterValidator(lambda rate: rate if LEAST <= rate <= MOST else 0.0)]


class _NoFields(TypedDict):
    pass


class _Ending(TypedDict):
    step: Any  # shown nowhere


class _Follow(TypedDict):
    address: Address
    secret: Annotated[InstanceOf[str], Field(max_length=100)]


class _Arrived(TypedDict):
    generation: Whole
    address: Address
    addresses: NotRequired[Annotated[tuple[Address, ...], Field(max_length=MOST_RANKS), FailFast()]]


class _Formed(TypedDict):
    generation: Whole
    world: Whole
    pause_s: MeasuredTime
    form_s: MeasuredTime
    sync_s: MeasuredTime
    parts: NotRequired[Annotated[dict[MetricName, Duration], _first(20)]]


class _Broken(TypedDict):
    generation: Whole
    reason: NotRequired[ErrorText]


class _Failed(TypedDict):
    error: ErrorText
    traceback: TracebackText
    fresh: NotRequired[Annotated[bool, PlainValidator(lambda value: value is True)]]


class _Report(TypedDict):
    generation: NaturalNumber
    step: NotRequired[NaturalNumber]
    epoch: NotRequired[NaturalNumber]
    samples: NotRequired[NaturalNumber]
    world: NotRequired[NaturalNumber]
    rates: NotRequired[Rates]
    metrics: NotRequired[Annotated[dict[MetricName, float], _first(MOST_METRICS)]]
    snapshot_step: NotRequired[Whole | None]
    total: NotRequired[NaturalNumber | None]
    epochs: NotRequired[NaturalNumber | None]
    redone: NotRequired[NaturalNumber]
    windows: NotRequired[Whole]
    metrics_at: NotRequired[Annotated[dict[MetricName, Place], _first(MOST_METRICS)]]
    snapshot_every_s: NotRequired[Duration | None]
    snapshot_stall_s: NotRequired[Duration | None]
    stay_windows: NotRequired[NaturalNumber]
    stay_rate: NotRequired[StayRate]
    stay_scatter: NotRequired[Duration | None]


class _FirstStep(TypedDict):
    parts: NotRequired[Annotated[dict[MetricName, Duration], _first(20)]]
    modules: NotRequired[Annotated[dict[MetricName, Duration], _first(MOST_MODULES)]]


class _PreloadRefused(TypedDict):
    variable: MetricName
    modules: NotRequired[Annotated[tuple[MetricName, ...], Field(max_length=MOST_MODULES), FailFast()]]


_KINDS: Mapping[str, tuple[Callable[..., protocol.FromWorker], TypeAdapter[Any]]] = {
    "ready": (protocol.Ready, TypeAdapter(_NoFields)),
    "follow": (protocol.Follow, TypeAdapter(_Follow)),
    "leaving": (protocol.Leaving, TypeAdapter(_NoFields)),
    "left": (protocol.Left, TypeAdapter(_Ending)),
    "done": (protocol.Done, TypeAdapter(_Ending)),
    "arrived": (protocol.Arrived, TypeAdapter(_Arrived)),
    "formed": (protocol.Formed, TypeAdapter(_Formed)),
    "broken": (protocol.Broken, TypeAdapter(_Broken)),
    "failed": (protocol.Failed, TypeAdapter(_Failed)),
    "report": (protocol.Report, TypeAdapter(_Report)),
    "firststep": (protocol.FirstStep, TypeAdapter(_FirstStep)),
    "preloadrefused": (protocol.PreloadRefused, TypeAdapter(_PreloadRefused)),
}


def parse_worker_message(message: Mapping[str, Any]) -> protocol.FromWorker | None:
    """Return a worker's message, validated; None if workers do not send it, or if it is of a newer version.

    Raises `ProtocolError` if the message is invalid.
    """
    try:
        if message["type"] not in _KINDS:
            return None
        kind, adapter = _KINDS[message["type"]]
        return kind(**adapter.validate_python(message))
    except ValidationError as error:
        problem = first_problem(error)
    except (TypeError, KeyError):
        problem = "it must be an object with a `type`"
    raise protocol.ProtocolError(f"a worker said {text(reprlib.repr(message))[:200]}: {problem[:200]}")
