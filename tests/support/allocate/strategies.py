"""Random allocation problems: every bend a curve can have, and every awkward current map."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bftrainer.allocate.problem import Claim, Limits, Problem
from bftrainer.core.curve import Curve

HORIZONS_S = (1e-3, 1.0, 12.0, 120.0, 3600.0, 1e6)
MAGNITUDES = (1e-6, 1.0, 1e3, 1e9)
OWNERS = ("ann", "bob", "cem")


@st.composite
def curves(draw: DrawFn, max_nodes: int, magnitude: float = 1.0) -> Curve:
    """A curve with points up to about `max_nodes`: straight, concave, convex, flat in parts, zig-zag, or any."""
    places = draw(st.sets(st.integers(1, max_nodes), min_size=1, max_size=6))
    nodes = sorted(places)
    shape = draw(st.sampled_from(["straight", "concave", "convex", "plateaus", "zigzag", "any"]))
    if shape == "straight":
        steps = [float(draw(st.integers(1, 9)))] * len(nodes)
    elif shape in ("concave", "convex", "plateaus"):
        steps = [float(n) for n in draw(st.lists(st.integers(0, 9), min_size=len(nodes), max_size=len(nodes)))]
        if shape == "plateaus":
            steps = [step if k % 2 == 0 else 0.0 for k, step in enumerate(steps)]
        else:
            steps.sort(reverse=shape == "concave")
    else:
        heights = st.integers(0, 20).map(float) if shape == "zigzag" else st.floats(1e-3, 20) | st.just(0.0)
        rates = draw(st.lists(heights, min_size=len(nodes), max_size=len(nodes)))
        return Curve.through(nodes, [rate * magnitude for rate in rates])
    widths = [b - a for a, b in itertools.pairwise([0, *nodes])]
    rates = list(itertools.accumulate(step * width for step, width in zip(steps, widths, strict=True)))
    return Curve.through(nodes, [rate * magnitude for rate in rates])


@st.composite
def claims(draw: DrawFn, name: str, pool: int, current: int, horizon_s: float, magnitude: float) -> Claim:
    """A claim that may be too large for the pool, stopped, above its maximum, cheap or ruinous to rescale."""
    least = draw(st.sampled_from([1, 1, 1, 2, 3, pool + 1]))
    most = least + draw(st.integers(0, pool + 3))
    seconds = st.sampled_from([0.0, 1.0, 12.0, 18.0, horizon_s / 3, horizon_s, horizon_s * 20])
    return Claim(
        name=name,
        current=current,
        min_nodes=least,
        max_nodes=most,
        value=draw(curves(pool + 5, magnitude)),
        up_s=draw(seconds),
        down_s=draw(seconds),
        owner=draw(st.sampled_from(OWNERS)),
        start_s=draw(st.sampled_from([0.0, 0.0, 1.0, 15.0, horizon_s / 2, horizon_s * 2])),
    )


@st.composite
def limits(draw: DrawFn, names: list[str], pool: int) -> Limits:
    """Caps, shares (some out of reach) and groups, any of them absent."""
    some = st.dictionaries(st.sampled_from(OWNERS), st.integers(0, pool + 2), max_size=3)
    groups = st.lists(st.sets(st.sampled_from(names), min_size=2), max_size=2) if len(names) > 1 else st.just([])
    return Limits(owner_caps=draw(some), owner_shares=draw(some), exclusive=[frozenset(g) for g in draw(groups)])


@st.composite
def _problems(draw: DrawFn, max_claims: int, max_pool: int, with_limits: bool) -> Problem:
    pool = draw(st.integers(0, max_pool))
    horizon_s = draw(st.sampled_from(HORIZONS_S))
    magnitudes = st.just(draw(st.sampled_from(MAGNITUDES))) if draw(st.booleans()) else st.sampled_from(MAGNITUDES)
    count = draw(st.integers(0, max_claims))
    fits = draw(st.booleans())  # whether the current counts keep to the pool
    drawn: list[Claim] = []
    left = pool
    for k in range(count):
        current = draw(st.integers(0, left if fits else pool + 2))
        left -= current if fits else 0
        drawn.append(draw(claims(f"t{k}", pool, current, horizon_s, draw(magnitudes))))
    if drawn and draw(st.booleans()):  # twins make ties
        twin = drawn[0]
        drawn[-1] = Claim(
            drawn[-1].name, drawn[-1].current, twin.min_nodes, twin.max_nodes, twin.value, twin.up_s, twin.down_s
        )
    extra = draw(limits([claim.name for claim in drawn], pool)) if with_limits and drawn else Limits()
    return Problem(pool, horizon_s, tuple(drawn), extra)


def problems(max_claims: int = 5, max_pool: int = 20, *, with_limits: bool = False) -> SearchStrategy[Problem]:
    """Problems of up to `max_claims` claims on up to `max_pool` nodes."""
    return _problems(max_claims, max_pool, with_limits)
