from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.elastic.protocol import Donate, Donors, Follow, Formed, Generation, Go, Ready
from bftrainer.elastic.roster import Roster
from bftrainer.errors import InputError


def joined(*workers: str, min_nodes: int = 1) -> Roster:
    """A roster whose workers train together."""
    roster = Roster(min_nodes)
    for worker in workers:
        roster.start(worker)
        roster.ready(worker)
    roster.settle()
    for worker in workers:
        roster.arrived(worker, roster.generation.id, f"{worker}:1")
    roster.settle()
    return roster


def said(roster: Roster) -> dict[str, list[object]]:
    heard: dict[str, list[object]] = {}
    for saying in roster.settle():
        heard.setdefault(saying.worker, []).append(saying.message)
    return heard


def test_a_worker_is_told_nothing_before_it_is_ready() -> None:
    roster = Roster()
    roster.start("a")
    assert said(roster) == {}
    roster.ready("a")
    assert said(roster) == {"a": [Generation(1, ("a",))]}


def test_all_go_when_the_last_has_arrived_with_addresses_by_rank() -> None:
    roster = joined("a", "b")
    roster.start("c")
    roster.ready("c")
    assert said(roster) == {w: [Generation(2, ("a", "b", "c"))] for w in "abc"}
    roster.arrived("c", 2, "c:9")
    roster.arrived("a", 2, "a:9")
    assert said(roster) == {}
    roster.arrived("b", 2, "b:9")
    assert said(roster) == {w: [Go(2, ("a:9", "b:9", "c:9"))] for w in "abc"}
    assert said(roster) == {}


def training(*workers: str) -> Roster:
    """A roster whose workers train together and have said so."""
    roster = joined(*workers)
    for worker in workers:
        roster.heard(worker, Formed(roster.generation.id, len(workers), 0.0, 0.0, 0.0))
    return roster


def test_all_who_train_are_asked_for_a_share_of_the_state_for_a_newcomer_that_follows() -> None:
    roster = training("a", "b")
    roster.start("c")
    roster.heard("c", Follow("c:5", "secret"))
    assert said(roster) == {
        "a": [Donate("c", "c:5", "secret", 0, 2)],
        "b": [Donate("c", "c:5", "secret", 1, 2)],
        "c": [Donors(2)],
    }
    assert said(roster) == {}
    roster.heard("c", Ready())
    assert said(roster) == {w: [Generation(2, ("a", "b", "c"))] for w in "abc"}


def test_where_nobody_has_the_state_there_is_nothing_to_follow() -> None:
    roster = joined("a")  # it has not formed its first generation yet
    roster.start("b")
    roster.heard("b", Follow("b:5", "secret"))
    assert said(roster) == {"b": [Donors(0)]}


def test_workers_that_leave_or_are_lost_are_not_asked_for_the_state() -> None:
    roster = training("a", "b", "c")
    roster.remove("a")
    roster.lost("b")
    roster.start("d")
    roster.heard("d", Follow("d:5", "secret"))
    messages = said(roster)
    assert messages["c"][0] == Donate("d", "d:5", "secret", 0, 1)
    assert messages["d"] == [Donors(1)]
    assert not any(isinstance(message, Donate) for message in messages["a"])


def test_a_newcomer_is_told_when_one_that_was_asked_for_the_state_is_gone_and_can_ask_the_others_again() -> None:
    roster = training("a", "b", "c")
    roster.start("d")
    roster.heard("d", Follow("d:5", "secret"))
    assert said(roster)["d"] == [Donors(3)]
    roster.lost("a")
    assert said(roster)["d"] == [Donors(2)]
    roster.heard("d", Follow("d:6", "secret"))
    messages = said(roster)
    assert messages["d"] == [Donors(2)]
    assert Donate("d", "d:6", "secret", 0, 2) in messages["b"]
    roster.ready("d")
    said(roster)
    roster.left("b")  # the newcomer is ready: it asks no more
    assert Donors not in [type(message) for message in said(roster).get("d", [])]


def test_a_newcomer_without_which_the_others_cannot_train_does_not_follow_or_stops() -> None:
    roster = training("a", "b")
    roster.min_nodes = 2
    roster.start("c")
    roster.heard("c", Follow("c:5", "secret"))
    assert said(roster)["c"] == [Donors(2)]
    roster.lost("b")
    assert said(roster)["c"] == [Donors(1), Donors(0)]
    assert "c" not in said(roster)
    roster.start("d")
    roster.heard("d", Follow("d:5", "secret"))
    assert said(roster) == {"d": [Donors(0)]}


