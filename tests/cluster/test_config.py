from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.config.load import describe, load_config, state_folder
from bftrainer.errors import InputError


def load(tmp_path: Path, text: str | None = None, env: Mapping[str, str] | None = None, **overrides: Any) -> Any:
    path = None
    if text is not None:
        path = tmp_path / "bf.toml"
        path.write_text(text)
    around = {"HOME": str(tmp_path), **(env or {})}
    return load_config(path, around, {key.replace("__", "."): value for key, value in overrides.items()})


def test_without_anything_the_defaults_hold(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.server.host, config.server.port) == ("auto", 8765)
    assert config.policy.horizon_s == 120
    assert config.pool.kind == "local"
    assert config.state == tmp_path / ".local/state/bftrainer"


def test_the_command_line_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    text = "[server]\nport = 1\n[agents]\nbeat_s = 2\nsilence_s = 20\n"
    env = {"BFTRAINER_SERVER__PORT": "2", "BFTRAINER_AGENTS__BEAT_S": "3.5"}
    config = load(tmp_path, text, env, server__port="4", server__host=None)
    assert (config.server.port, config.agents.beat_s, config.agents.silence_s) == (4, 3.5, 20.0)
    sources = {row.key: row.source for row in describe(config)}
    assert sources["server.port"] == "command line"
    assert sources["agents.beat_s"] == "$BFTRAINER_AGENTS__BEAT_S"
    assert sources["agents.silence_s"] == str(tmp_path / "bf.toml")
    assert sources["server.host"] == "default"


def test_auto_is_none_for_the_scheduler_and_auto_for_people(tmp_path: Path) -> None:
    config = load(tmp_path, '[policy]\nhorizon_s = "auto"\n', {"BFTRAINER_POLICY__MAX_PARALLEL": "auto"})
    assert (config.policy.horizon_s, config.policy.max_parallel) == (None, None)
    assert {row.value for row in describe(config) if row.key.startswith("policy.h")} == {"auto"}


def test_a_placement_in_a_file_is_a_word_or_a_path_beside_it(tmp_path: Path) -> None:
    (tmp_path / "t.conf").write_text("SwitchName=a Nodes=n1\n")
    for word, taken in (("stable", "stable"), ("compact", "compact"), ("t.conf", str(tmp_path / "t.conf"))):
        assert load(tmp_path, f'[policy]\nplacement = "{word}"\n').policy.placement == taken


def test_what_a_pool_needs_is_passed_on(tmp_path: Path) -> None:
    env = {"BFTRAINER_POOL__NODES": "8", "BFTRAINER_POOL__CHURN": "summit"}
    config = load(tmp_path, '[pool]\nkind = "script"\ncommand = ["idle", "-h"]\n', env)
    assert config.pool.kind == "script"
    assert dict(config.pool.settings) == {"command": ["idle", "-h"], "nodes": 8, "churn": "summit"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sever]\nport = 1", "unknown section 'sever': did you mean 'server'?"),
        ("[server]\nprot = 1", "unknown key in [server] 'prot': did you mean 'port'?"),
        ('[server]\nport = "http"', "server.port must be a port from 0 to 65535, but got 'http'"),
        ("[server]\nport = 70000", "server.port must be a port from 0 to 65535, but got 70000"),
        ("[server]\nport = true", "server.port must be a port"),
        ("[policy]\nhorizon_s = -1", "policy.horizon_s must be a number of seconds above 0, or auto, but got -1"),
        ('[policy]\nallocator = "exakt"', "policy.allocator must be one of exact, milp, milp-nodes, equal"),
        (
            '[policy]\nplacement = "nowhere"',
            "policy.placement must be stable, compact or the path of a Slurm topology.conf",
        ),
        ("[agents]\nbeat_s = nan", "agents.beat_s must be a number of seconds above 0, but got nan"),
        ("[pool]\nkind = 3", "pool.kind must be the name of a pool"),
        ("port = 1", "port must be in a section: put it below [server]"),
        ("[server", "must be TOML"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "bf.toml"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BFTRAINER_SERVER__PORT", "many", "$BFTRAINER_SERVER__PORT: server.port must be a port"),
        ("BFTRAINER_SEVER__PORT", "1", "$BFTRAINER_SEVER__PORT: unknown section 'sever'"),
        ("BFTRAINER_SERVER__PRT", "1", "$BFTRAINER_SERVER__PRT: unknown key in [server] 'prt'"),
        ("BFTRAINER_CONFIG", "nowhere.toml", "nowhere.toml: No such file"),
        ("BFTRAINER_STATE", "a\nb", "must be the path of a folder"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, name: str, value: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, env={name: value})
    assert said in str(caught.value)


def test_the_file_of_the_state_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.toml").write_text("[server]\nport = 99\n")
    assert load(tmp_path, env={"BFTRAINER_STATE": str(tmp_path / "s")}).server.port == 99
    assert load(tmp_path, server__state=tmp_path / "s").server.port == 99


def test_a_state_folder_does_not_point_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "bftrainer").mkdir()
    (tmp_path / "bftrainer" / "config.toml").write_text('[server]\nstate = "/elsewhere"\n')
    with pytest.raises(InputError, match="config.toml: server.state must be .*, but got '/elsewhere'"):
        load_config(None, {"XDG_STATE_HOME": str(tmp_path)})


def test_a_path_in_a_file_starts_at_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, '[server]\nstate = "here"\n').state == tmp_path / "here"


def test_the_state_folder_is_the_option_the_variable_or_the_default(tmp_path: Path) -> None:
    env = {"BFTRAINER_STATE": "/v", "XDG_STATE_HOME": "/x", "HOME": "/h"}
    assert state_folder(env, "/o") == Path("/o")
    assert state_folder(env) == Path("/v")
    assert state_folder({"XDG_STATE_HOME": "/x", "HOME": "/h"}) == Path("/x/bftrainer")
    assert state_folder({"HOME": "/h"}) == Path("/h/.local/state/bftrainer")


def test_every_key_is_described(tmp_path: Path) -> None:
    rows = describe(load(tmp_path))
    assert len({row.key for row in rows}) == len(rows) > 20
    assert all(row.doc for row in rows)
