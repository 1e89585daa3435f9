"""A group that does not come about leaves nothing behind."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402

from bftrainer.elastic import protocol  # noqa: E402
from bftrainer.elastic.membership import Assignment  # noqa: E402
from bftrainer.elastic.torch.group import nccl  # noqa: E402
from bftrainer.elastic.torch.group.group import Group, GroupBroken  # noqa: E402
from bftrainer.elastic.torch.group.sealed_store import SealedStore  # noqa: E402

ATTEMPTS = 8
DOOMED = """
import sys, threading
from datetime import timedelta
from torch.distributed import ProcessGroupGloo, TCPStore
from bftrainer.elastic.torch.group.sealed_store import SealedStore

def join(generation):
    store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False)
    ProcessGroupGloo(SealedStore(store, "", f"generation-{generation}"), 1, 2, timedelta(seconds=60))

for generation in range(int(sys.argv[3])):
    threading.Thread(target=join, args=(generation,)).start()
"""


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def comes_back_to(before: tuple[int, int]) -> bool:
    deadline = time.monotonic() + 20
    while (now := held()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return now <= before


def give_up(group: Group, generation: int, address: str, rank: int) -> None:
    """Join a group, and hear after a moment that a peer was lost."""
    lost = threading.Event()
    timer = threading.Timer(0.2, lost.set)
    timer.start()
    with pytest.raises(GroupBroken, match="has lost a member while it formed|^forming generation"):
        group.form(Assignment(generation, ("a", "b"), rank, (address, address)), lost.is_set)
    timer.join()
    group.leave()


@pytest.fixture
def before() -> tuple[int, int]:
    group = Group("gloo", torch.device("cpu"))  # the first group of a process opens some things for good
    group.form(Assignment(0, ("",), 0, (group.open_store("127.0.0.1"),)))
    group.leave()
    return held()


def test_calling_a_rendezvous_that_is_gone_ends_when_it_is_given_up() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    give_up(Group("gloo", torch.device("cpu")), 0, address, 1)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bftrainer-form")]


def test_a_group_that_is_closed_says_whether_a_thread_of_it_is_still_calling(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr("bftrainer.elastic.torch.group.group.connect_store", lambda *_: answers.wait())
    group = Group("gloo", torch.device("cpu"))
    give_up(group, 0, "127.0.0.1:1", 1)
    assert not group.close(0.0)
    answers.set()
    assert group.close(20.0)


def test_an_attempt_whose_peer_never_comes_ends_when_it_is_given_up(before: tuple[int, int]) -> None:
    for generation in range(3):
        group = Group("gloo", torch.device("cpu"))
        give_up(group, generation, group.open_store("127.0.0.1"), 0)
    assert comes_back_to(before)


@pytest.mark.waits
def test_an_attempt_whose_peer_died_in_it_ends_when_it_is_given_up(before: tuple[int, int]) -> None:
    # Who of two calls the other depends on their ports: the survivor waits for the call in about half of the attempts.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    doomed = subprocess.Popen([sys.executable, "-c", DOOMED, *address.split(":"), str(ATTEMPTS)])
    try:
        store.wait([SealedStore(store, "", f"generation-{n}")._name("0/1") for n in range(ATTEMPTS)])
    finally:
        doomed.kill()
        doomed.wait()
    for generation in range(ATTEMPTS):
        group = Group("gloo", torch.device("cpu"))
        group._opened = store  # hosted elsewhere, as it were, and outlives the attempt
        give_up(group, generation, address, 0)
    del store, group
    assert comes_back_to(before)


class Forgotten:
    """An operation of gloo that nobody will ever end."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: object) -> None:
        self.waits += 1
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_an_operation_that_gloo_forgets_to_end_is_not_waited_for_once_the_group_is_cut(before: tuple[int, int]) -> None:
    group = Group("gloo", torch.device("cpu"))
    group.form(Assignment(1, ("a",), 0, (group.open_store("127.0.0.1"),)))
    forgotten = Forgotten()

    class Cutting(Forgotten):
        def wait(self, timeout: object) -> None:
            if forgotten.waits == 3:
                group.cut()
            forgotten.wait(timeout)

    with pytest.raises(RuntimeError, match="gloo does not end an operation"):
        group.wait(Cutting())  # type: ignore[arg-type]
    assert forgotten.waits > 3, "it was waited for while the group was whole"
    with pytest.raises(GroupBroken, match="a peer was lost"):
        group.check()
    group.leave()  # returns, although somebody in it may be stuck for ever


def test_a_rank_0_that_cannot_listen_says_so_when_the_generation_forms() -> None:
    group = Group("gloo", torch.device("cpu"))
    address = group.open_store("192.0.2.1")
    with pytest.raises(GroupBroken, match=r"cannot listen on '192\.0\.2\.1'"):
        group.form(Assignment(1, ("a", "b"), 0, (address, "192.0.2.2:0")))
    with pytest.raises(GroupBroken, match=r"rank 0 cannot host the rendezvous on 192\.0\.2\.1"):
        Group("gloo", torch.device("cpu")).form(Assignment(1, ("a", "b"), 1, (address, "127.0.0.1:0")))