def test_a_worker_that_is_ready_or_unknown_cannot_follow() -> None:
    roster = training("a", "b")
    roster.heard("a", Follow("a:5", "secret"))
    roster.heard("stranger", Follow("x:5", "secret"))
    assert said(roster) == {}


def test_a_leaver_is_told_and_not_waited_for() -> None:
    roster = joined("a", "b")
    roster.remove("a")
    assert said(roster) == {w: [Generation(2, ("b",))] for w in "ab"}
    roster.arrived("b", 2, "b:9")
    assert said(roster) == {"b": [Go(2, ("b:9",))]}
    roster.left("a")
    assert said(roster) == {}
    assert roster.workers == ("b",)


def test_the_loss_of_a_member_cuts_its_peers_loose() -> None:
    roster = joined("a", "b", "c")
    roster.lost("a")
    assert said(roster) == {w: [Generation(2, ("b", "c"), cut=True)] for w in "bc"}


def test_the_loss_of_a_joiner_does_not_disturb_those_who_train() -> None:
    roster = joined("a", "b")
    roster.start("c")
    roster.ready("c")
    roster.settle()
    roster.lost("c")
    assert said(roster) == {w: [Generation(3, ("a", "b"))] for w in "ab"}
    roster.start("d")
    roster.lost("d")
    assert said(roster) == {}


def test_the_loss_of_a_leaver_that_still_trains_cuts_its_peers_loose() -> None:
    roster = joined("a", "b")
    roster.remove("a")
    roster.settle()
    roster.lost("a")
    assert said(roster) == {"b": [Generation(3, ("b",), cut=True)]}


def test_the_loss_of_a_leaver_that_its_peers_have_left_behind_is_no_news() -> None:
    roster = joined("a", "b")
    roster.remove("a")
    roster.settle()
    roster.arrived("b", 2, "b:9")
    roster.settle()
    roster.lost("a")
    assert said(roster) == {}


def test_a_death_while_forming_begins_another_generation() -> None:
    roster = joined("a", "b")
    roster.start("c")
    roster.ready("c")
    roster.settle()
    for worker in "abc":
        roster.arrived(worker, 2, f"{worker}:2")
    roster.settle()
    roster.lost("c")
    assert said(roster) == {w: [Generation(3, ("a", "b"), cut=True)] for w in "ab"}


def test_broken_communication_begins_the_generation_anew() -> None:
    roster = joined("a", "b")
    roster.broken("b", 1)
    assert said(roster) == {w: [Generation(2, ("a", "b"), cut=True)] for w in "ab"}
    roster.broken("a", 1)  # the other one noticed too
    assert said(roster) == {}


def test_a_group_that_breaks_after_a_newer_generation_was_announced_is_cut_once() -> None:
    roster = joined("a", "b")
    roster.start("c")
    roster.ready("c")
    roster.settle()
    roster.broken("b", 1)  # while "a" may still wait for it in generation 1
    assert said(roster) == {w: [Generation(3, ("a", "b", "c"), cut=True)] for w in "abc"}
    roster.broken("a", 1)
    assert said(roster) == {}


def test_too_few_wait_until_there_are_enough() -> None:
    roster = joined("a", "b", min_nodes=2)
    roster.lost("b")
    roster.settle()
    roster.arrived("a", roster.generation.id, "a:2")
    assert said(roster) == {}
    roster.start("c")
    roster.ready("c")
    roster.settle()
    for worker in "ac":
        roster.arrived(worker, roster.generation.id, f"{worker}:3")
    assert said(roster) == {w: [Go(roster.generation.id, ("a:3", "c:3"))] for w in "ac"}


def test_the_last_to_leave_is_told_that_nobody_is_left() -> None:
    roster = joined("a")
    roster.remove("a")
    assert said(roster) == {"a": [Generation(2, ())]}


def test_those_who_hold_the_state_stay_until_another_has_it() -> None:
    roster = joined("a")
    roster.formed("a")
    roster.start("b")
    roster.ready("b")
    roster.settle()
    roster.remove("a")
    assert said(roster) == {}  # both are announced already, and "a" is needed
    assert roster.members == ("a", "b")
    for worker in "ab":
        roster.arrived(worker, 2, f"{worker}:2")
    assert said(roster) == {w: [Go(2, ("a:2", "b:2"))] for w in "ab"}
    roster.formed("b")
    assert said(roster) == {w: [Generation(3, ("b",))] for w in "ab"}


