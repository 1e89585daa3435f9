"""TLS between the controller and everybody who talks to it: agents, commands, programs.

`serve` asks here for the files that it is given (`api.certificate`, `api.key`) to be checked before anybody relies on
them; clients and agents for how they know the controller (`api.authority`, or the variable `BFTRAINER_CA`).
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.settings import Api
from bftrainer.errors import BFTrainerError, InputError

CA = "BFTRAINER_CA"
"""Environment of clients and agents: a file with the certificates of whom to trust; else those of the system."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The files by which a controller shows who it is."""

    certificate: Path
    key: Path
    authority: str
    """The file by which others can tell; empty: the system's."""


def identity_of(api: Api, name: str) -> Identity | None:
    """The files of a configuration, once it is clear that clients will believe them; None without TLS.

    `name` is the host in the URL that everybody will use.
    """
    if not api.certificate and not api.key:
        if api.authority:
            raise InputError("api.authority is set, but api.certificate and api.key are not: set all, or none")
        return None
    if not (api.certificate and api.key):
        raise InputError("api.certificate and api.key must be set together: a certificate is of no use without its key")
    found = Identity(Path(api.certificate), Path(api.key), api.authority)
    server = _server_context(found)
    try:
        client = client_context(found.authority)
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as problem:
        trusted = found.authority or "the system's authorities"
        raise InputError(
            f"api.certificate: {found.certificate} would not be believed at {name} by those who trust {trusted}: "
            f"{reason(problem)}; set api.authority to the file of who signed it, api.name to a name that it is for"
        ) from None
    except ssl.SSLError as problem:
        raise InputError(f"api.certificate: {found.certificate} is of no use: {reason(problem)}") from None
    return found


def client_context(authority: str, source: str = "api.authority") -> ssl.SSLContext:
    """How to know a controller: by a file of certificates, or without one by those that the system trusts."""
    if not authority:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=authority)
    except ssl.SSLError:
        raise InputError(f"{source}: {authority} must have certificates in PEM form, but has none") from None
    except OSError as problem:
        raise InputError(f"{source}: {authority}: {problem.strerror or problem}") from None
    except ValueError:
        raise InputError(f"{source}: must be the path of a file, but got {authority!r:.80}") from None


def reason(problem: ssl.SSLError) -> str:
    """What OpenSSL found, without its file and line."""
    if isinstance(problem, ssl.SSLCertVerificationError) and problem.verify_message:
        return str(problem.verify_message).rstrip(".")
    return (problem.reason or str(problem)).replace("_", " ").lower()


def untrusted(problem: BaseException) -> str:
    """What was wrong with a controller's certificate, if that is why it could not be reached; else empty."""
    at: BaseException | None = problem
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            return reason(at)
        at = at.__cause__ or at.__context__
    return ""


def _server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise InputError(f"api.key: {identity.key} is encrypted, and nobody is there to type its password: decrypt it")

    for what, path in (("certificate", identity.certificate), ("key", identity.key)):
        try:
            path.open("rb").close()
        except OSError as problem:
            raise InputError(f"api.{what}: {path}: {problem.strerror}") from None
    try:
        context.load_cert_chain(identity.certificate, identity.key, no_password)
    except ssl.SSLError as problem:
        if problem.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"api.key: {identity.key} is not the key of {identity.certificate}") from None
        raise InputError(
            f"api.certificate and api.key must be files in PEM form, but {identity.certificate} and {identity.key} "
            "are not both"
        ) from None
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Have a client meet a server in memory. Raises what the client finds wrong."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=_bare(name)),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(10):
        waiting = 0
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
        if not waiting:
            return
    raise BFTrainerError("a TLS connection to this controller cannot be made")


def _bare(name: str) -> str:
    bare = name.strip("[]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare
