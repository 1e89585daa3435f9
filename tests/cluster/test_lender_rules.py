"""What a lender carries out and what it refuses, whatever the controller sends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pwd
import stat
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from bftrainer.cli.live import lend as lend_command
from bftrainer.cluster.http import agents as routes
from bftrainer.cluster.lend import link as link_module
from bftrainer.cluster.lend.daemon import LenderOptions, run_lender
from bftrainer.cluster.lend.install import unit_text
from bftrainer.cluster.lend.jobs import LenderJobs
from bftrainer.cluster.lend.ledger import LentLedger
from bftrainer.cluster.lend.lender import Lender
from bftrainer.cluster.lend.link import LenderLink
from bftrainer.cluster.lend.pilot_files import PilotFiles
from bftrainer.cluster.lend.rules import LendRules, RefusedByRules, SubmissionRate, check_submission
from bftrainer.cluster.owners.accounts import Accounts
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError
from bftrainer.cluster.pools.slurm.submit.lenders import Lenders
from bftrainer.cluster.wire.lender_messages import (
    NO_TOKEN,
    REFUSED_CODE,
    CancelLent,
    FromLender,
    LendPilot,
    Lent,
    NotLent,
    Offer,
    OfferRefused,
    OfferTaken,
    decode_lending,
    encode_lending,
)
from bftrainer.elastic.protocol import ProtocolError
from bftrainer.errors import InputError
from bftrainer.util.backoff import Backoff
from support.cluster.made_pools import executable
from support.waiting import until

RULES = LendRules(frozenset({"scavenger"}), most_pilots=3, most_minutes=60)
SECRET = "bfj1." + "s" * 60
FINE = LendPilot(1, "0123456789abcdef", "n01", "scavenger", 60, SECRET)
HOSTILE = (
    *("--wrap=id", "n01 --wrap=id", "n01\n#SBATCH --wrap", "n01;id", "$(id)", "`id`", "n[01-99]", "n01,n02", "../n01"),
    *("", " ", "-n01", "n01\x00", "n" * 400, "ñ01", "n01%", "n01/../../x"),
)
HARMLESS = {("mark", "-n01"), ("secret", "n" * 400)}
"""A mark is in the middle of a comment, and a long word is a secret like any other."""


class Recorded(LenderJobs):
    """Runs nothing: it notes the commands, and lists the jobs of a table."""

    def __init__(self, files: PilotFiles) -> None:
        super().__init__(files, RULES)
        self.argvs: list[tuple[str, ...]] = []
        self.cancelled: list[tuple[int, ...]] = []
        self.cancelled_of: list[str] = []
        self.state_ids: dict[str, str] = {}
        self.table: dict[str, tuple[int, str]] = {}
        self.problem = ""

    async def submit(self, request: LendPilot, state_id: str) -> int:
        self.argvs.append(self.words(request, state_id))
        if self.problem:
            raise SlurmCommandError(self.problem)
        self.state_ids[request.pilot] = state_id
        self.table[request.pilot] = (len(self.argvs), request.node)
        return len(self.argvs)

    async def cancel(self, jobs: Any, state_id: str, *, only_waiting: bool = False) -> None:
        self.cancelled.append(tuple(jobs))
        self.cancelled_of.append(state_id)

    async def listed(self, state_id: str) -> dict[str, tuple[int, str]]:
        return {pilot: job for pilot, job in self.table.items() if self.state_ids.get(pilot, state_id) == state_id}


@dataclasses.dataclass
class Scene:
    """A lender whose offer was taken."""

    lender: Lender
    jobs: Recorded
    folder: Path

    def ask(self, *messages: Any) -> list[FromLender | None]:
        async def whole() -> list[FromLender | None]:
            return [await self.lender.answer(message) for message in messages]

        return asyncio.run(whole())

    @property
    def secrets(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "secrets").iterdir())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return made(tmp_path / "lent")


def made(folder: Path, table: dict[str, tuple[int, str]] | None = None) -> Scene:
    files = PilotFiles(folder, {"BFTRAINER_URL": "https://c:1"}, "/usr/bin/python3")
    files.prepare()
    jobs, ledger = Recorded(files), LentLedger(folder)
    ledger.load()
    jobs.table = dict(table or {})
    scene = Scene(Lender(RULES, files, ledger, jobs), jobs, folder)
    scene.ask(OfferTaken("abc", "ann"))
    return scene


def test_a_pilot_is_submitted_with_the_lenders_own_script_and_its_secret_in_a_file_that_only_its_user_reads(
    scene: Scene,
) -> None:
    assert scene.ask(FINE) == [Lent(1, 1)]
    (argv,) = scene.jobs.argvs
    assert argv[0] == "sbatch"
    assert argv[-2:] == (str(scene.folder / "pilot.sh"), FINE.pilot)
    assert {"--nodelist=n01", "--partition=scavenger", "--time=60", "--job-name=bftrainer-abc"} <= set(argv)
    assert not any(SECRET in word for word in argv)
    file = scene.folder / "secrets" / FINE.pilot
    assert file.read_text() == SECRET + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert SECRET not in (scene.folder / "pilot.sh").read_text()
    assert SECRET not in (scene.folder / "pilots.json").read_text()


@pytest.mark.parametrize(
    "field", ["pilot", "node", "partition", "account", "qos", "constraint", "gpus", "mark", "secret"]
)
@pytest.mark.parametrize("value", HOSTILE)
def test_no_text_of_a_request_becomes_an_option_or_a_command(scene: Scene, field: str, value: str) -> None:
    request = dataclasses.replace(FINE, **{field: value})
    if (value == "" and field in ("account", "qos", "constraint", "gpus", "mark")) or (field, value) in HARMLESS:
        return
    (answer,) = scene.ask(request)
    assert isinstance(answer, NotLent)
    assert not answer.maybe
    assert scene.jobs.argvs == []
    assert scene.secrets == []


@given(st.text(max_size=80))
def test_a_node_that_passes_is_one_word_that_names_one_host(node: str) -> None:
    try:
        check_submission(RULES, dataclasses.replace(FINE, node=node), (), 0)
    except RefusedByRules:
        return
    assert node.isascii()
    assert node[0].isalnum()
    assert not set(node) & set(" \t\n\r,;[]$`\\'\"/%&|<>*?~#=(){}!")


@pytest.mark.parametrize(
    "changes",
    [{"minutes": 0}, {"minutes": 61}, {"minutes": 10**12}, {"least_minutes": 61}, {"partition": "main"}],
    ids=str,
)
def test_what_the_user_has_not_allowed_is_refused(scene: Scene, changes: dict[str, Any]) -> None:
    (answer,) = scene.ask(dataclasses.replace(FINE, **changes))
    assert isinstance(answer, NotLent)
    assert scene.jobs.argvs == []


def test_a_request_that_is_sent_again_submits_nothing_not_even_after_the_pilot_has_ended(scene: Scene) -> None:
    scene.ask(FINE)
    scene.jobs.table.clear()
    asyncio.run(scene.lender.tend())
    assert isinstance(scene.ask(FINE)[0], NotLent)
    assert isinstance(made(scene.folder).ask(FINE)[0], NotLent), "also by the next lender of this folder"
    assert len(scene.jobs.argvs) == 1


def test_no_more_pilots_than_the_user_allows_and_ended_ones_make_room(scene: Scene) -> None:
    requests = [dataclasses.replace(FINE, request=i, pilot=f"pilot{i:04}", node=f"n{i:02}") for i in range(1, 6)]
    kinds = [type(answer) for answer in scene.ask(*requests)]
    assert kinds == [Lent, Lent, Lent, NotLent, NotLent]
    del scene.jobs.table["pilot0001"]
    assert isinstance(scene.ask(dataclasses.replace(FINE, pilot="pilot0009"))[0], Lent)


def test_another_id_of_the_controller_is_refused_while_pilots_of_the_former_one_are_left(scene: Scene) -> None:
    scene.ask(FINE)
    with pytest.raises(RefusedByRules, match="pilots of the former one are left.*--name=bftrainer-abc"):
        scene.ask(OfferTaken("def", "ann"))
    assert scene.lender.state_id == "abc"
    assert "STATE_ID=abc" in (scene.folder / "pilot.sh").read_text()
    scene.jobs.table.clear()
    scene.ask(OfferTaken("def", "ann"))
    assert isinstance(scene.ask(dataclasses.replace(FINE, pilot="fedcba9876543210"))[0], Lent)


def test_a_controller_that_the_lender_does_not_take_is_left_and_the_lenders_state_says_why(scene: Scene) -> None:
    scene.ask(FINE)
    states: list[str] = []

    async def controller(connection: ServerConnection) -> None:
        await connection.send(encode_lending(OfferTaken("def", "ann")))
        await connection.wait_closed()

    async def whole() -> None:
        async with serve(controller, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            link = LenderLink(scene.lender, f"http://127.0.0.1:{port}", "token", changed=states.append)
            keeping = asyncio.create_task(link.keep())
            await until(lambda: states)
            keeping.cancel()

    asyncio.run(whole())
    assert "pilots of the former one are left" in states[0]


def test_a_lender_whose_token_was_revoked_says_so_and_connects_again_with_the_next_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "BACKOFF", Backoff(0.01, 0.01))
    states, refused, now = list[str](), list[str](), ["first"]
    valid = {"first"}

    def admit(connection: ServerConnection, request: Request) -> Response | None:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        if token in valid:
            return None
        refused.append(token)
        return connection.respond(HTTPStatus.FORBIDDEN, "")

    async def controller(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(encode_lending(OfferTaken("abc", "ann")))
        if valid == {"first"}:
            valid.clear()
            await connection.send(encode_lending(OfferRefused(NO_TOKEN)))
            await connection.close(REFUSED_CODE, "as said")
        await connection.wait_closed()

    async def whole() -> None:
        async with serve(controller, "127.0.0.1", 0, process_request=admit) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            link = LenderLink(scene.lender, url, "first", changed=states.append, read_token=lambda: now[0])
            keeping = asyncio.create_task(link.keep())
            await until(lambda: refused)
            valid.add("second")
            now[0] = "second"
            await until(lambda: states.count("connected") == 2, lambda: states)
            keeping.cancel()

    asyncio.run(whole())
    assert states == ["connected", f"not connected: {NO_TOKEN}", "connected"]


def test_a_lender_reads_its_client_file_again_but_sends_no_token_of_another_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BFTRAINER_URL", "BFTRAINER_TOKEN", "BFTRAINER_CA"):
        monkeypatch.delenv(name, raising=False)
    file, token = tmp_path / "client.json", "bft_" + "x" * 40
    file.write_text(json.dumps({"url": "http://head:1", "token": token}))
    options = lend_command._options(tmp_path / "lent", RULES, None, tmp_path, "")
    assert (options.token, options.read_token()) == (token, token)
    file.write_text(json.dumps({"url": "http://head:1", "token": "bft_another"}))
    assert options.read_token() == "bft_another"
    file.write_text(json.dumps({"url": "http://elsewhere:1", "token": "bft_elsewhere"}))
    assert options.read_token() == ""
    file.write_text("{")
    assert options.read_token() == ""


def test_a_lender_with_a_token_that_is_not_valid_ends_with_the_remedy(scene: Scene) -> None:
    def admit(connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(HTTPStatus.FORBIDDEN, "")

    async def controller(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def whole() -> None:
        async with serve(controller, "127.0.0.1", 0, process_request=admit) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            await LenderLink(scene.lender, f"http://127.0.0.1:{port}", "token").keep()

    with pytest.raises(InputError, match="does not know the token, or the token was revoked or has expired: get anoth"):
        asyncio.run(whole())


def test_a_lender_is_told_the_whole_reason_why_it_is_not_taken() -> None:
    """The end of a websocket has room for 123 bytes of it."""
    user, sent = pwd.getpwuid(os.getuid()), list[str]()
    closed: list[tuple[int, str]] = []

    async def receive() -> str:
        return encode_lending(Offer("somebody-else", 12345, 10))

    async def send(frame: str) -> None:
        sent.append(frame)

    async def close(code: int, reason: str = "") -> None:
        closed.append((code, reason))

    async def accept() -> None:
        return

    lenders = Lenders("bftrainer-x", Accounts({"ännchen" * 10: user.pw_name}, frozenset({"ännchen" * 10})), 20.0)
    headers = {"authorization": "Bearer token"}
    socket: Any = SimpleNamespace(headers=headers, accept=accept, receive_text=receive, send_text=send, close=close)
    row = SimpleNamespace(role="user", owner="ännchen" * 10)
    api: Any = SimpleNamespace(
        store=SimpleNamespace(tokens=SimpleNamespace(check=lambda token, time=None: row)),
        controller=SimpleNamespace(pool=SimpleNamespace(lenders=lenders)),
    )
    asyncio.run(routes.lenders(socket, api))
    (message,) = map(decode_lending, sent)
    assert isinstance(message, OfferRefused)
    assert message.reason.endswith(f"run it as {user.pw_name}, or have users.accounts changed")
    ((code, reason),) = closed
    assert code == REFUSED_CODE
    assert len(reason.encode()) <= 123


def test_pilots_of_another_id_are_found_and_cancelled_by_the_next_lender_of_the_folder(scene: Scene) -> None:
    scene.ask(FINE)
    files = PilotFiles(scene.folder, {}, "/usr/bin/python3")
    ledger = LentLedger(scene.folder)
    ledger.load()
    after = Lender(RULES, files, ledger, scene.jobs, "def")
    with pytest.raises(RefusedByRules, match="pilots of the former one are left"):
        asyncio.run(after.answer(OfferTaken("def", "ann")))
    asyncio.run(after.answer(CancelLent(1, (FINE.pilot,))))
    assert asyncio.run(after.withdraw()) == ""
    assert scene.jobs.cancelled_of == ["abc", "abc"]
    assert ledger.present == 1, "it is listed, so it is not forgotten"


def test_a_list_of_pilots_without_ids_of_controllers_is_read(tmp_path: Path) -> None:
    (tmp_path / "pilots.json").write_text('{"present": {"0123456789abcdef": ["n01", 7, 1.0]}, "ended": []}')
    ledger = LentLedger(tmp_path)
    ledger.load("abc")
    assert ledger.jobs(["0123456789abcdef"]) == {"abc": [7]}


def test_submissions_beyond_the_rate_are_refused() -> None:
    rate = SubmissionRate(60)
    for _ in range(50):
        rate.take(0.0)
    with pytest.raises(RefusedByRules, match="60 pilots a minute"):
        rate.take(0.5)
    rate.take(2.0)


def test_only_pilots_of_the_ledger_are_cancelled(scene: Scene) -> None:
    scene.ask(FINE, CancelLent(2, ("another1", "42", "--user=root", FINE.pilot)))
    assert scene.jobs.cancelled == [(1,)]


def test_secrets_of_pilots_that_never_started_are_removed_and_none_is_left_at_the_end(scene: Scene) -> None:
    other = dataclasses.replace(FINE, request=2, pilot="fedcba9876543210", node="n02")
    scene.ask(FINE, other)
    del scene.jobs.table[FINE.pilot]  # somebody has cancelled it
    asyncio.run(scene.lender.tend())
    assert scene.secrets == [other.pilot]
    asyncio.run(scene.lender.withdraw())
    assert scene.secrets == []
    assert scene.jobs.cancelled == [(2,)]


def test_after_a_refusal_no_secret_stays_and_after_no_answer_it_stays_until_slurm_is_known(scene: Scene) -> None:
    scene.jobs.problem = "sbatch: it failed with exit status 1: Invalid partition"
    assert scene.ask(FINE) == [NotLent(1, scene.jobs.problem, False)]
    assert scene.secrets == []
    scene.jobs.problem = "sbatch: it did not end within 20 s"
    again = dataclasses.replace(FINE, pilot="fedcba9876543210")
    assert scene.ask(again) == [NotLent(1, scene.jobs.problem, True)]
    assert scene.secrets == [again.pilot], "the job may exist and start"


def test_a_lender_that_was_killed_finds_its_pilots_again(scene: Scene) -> None:
    scene.ask(FINE)
    after = made(scene.folder, scene.jobs.table)
    after.ask(CancelLent(1, (FINE.pilot,)))
    assert after.jobs.cancelled == [(1,)]


@pytest.mark.parametrize("answer", ["main scavenger", "scavenger", ""])
def test_a_lender_does_not_start_with_a_partition_that_does_not_exist(tmp_path: Path, answer: str) -> None:
    rules = LendRules(frozenset({"scavenger", "nosuch"}))

    async def ask(words: Any, read: Any) -> Any:
        assert words[0] == "sinfo"
        return read("\n".join(answer.split()))

    jobs = LenderJobs(PilotFiles(tmp_path, {}, "python3"), rules, runner=SimpleNamespace(ask=ask))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="partition nosuch does not exist"):
        asyncio.run(jobs.check_partitions())


def test_a_lender_starts_while_slurm_does_not_answer(tmp_path: Path) -> None:
    async def ask(words: Any, read: Any) -> Any:
        raise SlurmCommandError("sinfo: Unable to contact slurm controller")

    jobs = LenderJobs(PilotFiles(tmp_path, {}, "python3"), RULES, runner=SimpleNamespace(ask=ask))  # type: ignore[arg-type]
    asyncio.run(jobs.check_partitions())


@pytest.mark.waits
def test_the_partitions_are_checked_by_the_real_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "sinfo", "#!/bin/sh\necho scavenger\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    rules = LendRules(frozenset({"nosuch"}))
    options = LenderOptions(tmp_path / "lent", "http://127.0.0.1:1", "token", "", rules, "python3")
    with pytest.raises(InputError, match="partition nosuch does not exist: Slurm has scavenger"):
        asyncio.run(run_lender(options))


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200), st.recursive(st.none(), st.lists).map(json.dumps)))
def test_nonsense_is_a_protocol_error_and_nothing_else(frame: str | bytes) -> None:
    try:
        message = decode_lending(frame)
    except ProtocolError:
        return
    assert decode_lending(encode_lending(message)) == message


def test_an_error_about_a_frame_does_not_show_its_secret() -> None:
    frame = json.loads(encode_lending(FINE)) | {"secret": [SECRET]}
    with pytest.raises(ProtocolError) as error:
        decode_lending(json.dumps(frame))
    assert SECRET not in str(error.value)
    assert SECRET not in repr(FINE)


@pytest.mark.parametrize("owner", ["ann; id", "ann\n", "", "x" * 300, "$(id)", "'"])
def test_an_owner_that_is_no_name_ends_up_in_no_script(tmp_path: Path, owner: str) -> None:
    scene = made(tmp_path / "lent")
    before = (scene.folder / "pilot.sh").read_text()
    with pytest.raises(RefusedByRules):
        scene.ask(OfferTaken("abc", owner))
    assert (scene.folder / "pilot.sh").read_text() == before


def test_a_folder_of_somebody_else_or_a_link_is_refused_and_an_open_one_is_closed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    PilotFiles(tmp_path / "open", {}, "python3").prepare()
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(Exception, match="must be a folder of yours"):
        PilotFiles(tmp_path / "link", {}, "python3").prepare()


@pytest.mark.parametrize(
    "rules",
    [
        {"partitions": frozenset()},
        {"partitions": frozenset({"--wrap=id"})},
        {"most_pilots": 0},
        {"options": ("-x n1; id\n",)},
    ],
    ids=str,
)
def test_rules_that_make_no_sense_are_said_at_once(rules: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        LendRules(**{"partitions": frozenset({"scavenger"}), **rules})


def test_the_unit_runs_the_command_and_has_no_secret() -> None:
    text = unit_text(("/opt/py 3/bin/python", "-m", "bftrainer", "lend", "--option", "--comment=50%"), {"PATH": "/bin"})
    assert 'ExecStart="/opt/py 3/bin/python" "-m" "bftrainer" "lend" "--option" "--comment=50%%"' in text.splitlines()
    assert "Restart=always" in text
    assert "RestartPreventExitStatus=2" in text
    assert "BFTRAINER_TOKEN" not in text
