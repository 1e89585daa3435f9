"""Join secrets, signatures and accounts: what each is good for, and what is refused."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bftrainer.cluster.config.keys import Config, Server
from bftrainer.cluster.config.load import load_config
from bftrainer.cluster.config.users import UsersSettings
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.nodes.invitations import Invitations
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.doctor.doctor import examine
from bftrainer.cluster.owners import signatures
from bftrainer.cluster.owners.accounts import Accounts, account_warnings
from bftrainer.cluster.owners.join_secrets import KEY_FILE, JoinRight, JoinSecrets, new_pilot
from bftrainer.cluster.owners.modes import ACCOUNT_KEY, MODE_KEY, missing_accounts, mode_in_words, root_risk
from bftrainer.cluster.spec.trainer import parse_spec
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.cluster.store.tokens import LOCAL_TOKEN
from bftrainer.errors import InputError
from support.cluster.api import NoPool
from support.cluster.bench import Bench
from support.users.directory import known_accounts

RIGHT = JoinRight("ann", "node-1", "node-1#1", 1000.0)


def test_a_join_secret_gives_the_right_it_was_issued_for_until_it_expires() -> None:
    joins = JoinSecrets(b"k" * 32)
    secret = joins.issue(RIGHT)
    assert joins.verify(secret, 999.0) == RIGHT
    assert joins.verify(secret, 1000.0) is None
    assert secret.isascii()
    assert " " not in secret


def test_a_join_secret_of_another_key_or_with_another_owner_is_refused() -> None:
    joins = JoinSecrets(b"k" * 32)
    mine, others = joins.issue(RIGHT), joins.issue(replace(RIGHT, owner="bob"))
    body, mac = mine.removeprefix("bfj1.").split(".")
    other_body = others.removeprefix("bfj1.").split(".")[0]
    forged = [f"bfj1.{other_body}.{mac}", f"bfj1.{body}.", f"bfj1.{body}", "bfj1..", "bfj1.é.é", body, "", mine[:-2]]
    assert [joins.verify(secret, 0.0) for secret in forged] == [None] * len(forged)
    assert JoinSecrets(b"x" * 32).verify(mine, 0.0) is None


def test_the_key_of_join_secrets_is_made_once_and_only_its_account_reads_it(tmp_path: Path) -> None:
    secret = JoinSecrets.at(tmp_path).issue(RIGHT)
    assert JoinSecrets.at(tmp_path).verify(secret, 0.0) == RIGHT
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert new_pilot("n") != new_pilot("n")


def test_a_signature_holds_for_what_is_run_and_not_for_what_is_only_shown(tmp_path: Path) -> None:
    key = signatures.read_key(tmp_path, make=True)
    assert signatures.key_path(tmp_path).stat().st_mode & 0o777 == 0o600
    assert signatures.read_key(tmp_path, make=True) == key
    spec = parse_spec({"script": "/a.py", "args": [1, 0.5], "env": {"A": "ü"}, "nodes": "1-4"}).as_json()
    signature = signatures.sign(spec, key)
    again = parse_spec(spec).as_json()
    signatures.check(again, signature, key)
    signatures.check({**again, "weight": 2.0, "name": "x"}, signature, key)
    other_key = b"o" * 32
    for changed in ({"args": ["2"]}, {"script": "/b.py"}, {"env": {"A": "u"}}, {"cwd": "/x"}, {"python": "/p"}):
        with pytest.raises(
            signatures.NotSignedError, match="agent refuses it: its specification is not the one that its owner signed"
        ):
            signatures.check({**again, **changed}, signature, key)
    with pytest.raises(signatures.NotSignedError):
        signatures.check(again, signature, other_key)
    with pytest.raises(signatures.NotSignedError, match="its owner has not signed it"):
        signatures.check(again, "", key)


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no key"):
        signatures.read_key(tmp_path)
    signatures.read_key(tmp_path, make=True)
    signatures.key_path(tmp_path).chmod(0o640)
    with pytest.raises(InputError, match="nobody else may read it"):
        signatures.read_key(tmp_path)
    signatures.key_path(tmp_path).chmod(0o600)
    signatures.key_path(tmp_path).write_text("short")
    with pytest.raises(InputError, match="64 hexadecimal digits"):
        signatures.read_key(tmp_path)
    signatures.key_path(tmp_path).unlink()
    signatures.key_path(tmp_path).mkdir()
    with pytest.raises(InputError, match=r"Is a directory: it must be a file of yours .* makes a new one"):
        signatures.read_key(tmp_path)


def test_an_owner_is_the_account_of_that_name_unless_another_is_named() -> None:
    accounts = Accounts.parse(("ann=nobody",))
    account = accounts.of("ann")
    assert (account.name, account.home.is_absolute(), account.gid in account.groups) == ("nobody", True, True)
    assert [line.split(" on ")[0] for line in missing_accounts(Accounts.parse(("ann=nobody", "bob=no-such-user")))] == [
        "owner bob has no account 'no-such-user'"
    ]
    with pytest.raises(InputError, match="owner no-such-owner has no account"):
        accounts.of("no-such-owner")
    with pytest.raises(InputError, match="trainers do not run as root"):
        accounts.of("root")
    assert Accounts.parse((), ("root",)).of("root").uid == 0
    with pytest.raises(InputError, match="must be texts such as"):
        Accounts.parse(("ann",))


def test_the_mode_is_shared_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    around = {"HOME": str(tmp_path)}
    assert load_config(None, around).users.mode == "shared"
    config = load_config(None, {**around, "BFTRAINER_USERS__MODE": "own"}, {"users.accounts": '["ann=nobody"]'})
    assert config.users.own
    assert config.users.as_accounts().of("ann").name == "nobody"
    with pytest.raises(InputError, match="must be one of shared, own"):
        load_config(None, {**around, "BFTRAINER_USERS__MODE": "each"})


def test_expired_is_judged_by_the_time_given() -> None:
    joins, now = JoinSecrets(os.urandom(32)), time.time()
    assert joins.verify(joins.issue(replace(RIGHT, expires=now + 60)), now) is not None


def test_the_mode_is_said_in_words_and_the_doctor_warns_where_owners_share_an_account(tmp_path: Path) -> None:
    assert mode_in_words("shared", {"ann"}, "svc") == "single user: all trainers run as svc"
    assert "trainers of 2 owners run as svc" in mode_in_words("shared", {"ann", "bob"}, "svc")
    assert "under its owner's account" in mode_in_words("own", {"ann", "bob"}, "svc")

    def warnings() -> list[str]:
        return [finding.what for finding in examine(tmp_path) if "run under one account" in finding.what]

    with Store.open(tmp_path / FILE) as store:
        store.add_trainer(name="a", owner="ann", spec={"script": "a.py"}, time=1.0)
        assert warnings() == []
        store.add_trainer(name="b", owner="bob", spec={"script": "b.py"}, time=2.0)
        assert len(warnings()) == 1
        store.keep(MODE_KEY, "own")
        assert warnings() == []


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    return known_accounts(monkeypatch, munge=101, ann_hpc=2001, bob=2002, alias=2002, svc=2003)


def test_two_owners_do_not_have_one_account(directory: dict[str, int]) -> None:
    with pytest.raises(InputError, match="gives the account nobody to x and y"):
        Accounts.parse(("x=nobody", "y=nobody"))
    with pytest.raises(InputError, match="gives to another owner"):
        Accounts.parse(("ann=bob",)).of("bob")
    with pytest.raises(InputError, match="user id 2002 is also that of bob"):
        Accounts.parse(("ann=alias",)).of("ann")
    assert Accounts.parse(("ann=bob", "bob=ann_hpc")).of("bob").name == "ann_hpc"


def test_accounts_of_the_system_are_refused_unless_their_owner_is_named(directory: dict[str, int]) -> None:
    for accounts, owner in ((Accounts(), "munge"), (Accounts.parse(("ann=munge",)), "ann")):
        with pytest.raises(InputError, match="user id 101 is below 1000"):
            accounts.of(owner)
    assert Accounts.parse((), ("munge",)).of("munge").uid == 101


def test_the_doctor_warns_where_accounts_do_not_keep_owners_apart(tmp_path: Path, directory: dict[str, int]) -> None:
    assert account_warnings(Accounts(), {"bob", "ann_hpc", "no-such"}, 0) == []
    assert account_warnings(Accounts(), {"svc"}, 2003) == []
    (said,) = account_warnings(Accounts(), {"bob", "svc"}, 2003)
    assert "trainers of svc run under the controller's own account" in said
    (said,) = account_warnings(Accounts({"x": "bob", "y": "bob"}), {"x", "y"}, 0)
    assert "the owners x, y share the account with the user id 2002" in said

    def warnings() -> list[str]:
        return [found.what for found in examine(tmp_path, Accounts()) if "below 1000" in found.what]

    with Store.open(tmp_path / FILE) as store:
        store.add_trainer(name="a", owner="munge", spec={"script": "a.py"}, time=1.0)
        assert warnings() == []
        store.keep(MODE_KEY, "own")
        assert len(warnings()) == 1


def test_a_join_secret_ends_when_its_owner_gets_another_account(tmp_path: Path, directory: dict[str, int]) -> None:
    def joins(*pairs: str) -> JoinSecrets:
        return JoinSecrets.at(tmp_path, Accounts.parse(pairs))

    before = joins("ann=bob")
    secret = before.issue(RIGHT)
    again = before.issue(replace(RIGHT, agent="a1"))
    assert before.verify(secret, 0.0) == RIGHT
    for text in (secret, again):
        assert joins("ann=ann_hpc").verify(text, 0.0) is None
        assert joins().verify(text, 0.0) is None, "she has no account"
    assert joins("ann=bob", "x=svc").verify(again, 0.0) == replace(RIGHT, agent="a1")
    directory["bob"] = directory["alias"] = 2004
    assert joins("ann=bob").verify(secret, 0.0) is None, "another user has the name now"
    assert joins("ann=ann_hpc").verify(JoinSecrets.at(tmp_path).issue(RIGHT), 0.0) is None, "it names no account"


def test_a_controller_refuses_join_secrets_of_the_account_that_an_owner_had_before(
    tmp_path: Path, directory: dict[str, int]
) -> None:
    bench = Bench(tmp_path)

    def invitations(account: str) -> Invitations:
        users = UsersSettings(mode="own", accounts=(f"ann={account}",))
        config = replace(Config(), server=Server(state=tmp_path), users=users)
        controller = Controller(bench.cluster, NoPool(), config, lambda name: Logbook(tmp_path / name, 1 << 20), {})
        assert controller.agents.invitations is not None
        return controller.agents.invitations

    async def play() -> None:
        secret = invitations("bob").invite("n1", "ann", 0.0)
        assert invitations("bob").right(secret, 1.0) is not None
        assert invitations("ann_hpc").right(secret, 1.0) is None

    try:
        asyncio.run(play())
    finally:
        bench.store.close()


def test_a_controller_of_root_warns_where_others_run_as_root_and_so_does_the_doctor(tmp_path: Path) -> None:
    assert root_risk("shared", {"root"}, "root", 0) == ""
    assert root_risk("shared", {"ann"}, "svc", 1000) == ""
    assert root_risk("own", {"ann"}, "root", 0) == ""
    assert "so ann, bob can do anything" in root_risk("shared", {"ann", "bob", "root"}, "root", 0)

    def warnings() -> list[str]:
        return [finding.what for finding in examine(tmp_path) if "run as root" in finding.what]

    with Store.open(tmp_path / FILE) as store:
        store.keep(ACCOUNT_KEY, ["root", 0])
        store.tokens.adopt("l" * 40, name=LOCAL_TOKEN, owner="root", role="admin", time=1.0)
        store.tokens.create(name="grafana", owner="eve", role="monitor", time=1.0)
        assert store.tokens.owners(2.0) == set()
        assert warnings() == []
        store.tokens.create(name="laptop", owner="ann", role="user", time=1.0)
        assert store.tokens.owners(2.0) == {"ann"}
        assert len(warnings()) == 1, "ann has no trainer yet"
        store.keep(MODE_KEY, "own")
        assert warnings() == []
