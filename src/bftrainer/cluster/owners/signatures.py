"""Signatures let agents start only what their owner has signed.

`submit` signs a spec with the owner's own key, a file in the owner's home that nobody else can read. The agent runs as
the same owner, reads the same file, and checks the signature before it starts a worker. The key is never sent: the
controller has specs and signatures, and can make neither. It can start a signed spec again, on any node of its owner
and any number of times, as it must after every loss of a node; but no other program, arguments, interpreter, folder or
variables.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bftrainer.errors import BFTrainerError, InputError

FIELD = "signature"
"""The key of a spec that holds its signature."""
UNSIGNED = frozenset({FIELD, "weight", "name", "group", "params", "deadline", "curve", "up_s", "down_s", "model"})
"""Keys that change nothing of what is run. They are not signed, so that the controller may fill them in."""
NOT_SIGNED = 428
"""The HTTP status with which a controller refuses a spec that must be signed: the client then signs it."""
OWN_LAUNCHERS = ("elastic", "ddp")
"""The launchers whose workers all run on nodes, as their owners."""
REFUSED = "its owner's agent refuses it: "
"""How an agent's error begins that no other node and no later start can mend."""
_KEY_BYTES = 32


def key_path(home: Path) -> Path:
    """Return the file of an owner's key."""
    return home / ".config" / "bftrainer" / "signing-key"


def read_key(home: Path, *, make: bool = False) -> bytes:
    """Return the key of this process's user, whose home is `home`. With `make` it is made if there is none.

    Raises `InputError` if others can read it, or if it is another user's.
    """
    path = key_path(home)
    try:
        if make:
            _make(path)
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            text = file.read(1024)
    except FileNotFoundError:
        raise InputError(
            f"{path}: there is no key to check signatures with: it is made by `bftrainer submit`"
        ) from None
    except OSError as problem:
        raise InputError(
            f"{path}: {problem.strerror or problem}: it must be a file of yours that you can read (mode 600). Without "
            "it, `bftrainer submit` makes a new one, and unfinished trainers must be submitted again"
        ) from None
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise InputError(f"{path}: it must be yours, and nobody else may read it: chmod 600 {path}")
    with suppress(ValueError):
        if len(key := bytes.fromhex(text.decode("ascii").strip())) == _KEY_BYTES:
            return key
    raise InputError(f"{path}: it must have {2 * _KEY_BYTES} hexadecimal digits: remove it, and a new one is made")


def _make(path: Path) -> None:
    """Make the key, unless there is one. It is written beside and linked, so that two that make it agree on one."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(_KEY_BYTES) + "\n")
    try:
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()


def canonical(spec: Mapping[str, Any]) -> bytes:
    """Return the bytes of a spec that are signed. `spec` is the JSON of `TrainerSpec.as_json`."""
    signed = {key: value for key, value in spec.items() if key not in UNSIGNED}
    return json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def sign(spec: Mapping[str, Any], key: bytes) -> str:
    """Return the signature of a spec."""
    return "v1:" + hmac.digest(key, b"bftrainer spec v1\0" + canonical(spec), hashlib.sha256).hex()


def check(spec: Mapping[str, Any], signature: str, key: bytes) -> None:
    """Raise `NotSignedError` unless the signature is that of this spec by this key."""
    if not hmac.compare_digest(signature.encode("utf-8", "replace"), sign(spec, key).encode()):
        raise NotSignedError(
            "its specification is not the one that its owner signed, or was signed with another key: submit it again"
            if signature
            else "its owner has not signed it: submit it again, as the owner, with this version of BFTrainer"
        )


class NotSignedError(BFTrainerError):
    """Raised for a spec that its owner has not signed. The message begins with `REFUSED`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{REFUSED}{why}")
