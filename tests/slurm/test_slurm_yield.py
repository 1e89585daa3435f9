"""What the `slurm` pool leaves and gives up to waiting jobs, decided on values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.pools.slurm.hardware import JobRequest, NodeKind, SiteLayout
from bftrainer.cluster.pools.slurm.read import Pilot, WaitingJob, read_nodes
from bftrainer.cluster.pools.slurm.yielding import GIVE_UP_S, YIELD_S, Nodes, YieldPlan, YieldRule, sort_nodes

FREE = ("n1", "n2", "n3", "n4")
MAIN, SMALL = NodeKind(frozenset({"main"})), NodeKind(frozenset({"main", "small"}))
OTHER = NodeKind(frozenset({"other"}))
LAYOUT = SiteLayout(
    frozenset({"main", "small", "other"}), {"n1": SMALL, "n9": OTHER, **dict.fromkeys(("n2", "n3", "n4", "n5"), MAIN)}
)
WALL = 1000.0


def job(name: str = "1", nodes: int = 1, partitions: tuple[str, ...] = ("main",), **facts: Any) -> WaitingJob:
    request = JobRequest(frozenset(partitions), **facts.pop("request", {}))
    return WaitingJob(name, request, nodes, **facts)


def plan(
    rule: YieldRule, now: float, *queue: WaitingJob, nodes: Nodes | None = None, layout: SiteLayout = LAYOUT
) -> YieldPlan:
    return rule.plan(now, WALL + now, queue, nodes or Nodes(FREE, ("n5",)), layout, 300.0)


@pytest.mark.parametrize(
    ("waiting", "left", "given"),
    [
        (job(nodes=2), 2, 0),
        (job(nodes=5), 4, 1),
        (job(nodes=6), 0, 0),
        (job(partitions=("small", "other")), {"n1"}, 0),
        (job(partitions=("other",)), 0, 0),
        (job(partitions=("nowhere",)), 0, 0),
        (job("1_[1-9]", tasks=9), 4, 1),
        (job("1_[1-9]", nodes=2, tasks=9), 4, 0),
        (job(nodes=6, planned_on=frozenset({"n1", "n6"}), start=1200.0), {"n1"}, 0),
        (job(nodes=6, planned_on=frozenset({"n1", "n6"}), start=9000.0), 0, 0),
        (job(required=frozenset({"n3"})), {"n3"}, 0),
        (job(nodes=2, required=frozenset({"n5"})), 1, 1),
        (job(required=frozenset({"n6"})), 0, 0),
        (job(nodes=2, required=frozenset({"n5", "n6"})), 0, 0),
    ],
)
def test_idle_nodes_and_pilots_are_left_to_jobs_that_could_start(
    waiting: WaitingJob, left: int | set[str], given: int
) -> None:
    found = plan(YieldRule(), 0.0, waiting)
    assert (found.leave if isinstance(left, set) else len(found.leave), len(found.give)) == (left, given)


def test_a_job_that_could_have_started_for_long_is_kept_by_something_else() -> None:
    rule, wide = YieldRule(), job("1", 2)
    assert len(plan(rule, 0.0, wide).leave) == 2
    assert len(plan(rule, YIELD_S - 1, wide).leave) == 2
    assert len(plan(rule, YIELD_S, wide, job("2")).leave) == 1
    assert len(plan(rule, YIELD_S + 1).leave) == 0
    assert len(plan(rule, YIELD_S + 2, wide).leave) == 2, "it was gone in between: it counts anew"


def test_only_the_partitions_to_watch_count() -> None:
    waiting = job(nodes=2, partitions=("main", "small"))
    assert len(plan(YieldRule(("small",)), 0.0, waiting).leave) == 2
    assert plan(YieldRule(("other",)), 0.0, waiting) == YieldPlan()


def test_nodes_that_a_job_lacks_are_given_up_at_first_sight() -> None:
    rule, waiting, nodes = YieldRule(), job(nodes=4), Nodes(("n1", "n2"), ("n3", "n4", "n5"))
    assert plan(rule, 0.0, waiting, nodes=nodes).give == ("n3", "n4")
    leaving = Nodes(("n1", "n2"), ("n5",), ("n3", "n4"))
    found = plan(rule, 1.0, waiting, nodes=leaving)
    assert (found.give, found.again) == ((), True), "those that are on their way out are enough"
    assert plan(rule, GIVE_UP_S, waiting, nodes=nodes).give == (), "something else keeps it"


def test_nothing_is_given_up_for_a_job_that_could_not_start_all_the_same() -> None:
    rule, nodes = YieldRule(), Nodes(("n1",), ("n2", "n3"))
    wide = job(nodes=4)
    for now in (0.0, 1.0, 2.0):
        assert plan(rule, now, wide, job("3", partitions=("other",)), nodes=nodes) == YieldPlan()
    assert plan(rule, 4.0, job("4", 2), nodes=nodes).again
    assert not plan(YieldRule(), 4.0, job("4", 1), nodes=nodes).again, "a free node is there: nothing to look after"


def test_jobs_that_wait_together_are_each_given_what_they_lack() -> None:
    rule, nodes = YieldRule(), Nodes(("n1",), ("n2", "n3", "n4", "n5"))
    assert plan(rule, 0.0, job("1", 2), job("2", 2), nodes=nodes).give == ("n2", "n3", "n4")
    planned = job("9", 2, planned_on=frozenset({"n6"}), start=9000.0)
    assert plan(rule, 2.0, planned, nodes=nodes).give == ("n2",), "Slurm could start it now, it just has not seen that"


# Jobs that cannot start here.

KINDS = SiteLayout(
    frozenset({"main"}),
    {
        "n1": NodeKind(frozenset({"main"}), 8, 1000),
        **dict.fromkeys(
            ("n2", "n3"), NodeKind(frozenset({"main"}), 64, 9000, (("gpu", "a100", 4),), frozenset({"gpu"}))
        ),
    },
)
OURS = Nodes((), ("n1", "n2", "n3"))


@pytest.mark.parametrize(
    ("waiting", "give"),
    [
        (job(request={"gres": (("gpu", "", 4),)}), ("n2",)),
        (job(request={"gres": (("gpu", "h100", 1),)}), ()),
        (job(request={"constraint": "gpu"}), ("n2",)),
        (job(request={"constraint": "intel"}), ()),
        (job(request={"constraint": "[a|b]"}), ("n1",)),
        (job(request={"memory_mb": 2000}), ("n2",)),
        (job(request={"memory_mb": 20_000}), ()),
        (job(request={"cpus": 9}), ("n2",)),
        (job(request={"cpus": 65}), ()),
        (job(nodes=3, request={"constraint": "gpu"}), ()),
        (job(cpus=128), ("n1", "n2")),
        (job(cpus=400), ()),
    ],
)
def test_pilots_are_given_up_only_on_nodes_that_fit_the_job(waiting: WaitingJob, give: tuple[str, ...]) -> None:
    assert plan(YieldRule(), 0.0, waiting, nodes=OURS, layout=KINDS).give == give


def test_a_node_that_is_missing_in_the_layout_fits_every_job() -> None:
    waiting = job(request={"gres": (("gpu", "", 4),)})
    assert plan(YieldRule(), 0.0, waiting, nodes=OURS, layout=SiteLayout()).give == ("n1",)


def test_a_job_of_a_reservation_gets_nodes_of_the_reservation_only() -> None:
    layout = replace(LAYOUT, reservations={"course": frozenset({"n4", "n5"}), "full": frozenset({"n4", "n9"})})
    found = plan(YieldRule(), 0.0, job(nodes=2, request={"reservation": "course"}), layout=layout)
    assert (found.leave, found.give) == ({"n4"}, ("n5",))
    assert plan(YieldRule(), 0.0, job(request={"reservation": "course"}), layout=layout).leave == {"n4"}
    assert plan(YieldRule(), 0.0, job(nodes=2, request={"reservation": "full"}), layout=layout) == YieldPlan()
    unknown = plan(YieldRule(), 0.0, job(request={"reservation": "new"}), layout=layout)
    assert len(unknown.leave) == 1, "in doubt it could start"


TEN = tuple(f"n{i:02}" for i in range(1, 11))
ONE_KIND = SiteLayout(frozenset({"main"}), dict.fromkeys(TEN, MAIN))


def behind(name: str, limit_s: float | None, **facts: Any) -> WaitingJob:
    return job(name, priority=10, limit_s=limit_s, **facts)


def blocked(**facts: Any) -> WaitingJob:
    """Ten nodes, of which seven are in use for another hour; Slurm has planned it."""
    return job("100", 10, priority=1000, planned_on=frozenset(TEN), start=WALL + 3600, **facts)


@pytest.mark.parametrize("limit_s", [None, 3600.0, 86_400.0], ids=["no limit", "another limit", "the same limit"])
def test_pilots_stay_while_jobs_arrive_that_would_delay_a_planned_one(limit_s: float | None) -> None:
    rule, nodes, first = YieldRule(), Nodes((), ("n08", "n09", "n10")), blocked(limit_s=limit_s)
    for now in range(0, 200, 2):  # each second round a newcomer that runs for a day
        arrivals = [behind(str(200 + number), 86_400.0) for number in range(now // 4 + 1)]
        assert plan(rule, float(now), first, *arrivals, nodes=nodes, layout=ONE_KIND) == YieldPlan()


def test_a_plan_that_slurm_is_making_again_counts_until_it_would_be_long_there() -> None:
    rule, nodes, newcomer = YieldRule(), Nodes((), ("n08", "n09", "n10")), behind("200", 86_400.0)
    assert plan(rule, 0.0, blocked(), nodes=nodes, layout=ONE_KIND) == YieldPlan()
    unplanned = replace(blocked(), planned_on=frozenset(), start=None)
    assert plan(rule, 60.0, unplanned, newcomer, nodes=nodes, layout=ONE_KIND) == YieldPlan()
    assert plan(rule, 91.0, unplanned, newcomer, nodes=nodes, layout=ONE_KIND).give == ("n08",)


def test_a_planned_job_that_names_a_node_is_given_all_that_it_lacks() -> None:
    nodes, named = Nodes(("n01", "n06"), ("n02",)), frozenset({"n06"})
    for planned_on in (frozenset[str](), frozenset({"n01", "n02", "n06"})):
        waiting = job("1", 3, required=named, planned_on=planned_on)
        assert plan(YieldRule(), 0.0, waiting, nodes=nodes, layout=ONE_KIND).give == ("n02",), planned_on


@pytest.mark.parametrize(
    "waiting",
    [
        behind("200", 1800.0),
        behind("200", None),
        replace(behind("200", 86_400.0), priority=2000),
        behind("200", 86_400.0, partitions=("debug",)),
    ],
    ids=["it ends before", "its limit is not known", "it goes first", "another partition"],
)
def test_a_job_that_may_start_before_a_planned_one_is_given_a_node(waiting: WaitingJob) -> None:
    layout = SiteLayout(frozenset(), dict.fromkeys(TEN, NodeKind(frozenset({"main", "debug"}))))
    nodes = Nodes((), ("n08", "n09", "n10"))
    assert plan(YieldRule(), 0.0, blocked(), waiting, nodes=nodes, layout=layout).give == ("n08",)


def test_nodes_outside_of_the_plan_are_given_to_any_job() -> None:
    narrow = job("100", 9, priority=1000, planned_on=frozenset(TEN[:9]), start=WALL + 3600)
    nodes = Nodes((), ("n08", "n09", "n10"))
    assert plan(YieldRule(), 0.0, narrow, behind("200", 86_400.0), nodes=nodes, layout=ONE_KIND).give == ("n10",)
    assert plan(YieldRule(), 0.0, behind("200", 86_400.0), nodes=nodes, layout=ONE_KIND).give == ("n08",)


def test_waiting_pilots_are_given_up_first_then_nodes_without_a_trainer() -> None:
    kept = {f"n{i}": Pilot(i, f"n{i}", "waiting" if i == 3 else "running") for i in (1, 2, 3, 4)}
    ending = Pilot(4, "n4", "ending")
    found = sort_nodes(read_nodes("n1 mixed\nn5 idle\nn6 planned\n"), ["n5"], kept, [ending], used={"n1"})
    assert found == Nodes(["n5"], ["n3", "n2", "n1"], {"n4", "n6"})


def test_a_node_that_a_job_has_is_not_ours_because_a_pilot_waits_for_it() -> None:
    kept = {name: Pilot(number, name, "waiting") for number, name in enumerate(("n1", "n2"))}
    assert sort_nodes(read_nodes("n1 allocated\nn2 idle\n"), [], kept, []).ours == ["n2"]


JOBS = st.builds(
    job,
    st.integers(1, 9).map(str),
    st.integers(1, 5),
    priority=st.integers(0, 3),
    limit_s=st.sampled_from([None, 60.0, 86_400.0]),
    tasks=st.integers(1, 3),
    start=st.sampled_from([None, WALL + 10, WALL + 5000]),
    planned_on=st.frozensets(st.sampled_from(TEN)),
    required=st.frozensets(st.sampled_from(TEN), max_size=2),
)


@given(st.lists(JOBS, max_size=6, unique_by=lambda each: each.job), st.integers(0, 10), st.integers(0, 10))
def test_only_free_nodes_are_left_and_only_pilots_given_up(queue: list[WaitingJob], first: int, last: int) -> None:
    nodes = Nodes(TEN[:first], TEN[first : first + last], TEN[first + last :])
    found = plan(YieldRule(), 0.0, *queue, nodes=nodes, layout=ONE_KIND)
    assert set(found.leave) <= set(nodes.free)
    assert set(found.give) <= set(nodes.ours)
    assert len(set(found.give)) == len(found.give)
    most = sum(max(each.nodes, len(each.required)) * each.tasks for each in queue)
    assert len(found.give) <= most
