"""A controller that others may reach or impersonate is encrypted by its own authority, which clients know."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.cli.live.lend import _options
from bftrainer.client.api import Address, ApiClient, UnreachableError, UntrustedError, find_controller
from bftrainer.cluster.agent.options import AgentOptions, resolve
from bftrainer.cluster.doctor.doctor import examine
from bftrainer.cluster.lend.rules import LendRules
from bftrainer.cluster.wire import authority, tls
from bftrainer.cluster.wire.authority import own_identity
from bftrainer.errors import BFTrainerError, InputError
from support.cluster.live import Live

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]

NAMES = ("10.0.0.1", "fd00::1", "login1.example")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("state")
    own_identity(state, NAMES, ("login1", "not a name", "a" * 64, "two..dots"))
    return state


def files(state: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (state / "tls").iterdir()}


def test_the_certificate_is_for_the_controllers_names_and_keys_are_private(made: Path) -> None:
    identity = own_identity(made, NAMES)
    for name in (*NAMES, "[fd00::1]", "login1"):
        tls.verify(identity, name)
    for name in ("10.0.0.2", "else.example"):
        with pytest.raises(InputError, match="cannot be verified"):
            tls.verify(identity, name)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (made / "tls").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "controller.pem": 0o644, "controller.key": 0o600}
    assert (made / "tls").stat().st_mode & 0o777 == 0o700
    strict = ["openssl", "verify", "-x509_strict", "-CAfile", identity.authority, str(identity.certificate)]
    assert subprocess.run(strict, capture_output=True).returncode == 0
    for known in (identity.authority, Path(identity.authority).read_text(), tls.one_line(Path(identity.authority))):
        assert len(tls.client_context(known).get_ca_certs()) == 1  # a file, its text, and a line of text


def test_what_is_good_stays_and_the_authority_outlives_its_certificates(made: Path) -> None:
    before = files(made)
    own_identity(made, NAMES)
    assert files(made) == before
    own_identity(made, ("10.0.0.9",))
    after = files(made)
    assert {name for name in before if after[name] == before[name]} == {"ca.pem", "ca.key"}
    (made / "tls" / "controller.key").write_text("half a file")
    own_identity(made, NAMES)
    assert files(made)["ca.pem"] == before["ca.pem"]


def test_a_certificate_that_ends_within_a_year_is_renewed(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "_CERTIFICATE_DAYS", 300)
    own_identity(made, ("10.0.0.7",))
    short = files(made)
    monkeypatch.undo()
    own_identity(made, ("10.0.0.7",))
    assert files(made)["controller.pem"] != short["controller.pem"]
    assert files(made)["ca.pem"] == short["ca.pem"]


def test_what_cannot_be_made_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="must be for a host name or an address"):
        own_identity(tmp_path, ("a b",))
    (tmp_path / "no").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="openssl.*not on the PATH.*api.tls=false"):
        own_identity(tmp_path / "no", NAMES)
    failing = tmp_path / "openssl"
    failing.write_text("#!/bin/sh\necho no curve >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(BFTrainerError, match="openssl req has failed: no curve"):
        own_identity(tmp_path / "no", NAMES)
    with pytest.raises(BFTrainerError, match="cannot make a certificate in .*/missing"):
        own_identity(tmp_path / "missing", NAMES)


def test_an_agent_takes_the_authority_of_its_option_its_variable_or_beside_its_secret(
    made: Path, tmp_path: Path
) -> None:
    secret, own = made / "agent-secret", made / "tls" / "ca.pem"
    for file in (secret, tmp_path / "secret"):
        file.write_text("s\n")
    options = AgentOptions("https://head.example:1", secret_file=secret)
    assert resolve(options, {}).authority == str(own)
    assert resolve(options, {tls.CA: "/other.pem"}).authority == "/other.pem"
    elsewhere = replace(options, secret_file=tmp_path / "secret")
    assert resolve(elsewhere, {}).authority == ""
    assert resolve(replace(elsewhere, ca=own), {tls.CA: "/other.pem"}).authority == str(own)
    with pytest.raises(InputError, match="--ca: .*secret must have certificates in PEM form"):
        resolve(replace(options, ca=secret), {})


def test_beyond_loopback_a_controller_is_encrypted_and_a_users_file_is_all_that_a_client_needs(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Live(state, "--dry-run", "--host", "0.0.0.0", "--set", "api.name=127.0.0.1") as live:
        address = live.api.address
        assert address.url.startswith("https://127.0.0.1:")
        assert address.authority == str(state / "tls" / "ca.pem")
        with ApiClient(replace(address, authority="")) as stranger, pytest.raises(UntrustedError):
            stranger.status()
        home = tmp_path / "ann" / "client.json"
        home.parent.mkdir()
        words = ["token", "create", "ann", "--owner", "ann", "--client-file", str(home), "--state", str(state)]
        subprocess.run([sys.executable, "-m", "bftrainer", *words], check=True, capture_output=True)
        assert home.stat().st_mode & 0o777 == 0o600
        assert json.loads(home.read_text())["authority"].startswith(tls.PEM)
        with ApiClient(find_controller(home.parent, env={})) as ann:
            assert ann.me()["owner"] == "ann"


def heard_by_a_stranger(address: Address) -> bytes:
    """What a stranger at the controller's address gets of a client."""

    def listen() -> bytes:
        with squatter, squatter.accept()[0] as connection:
            return connection.recv(1 << 16)

    port = int(address.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as squatter, ThreadPoolExecutor(1) as thread:
        heard = thread.submit(listen)
        with ApiClient(address) as client, pytest.raises((UnreachableError, UntrustedError)):
            client.status()
        return heard.result(60)


def test_where_trainers_run_as_their_owners_a_stranger_at_the_controllers_port_is_sent_no_token(tmp_path: Path) -> None:
    state, at_stake = tmp_path / "state", "whoever listens on .*127.0.0.1.* while the controller is down gets tokens"
    with Live(state, "--dry-run", "--set", "users.mode=own") as live:
        address = live.api.address
        assert address.url.startswith("https://127.0.0.1:")
        assert address.authority == str(state / "tls" / "ca.pem")
        assert live.api.me()["role"] == "admin"
        assert not [found for found in examine(state) if "api.tls" in found.what]
    heard = heard_by_a_stranger(address)
    assert heard[:1] == b"\x16", "the beginning of a TLS handshake"
    assert address.token.encode() not in heard
    assert not re.search(at_stake, live.log.read_text())
    with Live(state, "--dry-run", "--set", "users.mode=own", "--set", "api.tls=false") as live:
        address = live.api.address
        assert address.url.startswith("http://127.0.0.1:")
        (found,) = (found for found in examine(state) if "api.tls" in found.what)
        assert (found.level, bool(re.search(at_stake, found.what))) == ("warning", True)
    assert re.search(at_stake, live.log.read_text())
    assert address.token.encode() in heard_by_a_stranger(address), "that is what is at stake"


def test_a_lender_takes_the_text_of_a_certificate_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFTRAINER_TOKEN", "x")
    rules = LendRules(frozenset({"p"}))
    for text in (f"{tls.PEM}\n{'a' * 900}\n", "base64:" + "a" * 900):
        monkeypatch.setenv(tls.CA, text)
        assert _options(tmp_path, rules, "https://127.0.0.1:1", tmp_path, "").authority == text


def test_a_text_that_holds_no_certificate_is_refused() -> None:
    with pytest.raises(InputError, match="its text must have certificates in PEM form"):
        tls.client_context(f"{tls.PEM}\nnonsense\n-----END CERTIFICATE-----\n")
    for odd in ("base64:bm9uc2Vuc2U=", "base64:???"):
        with pytest.raises(InputError):
            tls.client_context(odd)
    assert tls.client_context("").verify_mode == ssl.CERT_REQUIRED
