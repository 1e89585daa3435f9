"""The events of `soak_gpu.py`: what happens to the workers, in which order. Pure functions of a seed.

join      a worker joins
leave     a worker is told to leave and does so at a step boundary
kill      SIGKILL to any worker
rank0     SIGKILL to rank 0
two       SIGKILL to two workers at once
newcomer  a worker joins and gets SIGKILL before its first group has formed
survivor  a worker joins, and a member gets SIGKILL before the newcomer's first group has formed
stop      SIGSTOP to any worker: it hangs until the manager notices its silence
"""

from __future__ import annotations

import random

KILLS = ("kill", "rank0", "two", "newcomer", "survivor")
START = 3
"""Workers at the beginning."""
KINDS = ("join", "leave", "stop", *KILLS)
GPT2 = (
    *("kill", "join", "rank0", "join", "leave", "join", "two", "join", "newcomer", "stop", "join"),
    *("survivor", "join", "stop", "join", "rank0", "leave", "join"),
)
"""Six kills, two leaves, two SIGSTOPs, and the joins between them; 1 to 3 workers."""
MIXTURE = ("join",) * 11 + ("leave",) * 3 + ("kill", "rank0", "stop", "newcomer", "survivor") * 2 + ("two",)
"""As many go as come."""


def after(kind: str, count: int) -> int:
    """How many workers train after an event, if `count` did before."""
    return count + {"join": 1, "newcomer": 0, "survivor": 0, "two": -2}.get(kind, -1)


def possible(kind: str, count: int, most: int) -> bool:
    """Whether an event may happen to `count` workers: one that has the state must be left."""
    if kind in ("join", "newcomer"):
        return count < most
    if kind == "survivor":
        return 2 <= count < most
    return after(kind, count) >= 1


def mixed(events: int, seed: int, most: int) -> tuple[str, ...]:
    """So many events of all kinds, in random order."""
    rng = random.Random(seed)
    waiting: list[str] = []
    chosen: list[str] = []
    count = START
    while len(chosen) < events:
        kind = next((kind for kind in waiting if possible(kind, count, most)), None)
        if kind is None:
            waiting += rng.sample(MIXTURE, len(MIXTURE))
            continue
        waiting.remove(kind)
        chosen.append(kind)
        count = after(kind, count)
    return tuple(chosen)
