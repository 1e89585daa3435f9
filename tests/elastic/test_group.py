"""A group that does not come about leaves nothing behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

from bftrainer.elastic.group import Group, GroupBroken
from bftrainer.elastic.membership import Place

ATTEMPTS = 8
DOOMED = """
import sys, threading
from datetime import timedelta
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

def join(generation):
    store = TCPStore(sys.argv[1], int(sys.argv[2]))
    ProcessGroupGloo(PrefixStore(f"generation-{generation}", store), 1, 2, timedelta(seconds=60))

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
    with pytest.raises(GroupBroken):
        group.form(Place(generation, ("a", "b"), rank, (address,)), lost.is_set)
    timer.join()
    group.leave()


@pytest.fixture
def before() -> tuple[int, int]:
    group = Group("gloo")  # the first group of a process opens some things for good
    group.form(Place(0, ("",), 0, (group.open_store("127.0.0.1"),)))
    group.leave()
    return held()


def test_an_attempt_whose_peer_never_comes_ends_when_it_is_given_up(before: tuple[int, int]) -> None:
    for generation in range(3):
        group = Group("gloo")
        give_up(group, generation, group.open_store("127.0.0.1"), 0)
    assert comes_back_to(before)


def test_an_attempt_whose_peer_died_in_it_ends_when_it_is_given_up(before: tuple[int, int]) -> None:
    # Who of two calls the other depends on their ports: the survivor waits for the call in about half of the attempts.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    doomed = subprocess.Popen([sys.executable, "-c", DOOMED, *address.split(":"), str(ATTEMPTS)])
    try:
        store.wait([f"generation-{generation}/0/1" for generation in range(ATTEMPTS)])
    finally:
        doomed.kill()
        doomed.wait()
    for generation in range(ATTEMPTS):
        group = Group("gloo")
        group._store = store  # hosted elsewhere, as it were, and outlives the attempt
        give_up(group, generation, address, 0)
    del store, group
    assert comes_back_to(before)
