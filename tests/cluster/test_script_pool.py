"""The pool that asks an executable: what it lists, how it fails, and what is started."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bftrainer.cluster.pools.keeper import fingerprint
from bftrainer.cluster.pools.script.discovery import MOST_LINES, DiscoveryError, ask, read_nodes
from bftrainer.cluster.pools.script.pool import ScriptPool
from bftrainer.errors import InputError
from bftrainer.processes import variables
from support.cluster.fake_pool_host import FakePoolHost, processes_of
from support.cluster.made_pools import STUB, executable, script, settings_of
from support.waiting import until

pytestmark = pytest.mark.waits


def test_what_is_no_longer_listed_leaves_and_what_is_listed_anew_comes(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        setting = settings_of("script", tmp_path)
        async with FakePoolHost() as host, setting.opened(host):
            (tmp_path / "hosts.new").write_text("second\nthird\n")
            (tmp_path / "hosts.new").replace(tmp_path / "hosts")
            await until(lambda: host.here == {"second", "third"}, lambda: host.said)
        return host

    host = asyncio.run(play())
    assert ("leaving", "first", "0.0") in host.said
    assert host.joins.count("second") == 1


def test_a_controller_whose_trainers_run_as_their_owners_is_refused(tmp_path: Path) -> None:
    async def play() -> None:
        async with FakePoolHost() as host:
            host.own_users = True
            with pytest.raises(InputError, match="the script pool cannot start agents as their owners"):
                await script(tmp_path).open(host)

    asyncio.run(play())


def test_the_last_list_is_kept_while_the_script_fails(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        setting = settings_of("script", tmp_path)
        async with FakePoolHost() as host, setting.opened(host) as pool:
            executable(tmp_path / "discover", "#!/bin/sh\necho no licence >&2\nexit 3\n")
            await until(lambda: "script_failed" in host.words("note"))
            assert host.here == set(setting.nodes)
            assert "no licence" in pool.describe()["problem"]
            executable(tmp_path / "discover", f"#!/bin/sh\ncat '{tmp_path}/hosts'\n")
            await until(lambda: "script_works" in host.words("note"))
        return host

    host = asyncio.run(play())
    assert not host.words("leaving")
    problem = next(said[2] for said in host.said if said[:2] == ("note", "script_failed"))
    assert problem == "it failed with exit status 3: no licence"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sleep 600 & sleep 600", "did not end within 0.5 s"),
        ("sleep 600 & exit 0", "did not end within 0.5 s"),
        ("kill -9 $$", "signal 9"),
        ("yes '#' ", "prints more than 16 MiB"),
        ("yes n | head -200000", "more than 100000 lines"),
        ("printf 'a\\nb\\033[1m\\n'", "line 2 must be NAME or NAME:SLOTS"),
        ("printf '\\377\\376'", "not text"),
        ("exec /no/such/program", "exit status 127: .*not found"),
    ],
)
def test_a_script_that_misbehaves_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, body: str, message: str
) -> None:
    path = executable(tmp_path / "discover", f"#!/bin/sh\n# {tmp_path}\n{body}\n")

    async def play() -> None:
        with pytest.raises(DiscoveryError, match=message):
            await ask([path], 0.5 if "did not end" in message else 30.0)
        await until(lambda: not processes_of("no secret", tmp_path))

    asyncio.run(play())


def test_a_script_that_floods_stderr_is_read_all_the_same(tmp_path: Path) -> None:
    path = executable(tmp_path / "discover", "#!/bin/sh\nhead -c 3000000 /dev/zero >&2\necho node-1\n")
    assert asyncio.run(ask([path], 30.0)) == {"node-1": 0}


def test_a_slow_script_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    path = executable(tmp_path / "discover", "#!/bin/sh\nread line < " + str(tmp_path / "gate") + "\necho node-1\n")
    os.mkfifo(tmp_path / "gate")

    async def play() -> dict[str, int]:
        asked = asyncio.create_task(ask([path], 30.0))
        await asyncio.to_thread((tmp_path / "gate").write_text, "go\n")  # this waits until the script reads
        return await asked

    assert asyncio.run(play()) == {"node-1": 0}


def test_names_slots_comments_and_repetitions_are_read() -> None:
    text = b"# idle now\n\n a1 \nb2:4\nc3:0\nd-4.example.org # rack 7\r\na1\ne5:256\n"
    assert list(read_nodes(text).items()) == [("a1", 0), ("b2", 4), ("d-4.example.org", 0), ("e5", 256)]
    assert read_nodes(b"") == {}


@pytest.mark.parametrize("slots", ["257", "999999999"])
def test_more_slots_than_a_node_may_have_ranks_are_refused(slots: str) -> None:
    with pytest.raises(DiscoveryError, match=f"line 2: SLOTS must be a whole number from 1 to 256, but got {slots}"):
        read_nodes(f"fine\nb2:{slots}\n".encode())


def test_slots_reach_the_agent_also_by_the_next_controller_when_the_script_fails(tmp_path: Path) -> None:
    async def play() -> tuple[FakePoolHost, FakePoolHost]:
        async with FakePoolHost() as host:
            pool = script(tmp_path)
            await pool.open(host)
            await until(lambda: host.here == {"first", "second"})
            await pool.close(drain=True)
            # Of another controller this list is all that is known: its script does not work yet.
            stored = json.loads(host.memory["script.state"])
            host.remember("script.state", {**stored, "commands": {}})
        executable(tmp_path / "discover", "#!/bin/sh\nexit 3\n")
        async with FakePoolHost(follows=host) as later:
            failing = ScriptPool(replace(pool.settings, reattach_s=0), tmp_path)
            await failing.open(later)
            await until(lambda: later.here == {"first", "second"}, lambda: later.said)
            await failing.close(drain=True)
        return host, later

    first, second = asyncio.run(play())
    assert first.slots == second.slots == {"first": 0, "second": 4}


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "../a", "a:x", "a:-1", "é", "x" * 254, ".", "a\0"])
def test_names_that_no_node_has_are_refused(name: str) -> None:
    with pytest.raises(DiscoveryError, match="line 2 must be NAME or NAME:SLOTS"):
        read_nodes(f"fine\n{name}\n".encode())


def test_too_many_lines_are_refused() -> None:
    with pytest.raises(DiscoveryError, match="more than 100000 lines"):
        read_nodes(b"\n" * MOST_LINES)


def test_excluded_nodes_are_not_used_and_no_more_than_the_most(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\nc\nd\n")

    async def play() -> FakePoolHost:
        async with FakePoolHost(observing=True) as host:
            pool = script(tmp_path, exclude=("a",), max_nodes=2)
            await pool.open(host)
            await until(lambda: len(host.words("available")) == 2)
            (tmp_path / "hosts.new").write_text("a\nb\n")
            (tmp_path / "hosts.new").replace(tmp_path / "hosts")
            await until(lambda: host.words("gone") == ["c"])
            await pool.close(drain=False)
            return host

    assert asyncio.run(play()).words("available") == ["b", "c"]


def test_an_agent_that_is_here_without_its_command_is_not_started_again(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        async with FakePoolHost() as host:
            env = {**os.environ, **host.agent_environment, variables.NODE: "first"}
            with subprocess.Popen([sys.executable, STUB], env=env) as agent:
                await until(lambda: host.here == {"first"})
                pool = script(tmp_path)
                await pool.open(host)
                await until(lambda: host.here == {"first", "second"})
                (tmp_path / "hosts.new").write_text("second\n")
                (tmp_path / "hosts.new").replace(tmp_path / "hosts")
                await until(lambda: agent.poll() is not None, lambda: host.said)
                await pool.close(drain=True)
            return host

    host = asyncio.run(play())
    assert sorted(host.joins) == ["first", "second"]


def test_a_node_being_started_when_the_controller_was_killed_is_waited_for(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        async with FakePoolHost() as host:
            mark = fingerprint(sorted(host.agent_environment.items()))
            host.remember("script.state", {"listed": ["first"], "commands": {"first": [0, ""]}, "agents": mark})
            pool = script(tmp_path, reattach_s=3600.0)
            await pool.open(host)
            await until(lambda: host.here == {"second"})
            looks = host.looks
            await until(lambda: host.looks > looks + 2)
            await pool.close(drain=True)
            return host

    assert asyncio.run(play()).joins == ["second"]


def test_commands_outlive_a_killed_controller_and_are_found_again(tmp_path: Path) -> None:
    program = f"""
