"""The state comes to nodes with several ranks: exact, over the network once, and from all ranks that have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from bftrainer.elastic.membership import Assignment  # noqa: E402
from bftrainer.elastic.torch.state import transfer  # noqa: E402
from bftrainer.elastic.torch.state.hand_over import ByteRange, Roles, layout_of, legs_to  # noqa: E402

RANKS = Path(__file__).with_name("hand_over_ranks.py")
SCENARIOS: dict[str, dict[str, Any]] = {
    "a node joins": {"ranks": [2, 2, 2], "steps": [5, 5, 5, 5, None, None], "survivors first": [2, 3]},
    "two nodes join": {"ranks": [2, 2, 2], "steps": [5, 5, None, None, None, None]},
    "a small node joins": {"ranks": [3, 1], "steps": [5, 5, 5, None]},
    "a large node joins": {"ranks": [1, 3], "steps": [5, None, None, None]},
    "the start": {"ranks": [2, 2], "steps": [None] * 4},
    "some are one step behind": {"ranks": [2, 2], "steps": [4, 5, 4, 5]},
    "other tensors": {"ranks": [2, 2], "steps": [5, 5, None, None], "odd": {"1": "more"}},
    "to be repaired": {"ranks": [2, 2], "steps": [5, 5, None, None], "odd": {"1": "repair"}},
    "one rank per node": {"ranks": [1, 1, 1], "steps": [5, 5, None]},
    "one piece": {"ranks": [2, 2], "steps": [5, 5, None, None], "piece": 64 << 20},
    "a sender is killed": {"ranks": [2, 2], "steps": [5, 5, None, None], "killed": [1, 4]},
    "the source is killed": {"ranks": [2, 2], "steps": [5, 5, None, None], "killed": [0, 4]},
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, Any]]:
    """What each rank of each scenario ended with; None for one that was killed."""
    ended = subprocess.run(
        [sys.executable, str(RANKS), json.dumps(SCENARIOS)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    outcome: dict[str, dict[int, Any]] = {}
    for line in ended.stdout.splitlines():
        for name, ranks in json.loads(line).items():
            outcome[name] = {int(rank): end for rank, end in ranks.items()}
    for name, scenario in SCENARIOS.items():
        alive = {rank for rank, end in outcome[name].items() if end is not None}
        killed = {scenario["killed"][0]} if "killed" in scenario else set()
        assert alive == set(range(sum(scenario["ranks"]))) - killed, (name, ended.stderr)
    return outcome


def over_the_network(name: str, ends: dict[int, Any]) -> Counter[int]:
    """Bytes that came to each node from other nodes, in exchanges of two ranks."""
    ranks = SCENARIOS[name]["ranks"]
    node_of = [node for node, count in enumerate(ranks) for _ in range(count)]
    received: Counter[int] = Counter()
    for rank, end in ends.items():
        for peer, count in end["sent"].items():
            if node_of[int(peer)] != node_of[rank]:
                received[node_of[int(peer)]] += count
    return received


WHOLE = [name for name, scenario in SCENARIOS.items() if "killed" not in scenario and name != "other tensors"]


@pytest.mark.waits
@pytest.mark.parametrize("name", WHOLE)
def test_all_ranks_have_the_state_of_the_most_advanced_one_bit_by_bit(
    found: dict[str, dict[int, Any]], name: str
) -> None:
    ends, steps = found[name], SCENARIOS[name]["steps"]
    ahead = max((step for step in steps if step is not None), default=0)
    whole = [end for rank, end in ends.items() if SCENARIOS[name].get("odd", {}).get(str(rank)) != "repair"]
    assert {end["step"] for end in ends.values()} == {ahead}
    assert len({end["digest"] for end in whole}) == 1
    for rank, end in ends.items():
        takes = steps[rank] != ahead and not (name == "the start" and rank == 0)
        assert (end["loads"], end["error"]) == (int(takes), ""), rank


@pytest.mark.waits
@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("a node joins", [2]),
        ("two nodes join", [1, 2]),
        ("a small node joins", [1]),
        ("a large node joins", [1]),
        ("the start", [1]),
        ("some are one step behind", [1]),
        ("one piece", [1]),
    ],
)
def test_each_byte_comes_to_a_node_over_the_network_once(
    found: dict[str, dict[int, Any]], name: str, nodes: list[int]
) -> None:
    ends = found[name]
    source = ends[1 if name == "some are one step behind" else 0]
    assert over_the_network(name, ends) == dict.fromkeys(nodes, source["size"])
    for end in ends.values():
        assert sum(end["broadcasts"]) < source["size"], "only the skeleton is broadcast"


@pytest.mark.waits
def test_rank_i_sends_to_rank_i_an_equal_share(found: dict[str, dict[int, Any]]) -> None:
    ends = found["two nodes join"]
    half, rest = divmod(ends[0]["size"], 2)
    assert ends[0]["sent"] == {"2": half, "4": half}
    layout = 8  # bytes with which rank 1 says that its state has the same tensors
    assert ends[1]["sent"] == {"0": layout, "3": half + rest, "5": half + rest}
    assert ends[2]["sent"] == {"3": half}
    assert ends[3]["sent"] == {"2": half + rest}


@pytest.mark.waits
def test_ranks_that_take_nothing_send_nothing_and_do_not_wait(found: dict[str, dict[int, Any]]) -> None:
    # The senders of this scenario begin only when ranks 2 and 3 are through.
    ends = found["a node joins"]
    assert [(ends[rank]["exchanges"], ends[rank]["sent"]) for rank in (2, 3)] == [(0, {}), (0, {})]


@pytest.mark.waits
@pytest.mark.parametrize("name", ["other tensors", "to be repaired"])
def test_a_rank_whose_state_is_not_that_of_the_source_does_not_send(
    found: dict[str, dict[int, Any]], name: str
) -> None:
    ends = found[name]
    assert ends[1]["sent"] == {"0": 8}
    assert ends[0]["digest"] == ends[2]["digest"] == ends[3]["digest"] != ends[1]["digest"]
    assert over_the_network(name, ends) == {1: ends[0]["size"]}


@pytest.mark.waits
def test_with_one_rank_per_node_the_tensors_are_broadcast_at_once(found: dict[str, dict[int, Any]]) -> None:
    for end in found["one rank per node"].values():
        assert (end["exchanges"], end["sent"]) == (0, {})
        assert sum(end["broadcasts"]) > end["size"]


@pytest.mark.waits
@pytest.mark.parametrize("name", ["a sender is killed", "the source is killed"])
def test_a_sender_that_is_killed_breaks_the_group_and_nothing_is_taken_over(
    found: dict[str, dict[int, Any]], name: str
) -> None:
    for rank in (2, 3):
        end = found[name][rank]
        assert end["error"].startswith("GroupBroken: ")
        assert end["exchanges"] > 1, "it was broken on the way"
        assert (end["loads"], end["changed"]) == (0, False)


counts = st.integers(1, 5)


@given(counts, counts, st.integers(0, 500), st.integers(1, 60))
def test_each_rank_of_a_node_gets_every_byte_once_and_only_after_its_sender_had_it(
    senders: int, takers: int, size: int, piece: int
) -> None:
    giving, taking = range(senders), range(10, 10 + takers)
    legs = list(legs_to(taking, giving, size, piece))
    had: dict[tuple[int, int], int] = {}  # the round in which a rank got a byte
    for leg in sorted(legs, key=lambda leg: leg.round):
        assert 0 < leg.end - leg.begin <= piece
        for byte in range(leg.begin, leg.end):
            assert (leg.taker, byte) not in had
            assert leg.sender in giving or had[leg.sender, byte] < leg.round
            had[leg.taker, byte] = leg.round
    assert had.keys() == {(rank, byte) for rank in taking for byte in range(size)}
    assert sum(leg.end - leg.begin for leg in legs if leg.sender in giving) == size
    together = Counter((leg.round, leg.sender, leg.taker, leg.tag) for leg in legs)
    assert all(count == 1 for count in together.values())


@given(st.lists(st.integers(0, 9), max_size=8).filter(any), st.data())
def test_a_range_of_bytes_is_read_and_written_across_tensors(lengths: list[int], data: st.DataObject) -> None:
    tensors = [torch.arange(length, dtype=torch.int16) + 300 * n for n, length in enumerate(lengths)]
    memory, copy = ByteRange(tensors), ByteRange([torch.zeros_like(tensor) for tensor in tensors])
    assert memory.size == 2 * sum(lengths)
    cuts = sorted(data.draw(st.sets(st.integers(1, memory.size - 1), max_size=5)))
    for begin, end in zip([0, *cuts], [*cuts, memory.size], strict=True):
        room = copy.room(begin, end)
        room.copy_(memory.read(begin, end))
        copy.write(begin, room)
    for tensor, copied in zip(tensors, copy.tensors, strict=True):
        assert torch.equal(tensor, copied)
    flat = torch.cat([transfer.bytes_of(tensor) for tensor in tensors])
    assert torch.equal(memory.read(0, memory.size), flat)


def test_only_ranks_of_the_source_s_node_that_are_as_far_help_it() -> None:
    assignment = Assignment(1, ("a", "b", "c"), 0, ("x:0",) * 6, "", (2, 3, 1))
    roles = Roles.of(assignment, source=3, taking=[5, 4, 0], equals=[1, 2, 3])
    assert roles == Roles(3, (2,), ((0,), (4,), (5,)))


def test_a_state_whose_tensors_stand_in_other_places_is_another_one() -> None:
    one, other = torch.zeros(3), torch.ones(3)
    states = ({"model": one, "average": other}, {"average": other, "model": one})
    first, second = (layout_of(transfer.take_apart(state)[0]) for state in states)
    assert first != second
    assert first == layout_of(transfer.take_apart({"model": other, "average": one})[0])
