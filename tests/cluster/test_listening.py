"""The controller listens where its nodes can reach it, and an address that cannot work is refused."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest

from bftrainer.cluster.listening import AUTO, ControllerAddress, Network, choose_address, in_url, listen
from bftrainer.errors import BFTrainerError, InputError

HOSTS = {"login": "10.0.0.1", "n1": "10.0.0.11", "n2": "10.0.0.12", "far": "10.9.0.1", "self": "127.0.1.1"}
ROUTES = {"10.0.0.": "10.0.0.1", "192.168.": "192.168.0.1", "127.": "127.0.0.1"}
"""The own address from which a route leads to addresses that begin so."""


def network(hosts: Mapping[str, str] = HOSTS, routes: Mapping[str, str] = ROUTES) -> Network:
    return Network(
        resolve=lambda host: hosts.get(host, host if host[0].isdigit() else ""),
        source=lambda address: next((own for begin, own in routes.items() if address.startswith(begin)), ""),
        is_own=lambda address: address in routes.values() or address.startswith("127."),
    )


def chosen(
    wanted: str, nodes: Mapping[str, str] | None, *, name: str = "", before: str = "", net: Network | None = None
) -> ControllerAddress:
    return choose_address(wanted, nodes, name=name, before=before, network=net or network())


def test_pools_on_this_machine_have_loopback() -> None:
    assert chosen(AUTO, None) == ControllerAddress("127.0.0.1", "127.0.0.1")
    for address in ("127.0.0.1", "10.0.0.1", "self"):  # a whole cluster on one machine
        assert chosen(AUTO, {"n1": address}).listen == "127.0.0.1"


def test_the_address_is_the_one_from_which_routes_lead_to_most_nodes() -> None:
    nodes = {"n1": "n1", "n2": "n2", "s1": "192.168.0.5", "here": "10.0.0.1"}
    assert chosen(AUTO, nodes) == ControllerAddress("10.0.0.1", "10.0.0.1")
    many = {f"s{number}": f"192.168.{number // 250}.{number % 250}" for number in range(5000)}
    assert chosen(AUTO, many).host == "192.168.0.1"


def test_what_the_user_sets_wins_unless_it_cannot_work() -> None:
    nodes = {"n1": "n1", "n2": "n2"}
    assert chosen("192.168.0.1", nodes).listen == "192.168.0.1"
    for loopback in ("127.0.0.1", "localhost", "self"):
        with pytest.raises(
            InputError, match=r"only this machine can reach.*n1 has the address 10\.0\.0\.11.*10\.0\.0\.1$"
        ):
            chosen(loopback, nodes, net=network({**HOSTS, "localhost": "127.0.0.1"}))
        assert chosen(loopback, nodes, name="proxy.example").listen == loopback
        assert chosen(loopback, None).listen == loopback
        assert chosen(loopback, {"n1": "10.0.0.1"}).listen == loopback  # its nodes are here


def test_where_all_interfaces_are_listened_on_nodes_are_given_an_address_that_they_reach() -> None:
    assert chosen("0.0.0.0", {"n1": "n1"}) == ControllerAddress("0.0.0.0", "10.0.0.1")
    assert chosen("0.0.0.0", None) == ControllerAddress("0.0.0.0", socket.getfqdn())


def test_where_slurm_or_routes_say_nothing_the_last_address_or_the_hosts_own_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    assert chosen(AUTO, {}, before="192.168.0.1").listen == "192.168.0.1"
    assert chosen(AUTO, {}, before="172.16.0.1").listen == "10.0.0.1"  # not this machine's any more
    assert chosen(AUTO, {"far": "far"}).listen == "10.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "self")
    with pytest.raises(BFTrainerError, match=r"no route leads to far\): set server\.host"):
        chosen(AUTO, {"far": "far"})
    with pytest.raises(BFTrainerError, match=r"does not say where its nodes are\): set server\.host"):
        chosen(AUTO, {})


def test_this_machine_knows_its_own_addresses() -> None:
    assert choose_address(AUTO, {"n1": "127.0.0.1"}).listen == "127.0.0.1"
    assert choose_address(AUTO, {"n1": "localhost"}).listen == "127.0.0.1"
    assert choose_address("127.0.0.1", {"n1": "no such host.invalid"}).listen == "127.0.0.1"


def test_a_port_that_is_taken_is_replaced_by_the_next_and_a_foreign_address_refused() -> None:
    with listen("127.0.0.1", (0,)) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", (port, 0)) as second:
            assert second.getsockname()[1] != port
        with pytest.raises(BFTrainerError, match=f"port {port} of 127.0.0.1 is in use"):
            listen("127.0.0.1", (port,))
    with pytest.raises(InputError, match=r"203\.0\.113\.1 is not an address of this machine"):
        listen("203.0.113.1", (0,))
    assert [in_url(host) for host in ("a", "10.0.0.1", "::1")] == ["a", "10.0.0.1", "[::1]"]
