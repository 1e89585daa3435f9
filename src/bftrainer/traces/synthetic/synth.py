"""Synthesis of traces like those of Summit, Theta or Mira, on a machine of any size.

A profile (`profiles`) and a seed come in, a `Trace` goes out. `bftrainer trace synth` calls this, as do tests and
experiments that need a machine but have no log of one.

How it works. Jobs end in a point process whose rate changes from hour to hour, and each leaves a heavy-tailed group of
neighbouring nodes idle. A group falls into blocks that leave together, each with a heavy-tailed length. Blocks whose
ends are near leave in one event, as the nodes that one starting job takes. For some hours groups are large and stay
long, for others the pool is nearly empty. Group sizes are stratified, and lengths are dealt out over all nodes rather
than drawn for each block, so that two weeks of a heavy-tailed process still have the profile's means.

What it is calibrated to (default size, two weeks):

- the paper's Table 1 for all three machines: join and leave events per hour, the idle share of the machine. Summit's
  11.1 % and its 524 nodes do not agree for 4,608 nodes; the target is the middle;
- for Summit also §2.1, 58 % of the fragments under ten minutes holding 10 % of the idle time, and the shape of its
  published log: the distributions of lengths and of nodes per join, how the join rate varies, the 10 s polling grid, no
  fragment under 70 s. The pool is bursty as in the log, but less: its median is half of its mean (a quarter in the log)
  and it remembers an hour ago somewhat longer. The median leave event has about 10 nodes (3 in the log).

What is assumed: the lengths and group sizes of Theta and Mira. Groups are around the smallest job Theta allows (128
nodes) and multiples of Mira's 512-node blocks; lengths are spread about as widely as Summit's, and scaled so that the
idle share comes out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bftrainer.core.trace import Floats, Indices, Trace, Window
from bftrainer.errors import InputError
from bftrainer.traces.synthetic.profiles import PROFILES, MachineProfile, Quantiles

__all__ = ["PROFILES", "MachineProfile", "Quantiles", "synthesise"]

Counts = npt.NDArray[np.int64]

DEFAULT_START = 1612915200.0
"""2021-02-10T00:00:00 UTC, the day the published Summit log begins."""
MAX_NODES = 1_000_000
MAX_HOURS = 10 * 366 * 24.0
MAX_START = 1e11
"""The year 5138: later times lose the resolution of the clock."""
MAX_FRAGMENTS = 200_000_000
"""About as many fragments as a large workstation's memory holds."""


def synthesise(
    profile: MachineProfile | str,
    *,
    nodes: int | None = None,
    hours: float = 336.0,
    seed: int = 0,
    start: float = DEFAULT_START,
) -> Trace:
    """A trace of `hours` hours of a machine like `profile`, the same for the same seed.

    With fewer nodes than the profile's machine, it is that machine seen through every k-th node: the idle share and the
    lengths stay, groups get smaller, and fewer events are seen. With more nodes the groups are larger.
    """
    profile = _known(profile)
    nodes = profile.nodes if nodes is None else nodes
    if not 1 <= nodes <= MAX_NODES:
        raise InputError(f"`nodes` must be from 1 to {MAX_NODES}, but got {nodes}")
    if not 0 < hours <= MAX_HOURS:
        raise InputError(f"`hours` must be more than 0 and at most {MAX_HOURS:.0f} (10 years), but got {hours}")
    if seed < 0:
        raise InputError(f"`seed` must be 0 or more, but got {seed}")
    if not abs(start) <= MAX_START:
        raise InputError(f"`start` must be a time in seconds since 1970, at most {MAX_START:.0f}, but got {start}")
    rng = np.random.Generator(np.random.PCG64(seed))
    window = Window(start, start + hours * 3600)
    # Before the window lies a warm-up as long as the longest fragment, so that it opens in the steady state. The two
    # are drawn separately: each has the profile's means, and fragments of the warm-up make up for those cut at the end.
    warm_up = Window(start - profile.length_s.largest * (1 + profile.sway), start)
    machine = max(nodes, profile.nodes)
    drawn = [_blocks(rng, profile, machine, span) for span in (warm_up, window)]
    place, size, begin, length = (np.concatenate(columns) for columns in zip(*drawn, strict=True))
    if size.sum() * (nodes / machine) > MAX_FRAGMENTS:
        raise InputError(
            f"`nodes` and `hours` must give at most {MAX_FRAGMENTS} fragments, but got {nodes} nodes, {hours} hours; "
            "ask for fewer of either"
        )
    end = _leave_together(rng, profile, begin, length)
    block, node = _assign(profile, machine, nodes, place, size, begin, end)
    keep = (end[block] > window.start) & (begin[block] < window.end)
    block, node = block[keep], node[keep]
    digits = len(str(nodes))
    return Trace.build(
        [f"node{i:0{digits}d}" for i in range(1, nodes + 1)],
        node,
        np.maximum(begin, window.start)[block],
        np.minimum(end, window.end)[block],
        (end > window.end)[block],
        window,
    )


