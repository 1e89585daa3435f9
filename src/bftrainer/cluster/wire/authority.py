"""A controller's own certificate authority encrypts connections where no certificate is configured.

`serve` calls `own_identity` without `api.certificate` when it listens beyond loopback, and where trainers run as their
owners. The authority and the controller's certificate are made once, with the program `openssl`, and stay in the state
folder. Agents and commands verify the controller with the authority's certificate, `ca.pem`.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bftrainer.cluster.wire import tls
from bftrainer.errors import BFTrainerError, InputError

FOLDER = "tls"
AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
CERTIFICATE, KEY = "controller.pem", "controller.key"
OWN_AUTHORITY = f"{FOLDER}/{AUTHORITY}"
"""File in a state folder with the certificate by which clients verify the controller."""
KEYS = (f"{FOLDER}/{AUTHORITY_KEY}", f"{FOLDER}/{KEY}")
"""Files in a state folder that only their owner may read."""

_AUTHORITY_DAYS, _CERTIFICATE_DAYS = 3650, 730
_RENEW_DAYS = 365
"""A certificate with fewer days left is renewed when the controller starts."""
_SKEW = timedelta(hours=1)
"""Certificates are valid from this long before they are made: clocks of nodes may be slow."""
_OPENSSL_S = 30.0
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_NEW_KEY = ("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", "settings")
_SIGN = ("ca", "-batch", "-notext", "-config", "settings")
_SETTINGS = """\
[req]
distinguished_name = subject
prompt = no
[subject]
O = BFTrainer
CN = {subject}
[ca]
default_ca = own
[own]
new_certs_dir = .
database = issued
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
email_in_dn = no
[any]
organizationName = optional
commonName = supplied
[authority]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[controller]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
{names}
"""


def unencrypted(where: str, own_users: bool) -> str:
    """Return what is at stake without TLS, for `serve` and the doctor. `where`: the address of the controller."""
    if own_users:
        return (
            f"api.tls is false: whoever listens on {where} while the controller is down gets tokens, values of --env "
            "and secrets of agents"
        )
    return f"api.tls is false: tokens and the agents' secret can be read on the way to {where}"


def own_identity(state: Path, names: Sequence[str], more: Sequence[str] = ()) -> tls.Identity:
    """Return a certificate for these host names and addresses, signed by the authority of a state folder.

    It is also for those in `more` that are host names. What is missing, soon invalid or for other names is made. An
    existing authority is kept: clients know it.
    """
    folder = state / FOLDER
    names = tuple(dict.fromkeys((*names, *filter(_is_host_name, more))))
    identity = tls.Identity(folder / CERTIFICATE, folder / KEY, str(folder / AUTHORITY))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not all((folder / name).is_file() for name in (AUTHORITY, AUTHORITY_KEY)):
            _make_authority(folder)
        if not _is_good(identity, names):
            _make_certificate(folder, names)
            for name in names:
                tls.verify(identity, name)
    except OSError as problem:
        raise BFTrainerError(f"cannot make a certificate in {folder}: {problem.strerror or problem}") from None
    return identity


def _is_host_name(name: str) -> bool:
    return bool(_HOST.fullmatch(name)) and all(0 < len(label) < 64 for label in name.split("."))


def _is_good(identity: tls.Identity, names: Sequence[str]) -> bool:
    if not (identity.certificate.is_file() and identity.key.is_file()):
        return False
    try:
        for name in names:
            tls.verify(identity, name)
        seconds = str(_RENEW_DAYS * 86400)
        _openssl(identity.certificate.parent, "x509", "-noout", "-checkend", seconds, "-in", CERTIFICATE)
    except BFTrainerError:
        return False
    return True


def _make_authority(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        here = Path(name)
        _prepare(here, f"authority {secrets.token_hex(4)}", ())
        _openssl(here, *_NEW_KEY, "-keyout", AUTHORITY_KEY, "-out", "request")
        who = ("-selfsign", "-keyfile", AUTHORITY_KEY, "-extensions", "authority")
        _openssl(here, *_SIGN, *who, *_valid(_AUTHORITY_DAYS), "-in", "request", "-out", AUTHORITY)
        _place(here, folder, AUTHORITY_KEY, AUTHORITY)


def _make_certificate(folder: Path, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        here = Path(name)
        _prepare(here, f"controller {secrets.token_hex(4)}", names)
        _openssl(here, *_NEW_KEY, "-keyout", KEY, "-out", "request")
        who = ("-keyfile", f"../{AUTHORITY_KEY}", "-cert", f"../{AUTHORITY}", "-extensions", "controller")
        _openssl(here, *_SIGN, *who, *_valid(_CERTIFICATE_DAYS), "-in", "request", "-out", CERTIFICATE)
        _place(here, folder, KEY, CERTIFICATE)


def _prepare(here: Path, subject: str, names: Sequence[str]) -> None:
    listed = ",".join(_alternative_name(name) for name in names)
    extra = f"subjectAltName = {listed}" if listed else ""
    (here / "settings").write_text(_SETTINGS.format(subject=subject, names=extra))
    (here / "issued").touch()


def _place(here: Path, folder: Path, key: str, certificate: str) -> None:
    (here / key).chmod(0o600)
    (here / certificate).chmod(0o644)
    for name in (key, certificate):
        (here / name).replace(folder / name)


def _alternative_name(name: str) -> str:
    bare = name.strip("[]")
    try:
        return f"IP:{ipaddress.ip_address(bare)}"
    except ValueError:
        if not _HOST.fullmatch(bare):
            raise InputError(f"a certificate must be for a host name or an address, but got {name!r:.80}") from None
        return f"DNS:{bare}"


def _valid(days: int) -> tuple[str, ...]:
    now = datetime.now(UTC)
    begin, end = (moment.strftime("%Y%m%d%H%M%SZ") for moment in (now - _SKEW, now + timedelta(days=days)))
    return ("-startdate", begin, "-enddate", end)


def _openssl(folder: Path, *words: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise InputError(
            "the controller makes its certificate with `openssl`, which is not on the PATH: install it, or set "
            "api.certificate and api.key, or switch encryption off with api.tls=false"
        )
    try:
        done = subprocess.run(  # noqa: S603 - no shell, and words of this module
            [program, *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_OPENSSL_S
        )
    except subprocess.TimeoutExpired:
        raise BFTrainerError(f"openssl {words[0]} takes longer than {_OPENSSL_S:g} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise BFTrainerError(f"openssl {words[0]} has failed: {lines[-1] if lines else 'it says nothing'}")
