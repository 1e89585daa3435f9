"""The controller's address: chosen so that the nodes of the pool can reach it, then listened on.

`serve` calls `choose_address` with the addresses of the pool's nodes, and `listen` with the result. A choice that
cannot work is refused here, before the first node is requested.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bftrainer.cluster.http.limits import LimitedListener
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.util.net import is_loopback

AUTO = "auto"
LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_LOOKED_AT = 16
"""How many nodes are looked at: those of one pool are in few networks."""


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """Where the controller listens, and the host under which others reach it."""

    listen: str
    host: str


@dataclass(frozen=True, slots=True)
class Network:
    """What this machine knows of the network. Tests replace it."""

    resolve: Callable[[str], str]
    """Returns the address of a host; empty if it has none."""
    source: Callable[[str], str]
    """Returns the own address from which a route leads to another address; empty if there is no route."""
    is_own: Callable[[str], bool]
    """Whether an address belongs to this machine."""


def choose_address(
    wanted: str, nodes: Mapping[str, str] | None, *, name: str = "", before: str = "", network: Network | None = None
) -> ControllerAddress:
    """Return the address for `server.host` = `wanted`, so that nodes with these addresses (by name) reach it.

    `nodes` is None if the nodes are on this machine or unknown, and empty if they could not be found out. `name` is
    `api.name`. `before` is the address that an earlier controller chose.
    """
    network = network or _REAL
    if wanted in ANY:
        seen = _seen_from(nodes or {}, network)
        return ControllerAddress(wanted, seen if seen and not is_loopback(seen) else socket.getfqdn())
    if wanted != AUTO:
        elsewhere = _elsewhere(nodes or {}, network)
        if is_loopback(network.resolve(wanted) or wanted) and elsewhere and not name:
            node, address = elsewhere
            better = network.source(address)
            advice = f", such as {better}" if better else ""
            raise InputError(
                f"server.host is {wanted}, which only this machine can reach, but the nodes are other machines "
                f"({node} has the address {address}): leave server.host out, or set it to an address that the nodes "
                f"can reach{advice}"
            )
        return ControllerAddress(wanted, wanted)
    if nodes is None:
        return ControllerAddress(LOOPBACK, LOOPBACK)
    chosen = _seen_from(nodes, network) or (before if before and network.is_own(before) else "")
    if not chosen:
        mine = network.resolve(socket.gethostname())
        chosen = mine if mine and not is_loopback(mine) and network.is_own(mine) else ""
    if not chosen:
        why = (
            f"no route leads to {next(iter(nodes.values()))}" if nodes else "the pool does not say where its nodes are"
        )
        raise BFTrainerError(
            f"cannot find out under which address the nodes reach this machine ({why}): set server.host (--host)"
        )
    return ControllerAddress(chosen, chosen)


def listen(host: str, ports: tuple[int, ...]) -> LimitedListener:
    """Listen on the first of these ports that is free. 0 is any free one."""
    for wanted in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
            # With an explicit protocol, asyncio sends small answers at once, without waiting for an acknowledgement.
            listening = LimitedListener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except OSError as problem:
            raise BFTrainerError(f"cannot listen on {host}: {problem.strerror}") from None
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(1024)
            listening.setblocking(False)
        except OSError as problem:
            listening.close()
            if problem.errno == errno.EADDRINUSE and wanted != ports[-1]:
                continue
            if problem.errno == errno.EADDRNOTAVAIL:
                raise InputError(
                    f"server.host: {host} is not an address of this machine: leave it out, or choose one that "
                    "`hostname -I` lists"
                ) from None
            why = "is in use: choose another by --port" if problem.errno == errno.EADDRINUSE else problem.strerror
            raise BFTrainerError(f"port {wanted} of {host} {why}") from None
        return listening
    raise AssertionError


def in_url(host: str) -> str:
    """Return a host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def _elsewhere(nodes: Mapping[str, str], network: Network) -> tuple[str, str] | None:
    """Return a node that is certainly another machine, and its address."""
    for node, host in _some(nodes).items():
        address = network.resolve(host)
        if address and not is_loopback(address) and not network.is_own(address):
            return node, address
    return None


def _seen_from(nodes: Mapping[str, str], network: Network) -> str:
    """Return the own address from which routes lead to most of the nodes; empty if there is none."""
    sources = Counter[str]()
    here = False
    for host in _some(nodes).values():
        address = network.resolve(host)
        if address and (is_loopback(address) or network.is_own(address)):
            here = True
        elif address and (source := network.source(address)) and not is_loopback(source):
            sources[source] += 1
    return sources.most_common(1)[0][0] if sources else LOOPBACK if here else ""


def _some(nodes: Mapping[str, str]) -> dict[str, str]:
    """Return nodes with different addresses, from all over the list."""
    different = list({address: node for node, address in nodes.items()}.items())
    step = max(1, len(different) // _LOOKED_AT)
    return {node: address for address, node in different[::step][:_LOOKED_AT]}


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def _source(address: str) -> str:
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_own(address: str) -> bool:
    return _source(address) == address  # the kernel answers itself from the address that was asked for


def _family(address: str) -> socket.AddressFamily:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None


_REAL = Network(_resolve, _source, _is_own)
