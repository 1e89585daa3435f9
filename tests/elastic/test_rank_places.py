"""Places of a node's ranks: which devices, cores and variables each of them gets."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.processes.core_shares import core_shares
from bftrainer.processes.cpu_cores import node_cores, number_list
from bftrainer.processes.gpus import GpuDevice
from bftrainer.processes.rank_places import RankPlace, rank_places, thread_variables

LOCAL = ("BFTRAINER_LOCAL_RANK", "BFTRAINER_LOCAL_WORLD")


def cuda(*ids: str) -> list[GpuDevice]:
    return [GpuDevice(gpu_id, "cuda") for gpu_id in ids]


def rocm(*ids: str) -> list[GpuDevice]:
    return [GpuDevice(gpu_id, "rocm") for gpu_id in ids]


def given_to(place: RankPlace) -> dict[str, str]:
    """The variables but those that number the ranks."""
    return {name: value for name, value in place.environment.items() if name not in LOCAL}


def test_each_of_as_many_ranks_as_gpus_gets_one_device_and_its_share_of_the_cores() -> None:
    places = rank_places(2, cuda("4", "6"), range(8), {"CUDA_VISIBLE_DEVICES": "4,6"})
    assert places == (
        RankPlace(
            "4",
            {LOCAL[0]: "0", LOCAL[1]: "2", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "4"},
            (0, 1, 2, 3),
        ),
        RankPlace(
            "6",
            {LOCAL[0]: "1", LOCAL[1]: "2", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "6"},
            (4, 5, 6, 7),
        ),
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, ["a,b,c,d"]),
        (2, ["a,b", "c,d"]),
        (3, ["a", "b", "c,d"]),
        (4, ["a", "b", "c", "d"]),
        (6, ["a", "b", "c", "d", "a", "b"]),
    ],
)
def test_devices_are_split_over_fewer_ranks_and_shared_by_more(ranks: int, expected: list[str]) -> None:
    places = rank_places(ranks, cuda("a", "b", "c", "d"), range(8), {})
    assert [place.device for place in places] == expected
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places] == expected


def test_a_single_rank_keeps_all_cores_and_threads() -> None:
    numbered = dict(zip(LOCAL, "01", strict=True))
    assert rank_places(1, [], range(8), {}) == (RankPlace("", numbered, ()),)
    (place,) = rank_places(1, cuda("0", "1"), range(8), {})
    assert place == RankPlace("0,1", {**numbered, "CUDA_VISIBLE_DEVICES": "0,1"}, ())
    (place,) = rank_places(1, cuda("0", "1"), range(8), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert place == RankPlace("0,1", numbered, ())


def test_ranks_without_a_gpu_compute_on_the_cpu() -> None:
    places = rank_places(2, [], range(2), {})
    assert [place.device for place in places] == ["", ""]
    assert [given_to(place) for place in places] == [{"OMP_NUM_THREADS": "1"}] * 2


def test_the_number_of_threads_is_the_same_for_all_ranks_and_the_users_own_stays() -> None:
    assert [given_to(place) for place in rank_places(3, [], range(8), {})] == [{"OMP_NUM_THREADS": "2"}] * 3
    assert [given_to(place) for place in rank_places(2, [], range(8), {"OMP_NUM_THREADS": "3"})] == [{}, {}]
    assert [given_to(place) for place in rank_places(2, [], (), {})] == [{"OMP_NUM_THREADS": "1"}] * 2
    assert thread_variables(2, range(8), {}) == {"OMP_NUM_THREADS": "4"}


def test_for_amd_gpus_no_other_variable_contradicts_the_one_that_is_set() -> None:
    assert [given_to(place)["ROCR_VISIBLE_DEVICES"] for place in rank_places(2, rocm("2", "3"), range(2), {})] == [
        "2",
        "3",
    ]
    by_slurm = {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "2,3"}
    rank_1 = rank_places(2, rocm("2", "3"), range(2), {**by_slurm, "OMP_NUM_THREADS": "1"})[1]
    assert given_to(rank_1) == {"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0", "GPU_DEVICE_ORDINAL": "0"}
    (alone,) = rank_places(1, rocm("2", "3"), range(2), {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1,0"})
    assert given_to(alone) == {"HIP_VISIBLE_DEVICES": "0,1"}


def test_ranks_get_the_cores_near_their_gpus() -> None:
    gpus = [GpuDevice("0", "cuda", cores=frozenset({4, 5, 6, 7})), GpuDevice("1", "cuda", cores=frozenset(range(4)))]
    assert [place.cores for place in rank_places(2, gpus, set(range(8)), {})] == [(4, 5, 6, 7), (0, 1, 2, 3)]
    both_near = [GpuDevice(str(gpu), "cuda", cores=frozenset(range(4))) for gpu in range(2)]
    assert [place.cores for place in rank_places(2, both_near, range(8), {})] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_rank_with_a_choice_leaves_cores_to_one_without() -> None:
    assert core_shares(range(4), [{0, 1, 2, 3}, {0, 1}]) == ((2, 3), (0, 1))


def test_with_fewer_cores_than_ranks_all_ranks_share_all_cores() -> None:
    assert [place.cores for place in rank_places(3, [], {5, 1}, {})] == [(1, 5)] * 3


def test_a_number_of_ranks_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be at least 1, but got 0"):
        rank_places(0, [], range(8), {})


nodes = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(0, 40), unique=True, min_size=ranks, max_size=24),
        st.lists(st.sets(st.integers(0, 40)), min_size=ranks, max_size=ranks),
    )
)


@given(nodes)
def test_shares_are_disjoint_and_even_and_use_all_cores(node: tuple[list[int], list[set[int]]]) -> None:
    cores, near = node
    shares = core_shares(cores, near)
    assert sorted(core for share in shares for core in share) == sorted(cores)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(nodes)
def test_ranks_that_can_have_near_cores_only_have_near_cores_only(node: tuple[list[int], list[set[int]]]) -> None:
    cores, near = node
    fits = core_shares(cores, near)
    # What one split has given counts as near, so one exists that leaves nobody far from its cores.
    again = core_shares(cores, [{*share, *own} for share, own in zip(fits, near, strict=True)])
    for share, first, own in zip(again, fits, near, strict=True):
        assert set(share) <= {*first, *own}


def near_count(shares: tuple[tuple[int, ...], ...], near: list[set[int]]) -> int:
    return sum(len(own & set(share)) for share, own in zip(shares, near, strict=True))


@given(st.lists(st.sets(st.integers(0, 5)), min_size=2, max_size=3), st.integers(3, 6))
def test_no_even_split_has_more_near_cores(near: list[set[int]], count: int) -> None:
    cores = list(range(count))
    best = 0
    for order in permutations(cores):
        # Every even split is a permutation that is dealt out in turns.
        dealt = tuple(tuple(order[rank :: len(near)]) for rank in range(len(near)))
        for ranks in permutations(dealt):
            best = max(best, near_count(ranks, near))
    assert near_count(core_shares(cores, near), near) == best


def test_hardware_threads_of_one_core_go_to_the_same_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert node_cores(tmp_path) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert [place.cores for place in rank_places(2, [], node_cores(tmp_path), {})] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert node_cores(tmp_path / "nowhere") == tuple(range(8))


def test_lists_of_numbers_are_read_as_far_as_they_make_sense() -> None:
    assert number_list("0-2,8, 4\n") == (0, 1, 2, 8, 4)
    assert number_list("3,1-3") == (3, 1, 2)
    assert number_list("") == number_list("-") == number_list("a-b") == number_list("0-999999999") == ()
