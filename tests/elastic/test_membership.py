"""The worker's end of the channel, against a manager that the test plays itself."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bftrainer.elastic import protocol
from bftrainer.elastic.membership import Assignment, Leave, Membership
from bftrainer.elastic.protocol import Arrived, Broken, Generation, Go, Hello, Left, Message, Ready, Report
from support.waiting import wait_until


class Manager:
    """Listens on a socket, takes down what it hears, says what it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen()
        self.heard: list[Message] = []
        self.hangs_up = True
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        self.peer, _ = self._server.accept()
        with self.peer.makefile("rb") as lines:
            for line in lines:
                message = protocol.decode(line)
                if message is not None:
                    self.heard.append(message)
        if self.hangs_up:
            with contextlib.suppress(OSError):
                self.peer.shutdown(socket.SHUT_RDWR)

    def say(self, message: Message) -> None:
        self.peer.sendall(protocol.encode(message))

    def close(self) -> None:
        self.peer.close()
        self._server.close()

    def hears(self, kind: type) -> list[Message]:
        return [message for message in self.heard if isinstance(message, kind)]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "channel")
    yield manager
    manager.close()


@pytest.fixture
def worker(manager: Manager) -> Iterator[Membership]:
    membership = Membership(manager.path, "b")
    wait_until(lambda: manager.hears(Hello))
    yield membership
    membership.close()


def test_it_says_who_it_is_and_reports_at_once(manager: Manager, worker: Membership) -> None:
    worker.ready()
    wait_until(lambda: manager.hears(Ready) and manager.hears(Report))
    assert isinstance(manager.heard[0], Hello)
    assert manager.heard[0].worker == "b"


def test_it_arrives_where_it_is_a_member_and_goes_when_all_are_there(manager: Manager, worker: Membership) -> None:
    places: list[Assignment] = []
    thread = threading.Thread(target=lambda: places.append(worker.arrive(lambda rank: f"host:{rank}")))
    thread.start()
    manager.say(Generation(1, ("a", "b")))
    wait_until(lambda: manager.hears(Arrived))
    assert manager.hears(Arrived) == [Arrived(1, "host:1")]
    manager.say(Generation(2, ("b", "c")))  # before all had arrived
    wait_until(lambda: len(manager.hears(Arrived)) == 2)
    manager.say(Go(1, ("x", "y")))  # void by now
    manager.say(Go(2, ("p", "q")))
    thread.join(20)
    assert places == [Assignment(2, ("b", "c"), 0, ("p", "q"))]
    assert places[0].world == 2
    assert worker.entered(2)
    assert not worker.changed


def test_who_is_not_a_member_leaves(manager: Manager, worker: Membership) -> None:
    manager.say(Generation(1, ("a",)))
    wait_until(lambda: worker.changed)
    with pytest.raises(Leave) as left:
        worker.arrive(lambda rank: "")
    assert left.value.generation.members == ("a",)
    worker.leave(7)
    wait_until(lambda: manager.hears(Left))
    assert manager.hears(Left) == [Left(7)]


def test_a_cut_wakes_before_anybody_can_form_the_next_group(manager: Manager, worker: Membership) -> None:
    order: list[str] = []
    worker.on_cut = lambda: order.append(f"cut, newest known {worker.newest}")
    manager.say(Generation(1, ("a", "b")))
    wait_until(lambda: worker.newest == 1)
    assert worker.entered(1)
    manager.say(Generation(2, ("b",), cut=True))
    wait_until(lambda: worker.newest == 2)
    assert order == ["cut, newest known 1"]
    assert worker.cut
    assert worker.lost_one(1)
    assert not worker.lost_one(2)
    assert not worker.entered(1)
    assert worker.entered(2)
    assert not worker.cut


@pytest.mark.parametrize(("cut", "formed"), [(False, 1), (True, 2)])
def test_the_word_to_go_counts_also_when_a_newer_generation_is_announced_unless_it_was_cut(
    manager: Manager, worker: Membership, cut: bool, formed: int
) -> None:
    def address(rank: int) -> str:
        if worker.newest == 1:
            manager.say(Go(1, ("x", "y")))
            manager.say(Generation(2, ("a", "b", "c"), cut))
        else:
            manager.say(Go(2, ("x", "y", "z")))
        wait_until(lambda: worker.newest == 2)
        return "here:0"

    manager.say(Generation(1, ("a", "b")))
    wait_until(lambda: worker.newest == 1)
    assert worker.arrive(address).generation == formed