def test_a_rank_whose_backend_is_not_that_of_rank_0_says_so_at_once() -> None:
    first, second = Group("gloo", torch.device("cpu")), Group("gloo", torch.device("cpu"))
    first.backend = "nccl"  # what it would be on a GPU
    address = first.open_store("127.0.0.1")
    places = [Assignment(1, ("a", "b"), rank, (address, "127.0.0.1:0"), "secret") for rank in range(2)]
    store, _ = first._rendezvous(places[0], lambda: False)
    with pytest.raises(GroupBroken, match="computes on the cpu with gloo, rank 0 with nccl: a trainer"):
        second.form(places[1])
    del store
    second.close(5.0)


def test_a_host_name_that_means_the_node_itself_is_named_as_the_cause() -> None:
    group = Group("gloo", torch.device("cpu"))
    with pytest.raises(
        GroupBroken, match=r"127\.0\.1\.1 resolves to a loopback address .* correct the nodes' /etc/hosts"
    ):
        group.form(Assignment(1, ("a", "b"), 1, ("192.0.2.1:0", "127.0.1.1:0")))


# NCCL is not on this machine: what it would do is played.


class Nccl:
    """Aborts of a group, as `nccl.abort` would make them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aborted = 0
        self.may_end = threading.Event()
        self.may_end.set()
        self.initialized = True
        monkeypatch.setattr(nccl, "abort", self.abort)
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: self.initialized)
        monkeypatch.setattr("torch.distributed.destroy_process_group", self.destroy)

    def abort(self) -> object:
        self.aborted += 1
        self.may_end.wait(20)
        self.initialized = False
        return None

    def destroy(self) -> None:
        raise AssertionError("a group that was aborted must not be destroyed: that hangs")


def live(monkeypatch: pytest.MonkeyPatch) -> tuple[Group, Nccl]:
    played = Nccl(monkeypatch)
    group = Group("nccl", torch.device("cuda"))
    group._live = True
    return group, played


def test_nccl_is_aborted_in_a_thread_of_its_own_and_what_it_gave_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    group, played = live(monkeypatch)
    played.may_end.clear()
    group.check()
    group.cut()  # returns, although the abort has not
    with pytest.raises(GroupBroken, match="a peer was lost"):
        group.check()
    played.may_end.set()
    group.leave()
    assert played.aborted == 1


def test_a_whole_nccl_group_is_aborted_when_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    group, played = live(monkeypatch)
    group.leave()
    assert played.aborted == 1


def test_a_group_that_nccl_does_not_let_go_of_ends_the_worker_to_be_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group, played = live(monkeypatch)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("bftrainer.elastic.torch.group.group._ABORTING_S", 0.05)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    played.may_end.clear()
    group.leave()
    played.may_end.set()
    assert ended == [protocol.RESTART]
    assert "NCCL does not release" in capsys.readouterr().err


def test_torch_s_watchdog_is_told_to_leave_survivors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # what a site may have set
    Group("nccl", torch.device("cuda"))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert int(os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 100


def test_an_abort_waits_for_an_operation_that_is_being_handed_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL frees the communicator in an abort: a thread that is inside NCCL then would crash."""
    aborted = threading.Event()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_group", object)
    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", aborted.set)
    with nccl.issuing:
        thread = threading.Thread(target=nccl.abort)
        thread.start()
        assert not aborted.wait(0.2)
    assert aborted.wait(20)
    thread.join(20)
    assert nccl.issuing.acquire(timeout=20), "the lock is free for the next group"
    nccl.issuing.release()


def test_an_abort_does_not_wait_for_ever_for_a_device_whose_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_group", object)
    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", aborted.set)
    monkeypatch.setattr(nccl, "_HANDING_OVER_S", 0.05)
    with nccl.issuing:  # as the thread that hands over would hold it, until the abort frees the device
        nccl.abort()
    assert aborted.is_set()


class FirstOperation:
    """The operation by which an NCCL group connects."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_first_operation_that_never_ends_is_given_up_when_its_group_lost_a_member() -> None:
    group, never, lost = Group("nccl", torch.device("cuda")), FirstOperation(1_000_000), iter((False, False, True))
    with pytest.raises(GroupBroken, match="generation 7 has lost a member"):
        group._see_done(never, Assignment(7, ("a", "b"), 0, ("x:0", "y:0")), lambda: next(lost))  # type: ignore[arg-type]


def test_a_first_operation_that_ended_with_an_error_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "error_of", lambda _device: "ErrorType.REMOTE_ERROR")
    group, place = Group("nccl", torch.device("cuda")), Assignment(7, ("a", "b"), 0, ("x:0", "y:0"))
    with pytest.raises(GroupBroken, match=r"REMOTE_ERROR"):
        group._see_done(FirstOperation(3), place, lambda: False)  # type: ignore[arg-type]
    monkeypatch.setattr(nccl, "error_of", lambda _device: "")
    group._see_done(FirstOperation(3), place, lambda: False)  # type: ignore[arg-type]


def test_nccl_connects_before_its_first_operation_so_that_none_waits_for_peers_inside_nccl() -> None:
    Group("nccl", torch.device("cuda"))
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
