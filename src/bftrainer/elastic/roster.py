"""Who is in which generation: the membership of one training job, decided without clocks, sockets or processes.

A manager tells the roster what happened (`start`, `heard`, `remove`, `lost`), then asks `settle` what to say to whom.
A new generation begins whenever the wanted members differ from those announced; it may form when all of its members
have arrived and they are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bftrainer.elastic.protocol import Arrived, Broken, Formed, FromManager, Generation, Go, Leaving, Left, Ready
from bftrainer.errors import InputError


@dataclass(slots=True)
class _Worker:
    ready: bool = False
    holds_state: bool = False
    leaving: bool = False
    arrived: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True)
class Saying:
    """A message and whom it is for."""

    worker: str
    message: FromManager


class Roster:
    """The workers of one job, in the order in which they became ready.

    `make_secret` gives the secret of a generation. It is called once for each that is let go, so all its members get
    the same one and no two generations share one.
    """

    def __init__(self, min_nodes: int = 1, make_secret: Callable[[], str] = str) -> None:
        if min_nodes < 1:
            raise InputError(f"`min_nodes` must be 1 or more, but got {min_nodes}")
        self.min_nodes = min_nodes
        self._make_secret = make_secret
        self.generation = Generation(0, ())
        """The one announced last."""
        self.going = Generation(0, ())
        """The last one whose members were told to form: those who may communicate right now."""
        self._workers: dict[str, _Worker] = {}
        self._ready_order: list[str] = []
        self._cut = False
        self._cut_off = 0  # the last generation whose members were told that it is cut

    def resume(self, generation: Generation, *, whole: bool) -> None:
        """Take up where an earlier manager was: this generation was announced last, and its members are known here.

        `whole`: all of them train in it. Otherwise nobody can say how far they got, and the next `settle` begins anew.
        """
        self.generation = self.going = generation
        self._cut = not whole

    @property
    def workers(self) -> tuple[str, ...]:
        """All that were started and are not gone."""
        return tuple(self._workers)

    @property
    def members(self) -> tuple[str, ...]:
        """Those of the generation announced last."""
        return self.generation.members

    def missing(self) -> tuple[str, ...]:
        """Those whom the others of the generation announced last wait for."""
        if self.going.id == self.generation.id or len(self.generation.members) < self.min_nodes:
            return ()
        known = ((name, self._workers.get(name)) for name in self.generation.members)
        return tuple(name for name, worker in known if worker and worker.arrived != self.generation.id)

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    def is_ready(self, worker: str) -> bool:
        """Whether it may be, or is, in a generation."""
        return worker in self._workers and self._workers[worker].ready

    def is_leaving(self, worker: str) -> bool:
        """Whether it was told, or asked, to leave."""
        return worker in self._workers and self._workers[worker].leaving

    def start(self, worker: str) -> None:
        """A worker was started; it is told nothing before it is ready."""
        if worker in self._workers:
            raise InputError(f"worker {worker!r} was started already")
        self._workers[worker] = _Worker()

    def ready(self, worker: str) -> None:
        """It can join. The others need not wait for anything of it any more."""
        found = self._workers.get(worker)
        if found is not None and not found.ready:
            found.ready = True
            self._ready_order.append(worker)

    def remove(self, worker: str) -> None:
        """It shall leave at the next step boundary."""
        if worker in self._workers:
            self._workers[worker].leaving = True

    def lost(self, worker: str) -> None:
        """It is gone: killed, silent, or ended after it left. Peers that may be waiting for it must not."""
        if self._workers.pop(worker, None) is None:
            return
        if worker in self._ready_order:
            self._ready_order.remove(worker)
        if worker in self.going.members:
            self._cut = True

    def left(self, worker: str) -> None:
        """It has left at a step boundary, as all of its peers did: nobody waits for it."""
        if self._workers.pop(worker, None) is not None:
            self._ready_order = [name for name in self._ready_order if name != worker]

    def arrived(self, worker: str, generation: int, address: str) -> None:
        """It waits for the others of a generation."""
        found = self._workers.get(worker)
        if found is not None:
            found.arrived, found.address = generation, address

    def formed(self, worker: str) -> None:
        """It trains, and so has the job's state."""
        if worker in self._workers:
            self._workers[worker].holds_state = True

    def in_use(self, generation: int) -> bool:
        """Whether its members may be communicating in this generation, also when a newer one is announced."""
        return generation == self.going.id != self._cut_off

    def broken(self, worker: str, generation: int) -> None:
        """It says that communication failed. Old news are ignored.

        Its peers may not have noticed: who waits for others to connect would wait for long.
        """
        if worker in self._workers and self.in_use(generation):
            self._cut = True

    def heard(self, worker: str, message: object) -> None:
        """It said something. What is not about its membership is for others."""
        match message:
            case Ready():
                self.ready(worker)
            case Arrived(generation, address):
                self.arrived(worker, generation, address)
            case Broken(generation, _):
                self.broken(worker, generation)
            case Formed():
                self.formed(worker)
            case Leaving():
                self.remove(worker)
            case Left():
                self.left(worker)
            case _:
                pass

    def _wanted(self) -> tuple[str, ...]:
        """The ready that need not leave; and as long as none of those has the job's state, those who have it."""
        staying = [name for name in self._ready_order if not self._workers[name].leaving]
        if staying and not any(self._workers[name].holds_state for name in staying):
            with_state = [n for n in self._ready_order if n in staying or self._workers[n].holds_state]
            if len(with_state) >= self.min_nodes:  # or they could not train, and hand nothing over
                return tuple(with_state)
        return tuple(staying)

    def settle(self, *, announce: bool = True) -> Sequence[Saying]:
        """What to say now. Call it after telling the roster all that happened at once.

        Without `announce` newcomers are kept waiting for more of them; what has to be said at once is said anyway.
        """
        said: list[Saying] = []
        wanted = self._wanted()
        gone = any(name not in self._workers for name in self.generation.members)
        if self._cut or ((announce or gone) and wanted != self.generation.members):
            # Leavers are told too: it is how they know.
            self.generation = Generation(self.generation.id + 1, wanted, self._cut)
            self._cut_off = self.going.id if self._cut else self._cut_off
            self._cut = False
            said += [Saying(name, self.generation) for name in self._ready_order]
        members = [self._workers[name] for name in self.generation.members]
        here = [worker.arrived == self.generation.id for worker in members]
        if self.going.id != self.generation.id and all(here) and len(members) >= max(1, self.min_nodes):
            self.going = self.generation
            go = Go(self.generation.id, tuple(worker.address for worker in members), self._make_secret())
            said += [Saying(name, go) for name in self.generation.members]
        return said
