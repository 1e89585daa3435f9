"""Roster of one training job: decides which workers are in which generation.

It uses no clocks, sockets or processes. A manager reports events (`start`, `heard`, `remove`, `lost`) and then calls
`settle`, which returns the messages to send. A new generation begins whenever the wanted members differ from those
announced. It may form when all of its members have arrived and there are at least `min_nodes` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bftrainer.elastic.protocol import (
    Arrived,
    Broken,
    Donate,
    Donors,
    Follow,
    Formed,
    FromManager,
    Generation,
    Go,
    Leaving,
    Left,
    Ready,
)
from bftrainer.errors import InputError


@dataclass(slots=True)
class _Member:
    ready: bool = False
    holds_state: bool = False
    leaving: bool = False
    arrived: int = 0
    addresses: tuple[str, ...] = ("",)
    """Of each of its ranks."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the worker that it is for."""

    worker: str
    message: FromManager


class Roster:
    """The workers of one job, in the order in which they became ready.

    `make_secret` returns the secret of a generation. It is called once per generation that may form, so all its members
    get the same secret and no two generations share one.
    """

    def __init__(self, min_nodes: int = 1, make_secret: Callable[[], str] = str) -> None:
        if min_nodes < 1:
            raise InputError(f"`min_nodes` must be 1 or more, but got {min_nodes}")
        self.min_nodes = min_nodes
        self._make_secret = make_secret
        self.generation = Generation(0, ())
        """The generation announced last."""
        self.going = Generation(0, ())
        """The last generation whose members were told to form. Its members may communicate right now."""
        self._workers: dict[str, _Member] = {}
        self._ready_order: list[str] = []
        self._answers: list[Outgoing] = []  # to newcomers that ask for the state
        self._followers: dict[str, set[str]] = {}  # newcomers, and who was asked to send each of them the state
        self._cut = False
        self._cut_off = 0  # the last generation whose members were told that it is cut

    def resume(self, generation: Generation, *, whole: bool) -> None:
        """Continue from an earlier manager: `generation` was announced last, and its members are known here.

        `whole`: all members train in it. Otherwise it is unknown how far they got, and the next `settle` begins a new
        generation.
        """
        self.generation = self.going = generation
        self._cut = not whole

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers that were started and are not gone."""
        return tuple(self._workers)

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the generation announced last."""
        return self.generation.members

    @property
    def is_cut(self) -> bool:
        """Whether the last group has broken or lost a member, and no group was told to form since."""
        return self._cut or (self.generation.cut and self.going.id != self.generation.id)

    def missing(self) -> tuple[str, ...]:
        """Return the members of the generation announced last that the others still wait for."""
        if self.going.id == self.generation.id or len(self.generation.members) < self.min_nodes:
            return ()
        known = ((name, self._workers.get(name)) for name in self.generation.members)
        return tuple(name for name, worker in known if worker and worker.arrived != self.generation.id)

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    def is_ready(self, worker: str) -> bool:
        """Return whether a worker may be, or is, in a generation."""
        return worker in self._workers and self._workers[worker].ready

    def is_leaving(self, worker: str) -> bool:
        """Return whether a worker was told, or asked, to leave."""
        return worker in self._workers and self._workers[worker].leaving

    def start(self, worker: str) -> None:
        """Add a worker that was started. No message is sent to it before it is ready."""
        if worker in self._workers:
            raise InputError(f"worker {worker!r} was started already")
        self._workers[worker] = _Member()

    def ready(self, worker: str) -> None:
        """Record that a worker can join without making the others wait for it."""
        found = self._workers.get(worker)
        if found is not None and not found.ready:
            found.ready = True
            self._ready_order.append(worker)

    def follow(self, worker: str, address: str, secret: str) -> None:
        """Ask those that train for the state, in equal shares, for a newcomer that is not ready yet."""
        found = self._workers.get(worker)
        if found is None or found.ready:
            return
        donors: list[str] = []
        if self._can_train():
            known = ((name, self._workers.get(name)) for name in self.going.members)
            donors = [name for name, member in known if member and member.holds_state and not member.leaving]
            self._followers[worker] = set(donors)
        for share, name in enumerate(donors):
            self._answers.append(Outgoing(name, Donate(worker, address, secret, share, len(donors))))
        self._answers.append(Outgoing(worker, Donors(len(donors))))

    def remove(self, worker: str) -> None:
        """Let a worker leave at the next step boundary."""
        if worker in self._workers:
            self._workers[worker].leaving = True

    def lost(self, worker: str) -> None:
        """Record that a worker is gone: killed, silent, or ended after it left. Peers must not wait for it."""
        if self._workers.pop(worker, None) is None:
            return
        if worker in self._ready_order:
            self._ready_order.remove(worker)
        self._donor_is_gone(worker)
        if worker in self.going.members:
            self._cut = True

    def left(self, worker: str) -> None:
        """Record that a worker has left at a step boundary, as all of its peers did. No peer waits for it."""
        if self._workers.pop(worker, None) is not None:
            self._ready_order = [name for name in self._ready_order if name != worker]
            self._donor_is_gone(worker)

    def _donor_is_gone(self, worker: str) -> None:
        """Tell newcomers that one of those that were asked for the state is gone, so that they ask again at once."""
        for newcomer, donors in self._followers.items():
            if worker in donors:
                donors.remove(worker)
                self._answers.append(Outgoing(newcomer, Donors(len(donors))))

    def arrived(self, worker: str, generation: int, *addresses: str) -> None:
        """Record that a worker, with a rank at each address, waits for the other members of a generation."""
        found = self._workers.get(worker)
        if found is not None:
            found.arrived, found.addresses = generation, addresses

    def formed(self, worker: str) -> None:
        """Record that a worker trains, and so has the job's state."""
        if worker in self._workers:
            self._workers[worker].holds_state = True

    def in_use(self, generation: int) -> bool:
        """Return whether members may be communicating in this generation, even if a newer one is announced."""
        return generation == self.going.id != self._cut_off

    def broken(self, worker: str, generation: int) -> None:
        """Record a worker's report that communication failed in `generation`. Reports of old generations are ignored.

        The worker's peers may not have noticed: a peer that waits for others to connect would wait for a long time.
        """
        if worker in self._workers and self.in_use(generation):
            self._cut = True

    def heard(self, worker: str, message: object) -> None:
        """Apply a worker's message. Messages that are not about membership are ignored here."""
        match message:
            case Follow(address, secret):
                self.follow(worker, address, secret)
            case Ready():
                self.ready(worker)
            case Arrived(generation, address, addresses):
                self.arrived(worker, generation, *(addresses or (address,)))
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

    def _can_train(self) -> bool:
        """Return whether there are enough workers for a generation, without those that are not ready yet."""
        return len(self._wanted()) >= self.min_nodes

    def _wanted(self) -> tuple[str, ...]:
        """Return the wanted members: all ready workers that need not leave.

        If none of them has the job's state, workers that have it are included although they are leaving.
        """
        staying = [name for name in self._ready_order if not self._workers[name].leaving]
        if staying and not any(self._workers[name].holds_state for name in staying):
            with_state = [n for n in self._ready_order if n in staying or self._workers[n].holds_state]
            if len(with_state) >= self.min_nodes:  # fewer could not train, nor hand the state over
                return tuple(with_state)
        return tuple(staying)

    def settle(self, *, announce: bool = True) -> Sequence[Outgoing]:
        """Return the messages to send now. Call it after reporting all events that happened at the same time.

        Without `announce` newcomers wait until more of them are ready; messages that cannot wait are returned anyway.
        """
        wanted = self._wanted()
        self._followers = {
            name: donors
            for name, donors in self._followers.items()
            if name in self._workers and not self.is_ready(name)
        }
        said = [answer for answer in self._answers if answer.worker in self._workers]
        self._answers = []
        if self._followers and not self._can_train():
            # The others make no step before these newcomers join, so there is nothing to follow.
            said += [Outgoing(name, Donors(0)) for name in sorted(self._followers)]
            self._followers = {}
        gone = any(name not in self._workers for name in self.generation.members)
        if self._cut or ((announce or gone) and wanted != self.generation.members):
            # Workers that are leaving get the message too: it tells them that they are not members.
            self.generation = Generation(self.generation.id + 1, wanted, self._cut)
            self._cut_off = self.going.id if self._cut else self._cut_off
            self._cut = False
            said += [Outgoing(name, self.generation) for name in self._ready_order]
        members = [self._workers[name] for name in self.generation.members]
        here = [worker.arrived == self.generation.id for worker in members]
        if self.going.id != self.generation.id and all(here) and len(members) >= max(1, self.min_nodes):
            self.going = self.generation
            addresses = tuple(address for worker in members for address in worker.addresses)
            ranks = tuple(len(worker.addresses) for worker in members) if len(addresses) > len(members) else ()
            go = Go(self.generation.id, addresses, self._make_secret(), ranks)
            said += [Outgoing(name, go) for name in self.generation.members]
        return said