def test_a_generation_that_could_not_be_formed_is_not_tried_again(manager: Manager, worker: Membership) -> None:
    manager.say(Generation(1, ("a", "b")))
    manager.say(Go(1, ("x", "y")))
    wait_until(lambda: worker.newest == 1)
    worker.gave_up(1)
    assert not worker.wait_for_newer(0.01)
    worker.send(Broken(1, "no luck"))
    wait_until(lambda: manager.hears(Broken))
    manager.say(Generation(2, ("b",)))
    assert worker.wait_for_newer(20)


def test_a_broken_group_is_told_of_also_when_a_newer_generation_is_known(manager: Manager, worker: Membership) -> None:
    torch = pytest.importorskip("torch")
    from bftrainer.elastic.torch.group.group import GroupBroken
    from bftrainer.elastic.torch.group.peers import Peers

    crew = Peers(worker, "gloo", torch.device("cpu"))
    manager.say(Generation(1, ("a", "b")))
    wait_until(lambda: worker.newest == 1)
    assert worker.entered(1)
    manager.say(Generation(2, ("a", "b", "c")))
    wait_until(lambda: worker.newest == 2)
    crew.give_up(GroupBroken("no route to b"))
    wait_until(lambda: manager.hears(Broken))
    manager.say(Generation(3, ("a", "b", "c"), cut=True))
    crew.give_up(GroupBroken("no route to b"))  # which the manager knows by now
    crew.close()
    assert [said for said in manager.heard if isinstance(said, Broken)] == [Broken(1, "no route to b")]


def test_a_manager_that_writes_to_a_leaving_worker_still_hears_its_last_words(
    manager: Manager, worker: Membership
) -> None:
    manager.hangs_up = False
    leaving = threading.Thread(target=worker.leave, args=(7,))
    leaving.start()
    wait_until(lambda: manager.hears(Left))
    leaving.join(0.5)
    manager.say(Generation(1, ("b",)))  # asyncio would drop the connection and what it has not read, should this fail
    manager.peer.shutdown(socket.SHUT_RDWR)
    leaving.join(20)
    assert not leaving.is_alive()


def test_messages_and_fields_of_the_future_are_ignored(manager: Manager, worker: Membership) -> None:
    manager.peer.sendall(b'{"type": "weather", "sun": true}\n')
    manager.peer.sendall(b'{"type": "generation", "id": 3, "members": ["b"], "cut": false, "mood": "good"}\n')
    wait_until(lambda: worker.newest == 3)
    manager.say(Go(3, ("here",)))
    assert worker.arrive(lambda rank: "here") == Assignment(3, ("b",), 0, ("here",))


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"{}\n", b'{"type": "go"}\n', b'{"type": "left"}\n'])
def test_nonsense_is_refused(line: bytes) -> None:
    with pytest.raises(protocol.ProtocolError, match="must be a JSON object with a `type`, but got"):
        protocol.decode(line)


def test_every_message_survives_its_encoding() -> None:
    messages: list[Message] = [
        Hello("a", 1),
        Ready(),
        Arrived(1, "h:2"),
        Report(3, 4, 5, 6, 7, {"2": 1.5}, {"loss": 0.1}, 8),
        Generation(1, ("a", "b"), True),
        Go(2, ("x", "y")),
        Hello("a", 1, local_rank=3),
        Arrived(1, "h:2", ("h:2", "h:3")),
        Go(2, ("x", "y", "z"), "secret", (2, 1)),
    ]
    assert [protocol.decode(protocol.encode(message)) for message in messages] == messages
    assert json.loads(protocol.encode(Ready())) == {"type": "ready"}


def test_a_worker_with_one_rank_sends_and_gets_no_field_that_version_0_1_0_did_not_have() -> None:
    assert protocol.as_json(Hello("a", 1)).keys() == {"type", "worker", "pid", "protocol"}
    assert protocol.as_json(Arrived(1, "h:2")).keys() == {"type", "generation", "address"}
    assert protocol.as_json(Go(2, ("x",))).keys() == {"type", "generation", "addresses", "secret"}


@pytest.mark.waits
def test_a_worker_whose_manager_is_gone_ends(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "channel")
    code = (
        "import sys, time\nfrom bftrainer.elastic.membership import Membership\n"
        "Membership(sys.argv[1], 'a')\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, manager.path], stderr=subprocess.PIPE)
    wait_until(lambda: manager.hears(Hello))
    manager.peer.shutdown(socket.SHUT_RDWR)
    _, said = process.communicate(timeout=30)
    manager.close()
    assert process.returncode == protocol.RESTART
    assert b"the manager of this worker is gone" in said