import asyncio, json, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from support.cluster.made_pools import script
from support.cluster.fake_pool_host import FakePoolHost
from support.waiting import until
async def main():
    async with FakePoolHost() as host:
        await script(Path({str(tmp_path)!r})).open(host)
        await until(lambda: len(host.here) == 2)
        print(json.dumps([host.secret, host.port, host.memory, host.pids]), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        secret, port, memory, pids = json.loads(controller.stdout.readline())
        controller.kill()

    async def play() -> None:
        before = SimpleNamespace(secret=secret, port=port, memory=memory)
        async with FakePoolHost(follows=before) as host:
            async with settings_of("script", tmp_path).opened(host) as pool:
                assert host.pids == pids
                assert pool.describe()["running"] == 2
                os.kill(pids["first"], signal.SIGKILL)  # it is noticed, though it is nobody's child here
                await until(lambda: "first" in host.words("gone"))
            await until(lambda: not processes_of(secret, tmp_path))

    asyncio.run(play())


def test_agents_that_look_for_the_controller_elsewhere_are_replaced_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        async with FakePoolHost() as before, settings_of("script", tmp_path).opened(before, drain=False):
            pass
        async with FakePoolHost() as after:
            after.memory = before.memory
            async with settings_of("script", tmp_path).opened(after):
                assert not set(before.pids.values()) & set(after.pids.values())
        await until(lambda: not processes_of(before.secret, tmp_path))

    asyncio.run(play())


def test_a_start_command_that_fails_is_tried_again_later(tmp_path: Path) -> None:
    async def play() -> FakePoolHost:
        async with FakePoolHost() as host:
            pool = script(tmp_path, start=("/bin/sh", "-c", "exit 7", "{node}"), max_nodes=1)
            await pool.open(host)
            await until(lambda: len(host.words("gone")) >= 2)
            await pool.close(drain=True)
            return host

    assert ("gone", "first", "its start command ended with status 7") in asyncio.run(play()).said


def test_a_program_that_does_not_exist_is_said_at_once(tmp_path: Path) -> None:
    async def play(pool: ScriptPool) -> None:
        async with FakePoolHost() as host:
            await pool.open(host)

    with pytest.raises(InputError, match="`command`: there is no program /no/such"):
        asyncio.run(play(script(tmp_path, command=("/no/such",))))
    with pytest.raises(InputError, match="`start`: there is no program no-such-rsh"):
        asyncio.run(play(script(tmp_path, start=("no-such-rsh", "{node}"))))


# The examples of docs/pools.md.

FAKES = {
    "bslots": "#!/bin/sh\nprintf 'SLOTS: 94\\nRUNTIME: UNLIMITED\\nHOSTS: 42*h1 10*h2\\n       42*h3\\n'\n",
    "bjobs": "#!/bin/sh\nprintf '42*h7\\n42*h8\\n'\n",
    "bsub": '#!/bin/sh\nprintf "%s\\n" "$@" "secret=$BFTRAINER_SECRET"\n',
    "qselect": "#!/bin/sh\nprintf '7.pbs\\n'\n",
    "pbsnodes": """#!/bin/sh
echo '{"nodes": {"n1": {"state": "free"}, "n2": {"state": "job-busy", "jobs": ["7.pbs", "7.pbs"]},
"n3": {"state": "job-busy", "jobs": ["8.pbs"]}, "n4": {"state": "offline"}, "n5": {"state": "free", "resv": "R1"}}}'
""",
    "qsub": '#!/bin/sh\nprintf "%s\\n" "$@"\n',
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples of the page, and batch systems that answer."""
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        executable(tmp_path / "bin" / name, text)
    page = (Path(__file__).resolve().parents[2] / "docs" / "pools.md").read_text()
    for text in re.findall(r"```(?:sh|python)\n(#!.*?)```", page, re.DOTALL):
        executable(tmp_path / text.splitlines()[1][2:].partition(":")[0], text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv(variables.URL, "http://127.0.0.1:1")
    monkeypatch.setenv(variables.SECRET, "hush")
    return tmp_path


def test_the_lsf_example_lists_idle_hosts_and_our_own(site: Path) -> None:
    assert tuple(asyncio.run(ask([str(site / "lsf-nodes")], 30.0))) == ("h1", "h3", "h7", "h8")


def test_the_lsf_example_knows_a_full_machine_from_a_failure(site: Path) -> None:
    executable(site / "bin" / "bslots", "#!/bin/sh\necho 'No backfill window exists at this time' >&2\nexit 255\n")
    assert tuple(asyncio.run(ask([str(site / "lsf-nodes")], 30.0))) == ("h7", "h8")
    executable(site / "bin" / "bslots", "#!/bin/sh\necho 'LSF is down' >&2\nexit 255\n")
    with pytest.raises(DiscoveryError, match="LSF is down"):
        asyncio.run(ask([str(site / "lsf-nodes")], 30.0))


def test_the_pbs_example_lists_idle_nodes_and_our_own(site: Path) -> None:
    assert tuple(asyncio.run(ask([str(site / "pbs-nodes")], 30.0))) == ("n1", "n2")
    executable(site / "bin" / "pbsnodes", "#!/bin/sh\nexit 1\n")
    with pytest.raises(DiscoveryError, match="exit status 1"):
        asyncio.run(ask([str(site / "pbs-nodes")], 30.0))


@pytest.mark.parametrize("name", ["lsf-start", "pbs-start"])
def test_the_examples_hand_the_node_over_and_keep_the_secret(site: Path, name: str) -> None:
    said = subprocess.run([site / name, "n1"], check=True, capture_output=True, text=True).stdout
    assert "\n--node\nn1\n" in said
    assert "hush" not in said