def _known(profile: MachineProfile | str) -> MachineProfile:
    """The profile with this name."""
    if isinstance(profile, MachineProfile):
        return profile
    if profile not in PROFILES:
        raise InputError(f"`profile` must be one of {', '.join(PROFILES)}, but got {profile}")
    return PROFILES[profile]


def _blocks(
    rng: np.random.Generator, profile: MachineProfile, machine: int, span: Window
) -> tuple[Floats, Counts, Floats, Floats]:
    """The blocks that join in `span`, in order of time: position of the group, nodes, start, and drawn length."""
    begin = _join_times(rng, profile, span)
    mood = _mood(rng, profile, span, begin)
    groups = len(begin)
    # Stratified: one size from each of as many equal shares of the distribution as there are groups. Independent draws
    # from these tails would alone spread the mean of two weeks by 3 % to 5 % from seed to seed.
    share = (_ranks(rng, profile, mood) + rng.random(groups)) / max(groups, 1)
    grains = np.rint(profile.group_nodes.at(share) * (machine / profile.nodes) / profile.grain)
    size = np.clip(grains, 1, machine // profile.grain).astype(np.int64)
    place = rng.random(groups)
    group, size = _split(rng, profile, size)
    size *= profile.grain
    # Systematic sampling: lay the blocks in a row, each as long as it has nodes, and let a point in it say which
    # quantile it gets. So the lengths of all nodes together follow the profile, however few blocks hold most of them.
    order = np.argsort(_ranks(rng, profile, mood[group]))
    row = size[order]
    point = (np.cumsum(row) - row * rng.random(len(row))) / max(row.sum(), 1)
    length = np.empty(len(size))
    length[order] = profile.length_s.at(point)
    return place[group], size, begin[group], length


def _mood(rng: np.random.Generator, profile: MachineProfile, span: Window, times: Floats) -> Floats:
    """The state of the machine at `times`: a standard normal variable that stays similar for some hours."""
    hours = int(span.hours) + 2
    memory = np.exp(-np.arange(12.0) / profile.mood_hours)
    mood = np.convolve(rng.standard_normal(hours + len(memory) - 1), memory / np.sqrt((memory**2).sum()), mode="valid")
    return np.interp((times - span.start) / 3600, np.arange(hours), mood)


def _ranks(rng: np.random.Generator, profile: MachineProfile, mood: Floats) -> Counts:
    """A random order that tends to have high ranks where the mood is high."""
    noise = rng.standard_normal(len(mood))
    return np.argsort(np.argsort(profile.mood * mood + np.sqrt(1 - profile.mood**2) * noise))


def _join_times(rng: np.random.Generator, profile: MachineProfile, span: Window) -> Floats:
    """The times at which groups join, sorted.

    The rate is redrawn every hour, scaled to the profile's rate over the span.
    """
    count = int(profile.groups_per_hour * span.hours + rng.random())
    edges = np.append(np.arange(0.0, span.seconds, 3600.0), span.seconds)
    shape = profile.hourly_cv**-2
    passed = np.concatenate(([0.0], np.cumsum(rng.gamma(shape, size=len(edges) - 1) * np.diff(edges))))
    times = np.interp(np.sort(rng.random(count)) * passed[-1], passed, edges)
    return _on_grid(profile, span.start + times)


def _split(rng: np.random.Generator, profile: MachineProfile, size: Counts) -> tuple[Counts, Counts]:
    """Cut groups of `size` grains into blocks. Returns the index of the group and the grains of each block."""
    parts = 1 + rng.poisson(profile.split * np.log(size * profile.grain))
    group = np.repeat(np.arange(len(size)), parts)
    # With a small shape one block of the group is by far the largest, as on Summit.
    weight = np.cumsum(rng.gamma(0.4, size=len(group)) + 1e-9)
    last = np.cumsum(parts) - 1
    upto = weight[last]
    before = np.concatenate(([0.0], upto[:-1]))
    cut = np.rint((weight - before[group]) / (upto - before)[group] * size[group]).astype(np.int64)
    grains = np.diff(cut, prepend=0)
    first = last - parts + 1
    grains[first] = cut[first]
    return group[grains > 0], grains[grains > 0]


def _leave_together(rng: np.random.Generator, profile: MachineProfile, begin: Floats, length: Floats) -> Floats:
    """The time at which each block leaves.

    It is one of few times, near `begin + length` and not before the shortest fragment. The times are a smallest set
    that has one within `slack` of every block's length. Blocks are sorted by their latest end, and a block needs a new
    time only if it cannot leave at the last one found. Each time then gets a heavy-tailed weight, the appetite of the
    job that starts there, and a block leaves at one of the times within `sway` of its length.
    """
    shortest = begin + profile.length_s.smallest
    earliest = np.maximum(begin + length * (1 - profile.slack), shortest)
    latest = begin + length * (1 + profile.slack)
    order = np.argsort(latest, kind="stable")
    spans: list[tuple[float, float]] = []  # the earliest and latest time that suits all blocks of one leave event
    low, high = -np.inf, -np.inf
    for a, b in zip(earliest[order].tolist(), latest[order].tolist(), strict=True):
        if a > high:
            spans.append((low, high))
            low, high = a, b
        else:
            low = max(low, a)
    times = np.array([*spans[1:], (low, high)]).mean(axis=1)
    appetite = np.concatenate(([0.0], np.cumsum(rng.pareto(profile.appetite, size=len(times)))))
    first = np.searchsorted(times, np.maximum(begin + length * (1 - profile.sway), shortest))
    last = np.searchsorted(times, begin + length * (1 + profile.sway), side="right")
    drawn = appetite[first] + rng.random(len(begin)) * (appetite[last] - appetite[first])
    chosen = np.clip(np.searchsorted(appetite, drawn, side="right") - 1, first, last - 1)
    return _on_grid(profile, times[chosen])


def _on_grid(profile: MachineProfile, times: Floats) -> Floats:
    """The first tick of the profile's clock at or after each time: a poll sees what happened before it."""
    return np.ceil(times / profile.resolution_s) * profile.resolution_s


def _assign(
    profile: MachineProfile, machine: int, nodes: int, place: Floats, size: Counts, begin: Floats, end: Floats
) -> tuple[Counts, Indices]:
    """The nodes of each block, as pairs of block and node: the busy nodes that follow the position of its group.

    Only every k-th node of `machine` is one of the requested `nodes`; the others are left out. If more nodes should
    join than are busy, the block is smaller.
    """
    index = np.arange(machine, dtype=np.int64) * nodes // machine
    seat = np.where(np.diff(index, append=nodes) > 0, index, -1).astype(np.int32)
    first = (place * (machine // profile.grain)).astype(np.int64) * profile.grain
    idle_until = np.full(machine, -np.inf)
    taken: list[Indices] = []
    for at, count, time, until in zip(first.tolist(), size.tolist(), begin.tolist(), end.tolist(), strict=True):
        run = at + np.flatnonzero(idle_until[at:] < time)[:count]
        if len(run) < count:
            run = np.concatenate((run, np.flatnonzero(idle_until[:at] < time)[: count - len(run)]))
        idle_until[run] = until
        seats = seat[run]
        taken.append(seats[seats >= 0])
    block = np.repeat(np.arange(len(taken)), [len(seats) for seats in taken])
    return block, np.concatenate(taken) if taken else np.zeros(0, dtype=np.int32)