def test_who_holds_the_state_is_let_go_where_too_few_could_take_it() -> None:
    roster = joined("a", "b", "c", min_nodes=3)
    for worker in "abc":
        roster.formed(worker)
    roster.lost("b")
    roster.lost("c")
    roster.settle()
    roster.start("d")
    roster.ready("d")
    roster.settle()
    roster.remove("a")
    assert [m.members for m in said(roster)["a"]] == [("d",)]  # it leaves, and keeps the state on disk


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(InputError, match="`min_nodes` must be 1 or more, but got 0"):
        Roster(0)
    roster = Roster()
    roster.start("a")
    with pytest.raises(InputError, match="worker 'a' was started already"):
        roster.start("a")


class Worker:
    """What a worker does about what it hears; it may be slow to do it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[object] = []
        self.generation = Generation(0, ())
        self.group: tuple[int, tuple[str, ...]] | None = None  # which it communicates in
        self.loose = True

    def act(self, roster: Roster) -> None:
        """Take one message to heart."""
        message = self.heard.pop(0)
        if isinstance(message, Generation):
            self.generation = message
            if self.name not in message.members:
                roster.left(self.name)
            else:
                roster.arrived(self.name, message.id, f"{self.name}:{message.id}")
            self.group = None
        elif isinstance(message, Go) and message.generation == self.generation.id:
            self.group = (message.generation, message.addresses)


@given(data=st.data())
def test_whatever_happens_the_ready_and_wanted_end_up_in_one_group(data: st.DataObject) -> None:
    roster, workers = Roster(), {}

    def deliver() -> None:
        for saying in roster.settle():
            workers[saying.worker].heard.append(saying.message)

    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["join", "join", "remove", "lose", "break", "act", "act", "act"]))
        names = sorted(roster.workers)
        if action == "join":
            name = f"w{number}"
            workers[name] = Worker(name)
            roster.start(name)
            roster.ready(name)
        elif names:
            name = data.draw(st.sampled_from(names))
            if action == "remove":
                roster.remove(name)
            elif action == "lose":
                roster.lost(name)
            elif action == "break":
                roster.broken(name, workers[name].generation.id)
            elif workers[name].heard:
                workers[name].act(roster)
        deliver()
    busy = True
    while busy:  # everybody catches up
        busy = False
        for name in roster.workers:
            while name in roster and workers[name].heard:
                workers[name].act(roster)
                deliver()
                busy = True
    remaining = roster.workers
    assert not any(roster.is_leaving(name) for name in remaining)
    groups = {workers[name].group for name in remaining}
    assert len(groups) <= 1
    if remaining:
        (group,) = groups
        assert group is not None
        assert sorted(address.split(":")[0] for address in group[1]) == sorted(remaining)


def test_a_member_that_is_lost_before_it_arrived_is_not_waited_for_although_newcomers_are() -> None:
    roster = Roster()
    for name in ("a", "b"):
        roster.start(name)
        roster.ready(name)
    roster.settle()
    roster.arrived("a", 1, "a:1")
    roster.lost("b")
    (said,) = roster.settle(announce=False)
    assert said.message == Generation(2, ("a",))


def test_newcomers_are_kept_waiting_while_the_others_form() -> None:
    roster = Roster()
    for name in ("a", "b"):
        roster.start(name)
    roster.ready("a")
    roster.settle()
    roster.ready("b")
    roster.arrived("a", 1, "a:1")
    (go,) = roster.settle(announce=False)
    assert go.message == Go(1, ("a:1",))
    assert [said.message for said in roster.settle()] == [Generation(2, ("a", "b"))] * 2


def test_the_members_of_a_generation_get_one_secret_and_the_next_generation_another() -> None:
    numbers = iter(range(100))
    roster = Roster(1, lambda: f"secret-{next(numbers)}")
    secrets: list[set[str]] = []
    for newcomer in "ab":
        roster.start(newcomer)
        roster.ready(newcomer)
        roster.settle()
        for worker in roster.members:
            roster.arrived(worker, roster.generation.id, f"{worker}:1")
        secrets.append({message.secret for s in roster.settle() if isinstance(message := s.message, Go)})
    assert secrets == [{"secret-0"}, {"secret-1"}]


def test_after_a_restart_in_the_midst_of_forming_all_members_get_the_same_new_secret() -> None:
    """Some may have heard the former manager's `go` and others not: it is never said again."""
    numbers = iter(range(100))
    roster = Roster(1, lambda: f"new-{next(numbers)}")
    for worker in "ab":
        roster.start(worker)
        roster.ready(worker)
    roster.resume(Generation(7, ("a", "b")), whole=False)
    assert said(roster) == {w: [Generation(8, ("a", "b"), cut=True)] for w in "ab"}
    for worker in "ab":
        roster.arrived(worker, 8, f"{worker}:8")
    assert said(roster) == {w: [Go(8, ("a:8", "b:8"), "new-0")] for w in "ab"}
