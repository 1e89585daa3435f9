"""The rendezvous: it listens where it is told to, and believes only those who know the secret."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from torch.distributed import TCPStore

from bftrainer.elastic.torch.group.sealed_store import ForgedValueError, SealedStore, is_loopback, open_store
from bftrainer.errors import BFTrainerError

WAIT = timedelta(seconds=10)


def sealed(store: TCPStore, secret: str = "ours", scope: str = "generation-1") -> SealedStore:
    return SealedStore(store, secret, scope)


def stranger_to(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=WAIT)


def test_members_read_what_members_wrote() -> None:
    hosted = open_store("127.0.0.1", WAIT)
    sealed(hosted).set("address", b"node-1")
    assert sealed(stranger_to(hosted)).get("address") == b"node-1"
    assert sealed(hosted).check(["address"])
    assert not sealed(hosted).check(["another"])
    assert sealed(hosted).add("count", 2) == 2
    sealed(hosted).wait(["address"], timedelta(seconds=1))
    assert sealed(hosted).delete_key("address")
    assert not sealed(hosted).check(["address"])


def test_a_stranger_can_neither_guess_a_name_nor_write_a_value_that_is_believed() -> None:
    hosted = open_store("127.0.0.1", WAIT)
    sealed(hosted).set("address", b"node-1")
    stranger = stranger_to(hosted)
    assert not stranger.check(["address"])
    assert not sealed(stranger, secret="a guess").check(["address"])
    if hasattr(stranger, "list_keys"):
        names = [name for name in stranger.list_keys() if "address" in name]
        assert names == []
        for name in stranger.list_keys():
            stranger.set(name, b"x" * 32 + b"stranger's own")
        with pytest.raises(ForgedValueError, match="that no member of this job wrote"):
            sealed(hosted).get("address")


def test_a_value_of_another_generation_or_under_another_name_is_not_believed() -> None:
    hosted = open_store("127.0.0.1", WAIT)
    sealed(hosted).set("address", b"node-1")
    assert not sealed(hosted, scope="generation-2").check(["address"])
    members = sealed(hosted)
    members.set("other", b"node-2")
    hosted.set(members._name("address"), hosted.get(members._name("other")))
    with pytest.raises(ForgedValueError):
        members.get("address")


def test_it_listens_on_the_given_address_only() -> None:
    hosted = open_store("127.0.0.1", WAIT)
    with socket.create_connection(("127.0.0.1", hosted.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", hosted.port), timeout=5)


def test_an_address_that_is_not_the_node_s_own_is_named() -> None:
    with pytest.raises(BFTrainerError, match=r"cannot listen on '192\.0\.2\.1'.*its agent"):
        open_store("192.0.2.1", WAIT)
    with pytest.raises(BFTrainerError, match="'no-such-host.invalid' cannot be resolved"):
        open_store("no-such-host.invalid", WAIT)


def test_names_of_the_machine_itself_are_known() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.0.1.1")
    assert not is_loopback("192.0.2.1")
    assert not is_loopback("no-such-host.invalid")
