"""TLS settings secure connections to the controller from agents, commands and programs.

`serve` has its configured files (`api.certificate`, `api.key`) checked here before they are used; `authority.py` makes
some where none are configured. Clients and agents get the context that verifies the controller's certificate
(`api.authority`, or the variable `BFTRAINER_CA`).
"""

from __future__ import annotations

import base64
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from bftrainer.errors import BFTrainerError, InputError

CA = "BFTRAINER_CA"
"""The environment variable of clients and agents with a file of trusted certificates; else the system's are used."""
PEM = "-----BEGIN CERTIFICATE-----"
"""How the content of a file of certificates begins."""
_ONE_LINE = "base64:"
"""How a certificate in one line begins, for variables of agents on nodes that do not see the controller's files."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The certificate files of a controller."""

    certificate: Path
    key: Path
    authority: str
    """The file of certificates that verifies `certificate`; empty: the system's."""


def identity_of(certificate: str, key: str, authority: str, name: str) -> Identity | None:
    """Return the certificate files of a configuration, after checking that clients will accept them; None without TLS.

    `name` is the host in the controller's URL. Raises `InputError`.
    """
    if not certificate and not key:
        if authority:
            raise InputError("api.authority is set, but api.certificate and api.key are not: set all, or none")
        return None
    if not (certificate and key):
        raise InputError("api.certificate and api.key must be set together")
    identity = Identity(Path(certificate), Path(key), authority)
    verify(identity, name)
    return identity


def verify(identity: Identity, name: str) -> None:
    """Check that clients of the host `name` will accept a certificate. Raises `InputError`."""
    server = _server_context(identity)
    try:
        client = client_context(identity.authority)
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as problem:
        trusted = identity.authority or "the system's authorities"
        raise InputError(
            f"api.certificate: {identity.certificate} cannot be verified for {name} with {trusted}: {reason(problem)}; "
            "set api.authority to the file of the authority that signed it, and api.name to a name in the certificate"
        ) from None
    except ssl.SSLError as problem:
        raise InputError(f"api.certificate: {identity.certificate} cannot be used: {reason(problem)}") from None


def client_context(authority: str, source: str = "api.authority") -> ssl.SSLContext:
    """Return a context that verifies a controller by certificates, or by the system's if none are given.

    `authority` is the path of a file in PEM form, the content of one, or what `one_line` returned.
    """
    if not authority:
        return ssl.create_default_context()
    try:
        if authority.startswith(PEM):
            return ssl.create_default_context(cadata=authority)
        if authority.startswith(_ONE_LINE):
            return ssl.create_default_context(cadata=base64.b64decode(authority.removeprefix(_ONE_LINE), validate=True))
        return ssl.create_default_context(cafile=authority)
    except ssl.SSLError:
        raise InputError(f"{source}: {_shown(authority)} must have certificates in PEM form, but has none") from None
    except OSError as problem:
        raise InputError(f"{source}: {authority}: {problem.strerror or problem}") from None
    except ValueError:
        raise InputError(f"{source}: must be the path of a file, but got {authority!r:.80}") from None


def one_line(certificate: Path) -> str:
    """Return the only certificate in a file as one line of text, which `client_context` accepts."""
    return _ONE_LINE + base64.b64encode(ssl.PEM_cert_to_DER_cert(certificate.read_text())).decode()


def is_text(authority: str) -> bool:
    """Return whether this is a certificate itself, and no path of one."""
    return authority.startswith((PEM, _ONE_LINE))


def _shown(authority: str) -> str:
    return "its text" if is_text(authority) else authority


def reason(problem: ssl.SSLError) -> str:
    """Return OpenSSL's message, without its file and line."""
    if isinstance(problem, ssl.SSLCertVerificationError) and problem.verify_message:
        return str(problem.verify_message).rstrip(".")
    return (problem.reason or str(problem)).replace("_", " ").lower()


def untrusted(problem: BaseException) -> str:
    """Return what was wrong with a controller's certificate, if that caused `problem`; else an empty text."""
    at: BaseException | None = problem
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            return reason(at)
        at = at.__cause__ or at.__context__
    return ""


def _server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_password() -> str:
        raise InputError(
            f"api.key: {identity.key} is encrypted, and the controller cannot ask for its password: decrypt it"
        )

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
            "api.certificate and api.key must be files in PEM form, but at least one of "
            f"{identity.certificate} and {identity.key} is not"
        ) from None
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Make a TLS handshake between client and server in memory. Raises the client's error."""
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
