"""TLS: files that nobody would believe are refused at the start, and with good ones all connections are encrypted."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.client.api import Address, ApiClient, UnreachableError, UntrustedError, find_controller
from bftrainer.cluster.agent.link import ControllerLink
from bftrainer.cluster.http import limits
from bftrainer.cluster.wire.messages import Join
from bftrainer.cluster.wire.tls import CA, client_context, identity_of
from bftrainer.errors import InputError
from support.cluster.live import Live
from support.cluster.served import echo, limited_listener, served
from support.waiting import wait_until

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate for 127.0.0.1 that it signed, and ones that are of no use."""
    at = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        key, cert = at / f"{name}.key", at / f"{name}.pem"
        openssl("req", "-x509", *curve, "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}")
    for name, days in (("server", "2"), ("expired", "-1")):
        key, asked, cert = (at / f"{name}.{end}" for end in ("key", "csr", "pem"))
        openssl("req", *curve, "-keyout", key, "-out", asked, "-subj", "/CN=bftrainer")
        (at / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:controller.example\n")
        ca = ("-CA", at / "ca.pem", "-CAkey", at / "ca.key", "-CAcreateserial", "-extfile", at / "names")
        openssl("x509", "-req", "-in", asked, *ca, "-out", cert, "-days", days)
    openssl("ec", "-in", at / "server.key", "-out", at / "locked.key", "-aes128", "-passout", "pass:secret")
    (at / "text.pem").write_text("not a certificate\n")
    return at


def paths_of(
    files: Path, certificate: str = "server.pem", key: str = "server.key", authority: str = "ca.pem"
) -> tuple[str, str, str]:
    def path(name: str) -> str:
        return str(files / name) if name else ""

    return path(certificate), path(key), path(authority)


def test_without_files_there_is_no_tls() -> None:
    assert identity_of("", "", "", "127.0.0.1") is None


def test_a_certificate_that_is_believed_is_taken(files: Path) -> None:
    for name in ("127.0.0.1", "controller.example"):
        found = identity_of(*paths_of(files), name)
        assert found is not None
        assert found.authority == str(files / "ca.pem")


@pytest.mark.parametrize(
    ("certificate", "key", "authority", "name", "says"),
    [
        ("server.pem", "", "", "127.0.0.1", "must be set together"),
        ("", "server.key", "", "127.0.0.1", "must be set together"),
        ("", "", "ca.pem", "127.0.0.1", "set all, or none"),
        ("missing.pem", "server.key", "ca.pem", "127.0.0.1", "No such file"),
        ("server.pem", "missing.key", "ca.pem", "127.0.0.1", "No such file"),
        ("text.pem", "server.key", "ca.pem", "127.0.0.1", "PEM form"),
        ("server.pem", "text.pem", "ca.pem", "127.0.0.1", "PEM form"),
        ("server.pem", "other.key", "ca.pem", "127.0.0.1", "is not the key of"),
        ("server.pem", "locked.key", "ca.pem", "127.0.0.1", "encrypted"),
        ("server.pem", "server.key", "text.pem", "127.0.0.1", "must have certificates"),
        ("server.pem", "server.key", "missing.pem", "127.0.0.1", "No such file"),
        ("server.pem", "server.key", "other.pem", "127.0.0.1", "api.authority"),
        ("server.pem", "server.key", "", "127.0.0.1", "the system's authorities"),
        ("server.pem", "server.key", "ca.pem", "10.0.0.1", "api.name"),
        ("server.pem", "server.key", "ca.pem", "else.example", "api.name"),
        ("expired.pem", "expired.key", "ca.pem", "127.0.0.1", "expired"),
    ],
)
def test_files_that_nobody_would_believe_are_refused(
    files: Path, certificate: str, key: str, authority: str, name: str, says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        identity_of(*paths_of(files, certificate, key, authority), name)
    assert "\n" not in str(caught.value)


def test_a_client_says_which_file_of_authorities_is_wrong(tmp_path: Path, files: Path) -> None:
    with pytest.raises(InputError, match=CA):
        ApiClient(Address("https://127.0.0.1:1", "token", authority=str(tmp_path / "none.pem")))
    with pytest.raises(InputError, match=CA):
        ControllerLink(
            "wss://127.0.0.1:1/v1/agents", "secret", lambda: Join("n", "n", "a"), lambda _: None, str(files / "names")
        )
    with pytest.raises(InputError):
        client_context("nul\0")


def test_the_authority_comes_from_the_environment_or_the_controllers_own_file(tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text('{"url": "https://a:1", "token": "t", "authority": "/ca.pem"}')
    assert find_controller(tmp_path, env={}).authority == "/ca.pem"
    assert find_controller(tmp_path, env={CA: "/mine.pem"}).authority == "/mine.pem"
    assert find_controller(tmp_path, "https://a:1", "mine", env={}).authority == "/ca.pem"
    assert find_controller(tmp_path, "https://b:1", "mine", env={}).authority == ""
    assert find_controller(tmp_path, "http://a:1", "mine", env={}).authority == ""


def test_a_handshake_that_does_not_come_is_not_waited_for_and_counts_as_a_connection(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = limited_listener(8)
    keys = {"ssl_certfile": str(files / "server.pem"), "ssl_keyfile": str(files / "server.key")}
    monkeypatch.setattr(limits, "REQUEST_S", 1.0)
    with served(echo, listener, **keys) as port, socket.create_connection(("127.0.0.1", port)) as silent:
        wait_until(lambda: listener.open_connections == 1)
        silent.settimeout(20)  # a minute, if nothing was set
        assert silent.recv(1) == b""
        wait_until(lambda: listener.open_connections == 0)


def test_a_controller_with_tls_is_reached_by_agents_and_commands_that_know_it_and_by_nobody_else(
    tmp_path: Path, files: Path
) -> None:
    given = zip(("certificate", "key", "authority"), paths_of(files), strict=True)
    options = [word for key, path in given for word in ("--set", f"api.{key}={path}")]
    with Live(tmp_path / "state", "--nodes", "1", *options) as live:
        assert live.api.address.url.startswith("https://127.0.0.1:")
        wait_until(lambda: any(node["state"] == "free" for node in live.nodes()), what="the node's join")
        address = live.api.address
        for authority in ("", str(files / "other.pem")):
            with ApiClient(replace(address, authority=authority)) as stranger, pytest.raises(UntrustedError, match=CA):
                stranger.status()
        plainly = replace(address, url=address.url.replace("https", "http"))
        with ApiClient(plainly) as plain, pytest.raises(UnreachableError, match="no controller answers"):
            plain.status()
        environment = {CA: str(files / "other.pem"), "BFTRAINER_SECRET": "x" * 20, "PATH": "/usr/bin:/bin"}
        agent = subprocess.run(
            [sys.executable, "-m", "bftrainer", "agent", "--url", address.url, "--node", "stranger"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert agent.returncode == 2
        assert "not to be trusted" in agent.stderr
