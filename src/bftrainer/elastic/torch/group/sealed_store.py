"""Sealed store: rendezvous of a generation, a key-value store in rank 0 protected by a secret.

`Group` opens it on rank 0 and connects to it from the other ranks. The store listens on the given address only. Any
host on the network may connect to it, so names and values carry a keyed hash. Without the secret, which the manager
gives to the members, names reveal nothing and no written value is accepted. A stranger can still disturb the group
(delete, overwrite, fill memory): that costs the job a new generation, with another port and another secret.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from bftrainer.errors import BFTrainerError

_BACKLOG = 4096
_TAG = hashlib.sha256().digest_size
_NO_LIMIT = timedelta(seconds=0)
_ATTEMPT_S = 1.0
_RETRY_S = 0.05


class ForgedValueError(BFTrainerError, RuntimeError):
    """A value in the store was not written by a member: treat the group as broken."""


class SealedStore(Store):
    """A store whose names are hashed and whose values are authenticated with a shared secret."""

    def __init__(self, store: Any, secret: str, scope: str) -> None:
        super().__init__()
        self._store = store
        self._key = hashlib.sha256(f"{scope}\0{secret}".encode()).digest()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(self._name(key), self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and read it."""
        blob = bytes(self._store.get(self._name(key)))
        value = blob[_TAG:]
        if not hmac.compare_digest(blob, self._sealed(key, value)):
            raise ForgedValueError(f"the rendezvous holds a value for {key!r} that no member of this job wrote")
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. Counters are not authenticated."""
        return int(self._store.add(self._name(key), amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`. Return the value after that."""
        before = self._sealed(key, expected) if expected else b""
        after = bytes(self._store.compare_set(self._name(key), before, self._sealed(key, desired)))
        return after[_TAG:]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these names have a value."""
        return bool(self._store.check([self._name(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta = _NO_LIMIT) -> None:
        """Wait until all of these names have a value."""
        names = [self._name(key) for key in keys]
        self._store.wait(names, timeout) if timeout else self._store.wait(names)

    def delete_key(self, key: str) -> bool:
        """Remove a name."""
        return bool(self._store.delete_key(self._name(key)))

    def num_keys(self) -> int:
        """Return the number of names."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """Return False: `append`, `multi_get` and `multi_set` are not supported."""
        return False

    def _name(self, key: str) -> str:
        return hmac.new(self._key, key.encode(), hashlib.sha256).hexdigest()

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        return hmac.new(self._key, key.encode() + b"\0" + raw, hashlib.sha256).digest() + raw


def open_store(host: str, timeout: timedelta) -> TCPStore:
    """Open a store that listens only on `host`, on a free port."""
    family, kind, proto, _, address = _resolve(host)
    listener = socket.socket(family, kind, proto)
    try:
        listener.bind(address[:2])
        listener.listen(_BACKLOG)
    except OSError as problem:
        listener.close()
        raise BFTrainerError(
            f"this node cannot listen on {host!r} ({problem.strerror}), the address its peers are given for it; "
            "start its agent with an address of a network interface of this node"
        ) from None
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"master_listen_fd": listener.detach()}
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, **options)


def is_loopback(host: str) -> bool:
    """Return whether a name or address means the machine itself."""
    try:
        return ipaddress.ip_address(_resolve(host)[4][0]).is_loopback
    except (ValueError, BFTrainerError):
        return False


def _resolve(host: str) -> tuple[Any, ...]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise BFTrainerError(f"the host name {host!r} cannot be resolved on this node ({problem})") from None


def connect_store(host: str, port: int, timeout: timedelta, cancelled: Callable[[], bool]) -> TCPStore:
    """Connect to the rendezvous that rank 0 hosts. Raises a BFTrainerError if it does not answer, or when `cancelled`.

    torch alone would keep trying a host that is gone until its timeout, with no way to end it.
    """
    give_up = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=_ATTEMPT_S).close()
        except OSError as problem:
            if cancelled() or time.monotonic() > give_up:
                raise BFTrainerError(f"rank 0 does not answer at {host}:{port}: {problem}") from problem
            time.sleep(_RETRY_S)
        else:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
