"""Curve views turn what is believed of a script or a trainer into API responses. Pure translation."""

from __future__ import annotations

from bftrainer.cluster.jobs.learning import Learned
from bftrainer.cluster.spec.trainer import TrainerSpec
from bftrainer.cluster.store.scripts.beliefs import BeliefRow
from bftrainer.cluster.wire.api import BeliefDetail, BeliefView, CurveView, PointsView
from bftrainer.cluster.wire.worker_messages import MOST
from bftrainer.core.curve import Curve
from bftrainer.learning.points import curve_sizes
from bftrainer.learning.rates import Estimate
from bftrainer.learning.trials import ScriptBelief

BAND_SDS = 1.2816
"""Half the width of a band of 80 %, in standard deviations."""
LETTER = "c"
"""The id of a belief is this letter and a number."""


def curve_of(learned: Learned, spec: TrainerSpec) -> CurveView:
    """Return the curve in use, and if anything is known: how sure it is, and how often each size was measured."""
    prior = learned.prior.curve
    curve = _points(learned.curve(spec.min_nodes, spec.max_nodes, 1.0))
    view: CurveView = {
        "nodes": curve["nodes"],
        "rates": curve["rates"],
        "measured": {str(size): rate for size, rate in learned.measured.items()},
        "prior": _points(prior) if prior is not None else None,
    }
    estimate = learned.estimate(spec.min_nodes, spec.max_nodes)
    if estimate is not None:
        view["low"], view["high"] = _band(estimate)
        view["stays"] = _stays(learned.script)
    return view


def belief(row: BeliefRow) -> BeliefView:
    """Return what is known of a script in short."""
    return _in_short(row, ScriptBelief.from_json(row.found))


def belief_in_detail(row: BeliefRow) -> BeliefDetail:
    """Return what is known of a script, with its curve from one node to the most that were measured or given."""
    script = ScriptBelief.from_json(row.found)
    rates = script.rates
    prior = rates.prior
    largest = max((*rates.measured(), *(() if prior is None else prior.nodes)), default=0)
    curve: CurveView = {
        "nodes": [],
        "rates": [],
        "measured": {str(size): rate for size, (rate, _) in rates.measured().items()},
        "prior": None if prior is None else _points(prior),
    }
    if largest:
        estimate = rates.estimate(curve_sizes(1, largest))
        curve["nodes"], curve["rates"] = [0, *estimate.sizes], [0.0, *_bounded(estimate.rates())]
        curve["low"], curve["high"] = _band(estimate)
        curve["stays"] = _stays(script)
    return {**_in_short(row, script), "noise": rates.noise, "curve": curve}


def _in_short(row: BeliefRow, script: ScriptBelief) -> BeliefView:
    measured = script.rates.measured()
    return {
        "id": f"{LETTER}{row.id}",
        "owner": row.key.owner,
        "script": row.key.script,
        "python": row.key.python,
        "model": row.key.model,
        "changed": row.changed,
        "sizes": list(measured),
        "stays": round(sum(count for _, count in measured.values()), 2),
        "is_given": script.rates.prior is not None,
        "rescales": script.costs.rescales,
        "up_s": script.costs.pause_s("up"),
        "down_s": script.costs.pause_s("down"),
        "start_s": script.costs.start_s,
    }


def _band(estimate: Estimate) -> tuple[list[float], list[float]]:
    low, high = (estimate.rates(sds) for sds in (-BAND_SDS, BAND_SDS))
    return [0.0, *_bounded(low)], [0.0, *_bounded(high)]


def _bounded(rates: list[float]) -> list[float]:
    """JSON has no infinity."""
    return [min(rate, MOST) for rate in rates]


def _stays(script: ScriptBelief) -> dict[str, float]:
    return {str(size): round(count, 2) for size, (_, count) in script.rates.measured().items()}


def _points(curve: Curve) -> PointsView:
    return {"nodes": list(curve.nodes), "rates": list(curve.rates)}
