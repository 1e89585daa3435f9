"""What scripts import is kept by script and interpreter, within bounds, and agents are told of it once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bftrainer.cluster.agent.compile_caches import add_caches, machine_kind
from bftrainer.cluster.controller.start_up.preloads import Preloads
from bftrainer.cluster.controller.start_up.preparing import MOST_AHEAD, Preparer
from bftrainer.cluster.launchers.base import Launch, StateLayout
from bftrainer.cluster.retention.compiled import RECENT_S, trim_compiled
from bftrainer.cluster.spec.trainer import TrainerSpec, parse_spec
from bftrainer.cluster.store.scripts.preloads import MOST_BYTES, MOST_SCRIPTS, ScriptImports
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.cluster.wire.messages import Prepare
from bftrainer.elastic.protocol import FirstStep, PreloadRefused
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.processes.gpus import GpuDevice
from support.cluster.bench import Bench

SPEC = TrainerSpec(script="/home/ann/train.py", submitted_python="/venv/bin/python")
FIRST = FirstStep({"imports": 9.0}, {"transformers": 8.0, "datasets": 1.0})


def test_what_was_learned_outlives_the_controller_and_holds_for_one_script_and_interpreter(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        Preloads(store).learn(SPEC, FIRST, 1.0)
    with Store.open(tmp_path / FILE) as store:
        preloads = Preloads(store)
        assert preloads.of(SPEC) == ("transformers", "datasets")
        assert preloads.of(SPEC.model_copy(update={"args": ("--epochs", "3")})) == ("transformers", "datasets")
        assert preloads.of(SPEC.model_copy(update={"script": "/home/ann/other.py"})) == ()
        assert preloads.of(SPEC.model_copy(update={"submitted_python": "/other/bin/python"})) == ()


def test_a_worker_adds_what_was_not_imported_ahead_if_it_is_worth_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        preloads = Preloads(store)
        preloads.learn(SPEC, FIRST, 1.0)
        preloads.learn(SPEC, FirstStep({}, {"tiny": 0.01}), 2.0)
        assert preloads.of(SPEC) == ("transformers", "datasets")
        preloads.learn(SPEC, FirstStep({}, {"pandas": 0.9, "datasets": 2.0}), 3.0)
        assert preloads.of(SPEC) == ("transformers", "datasets", "pandas")


def test_the_users_own_modules_come_first_and_refused_ones_are_left_out(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"preload": ("models", "transformers")})
    with Store.open(tmp_path / FILE) as store:
        preloads = Preloads(store)
        preloads.learn(spec, FIRST, 1.0)
        assert preloads.of(spec) == ("models", "transformers", "datasets")
        preloads.refused(spec, PreloadRefused("HF_HUB_OFFLINE", ("transformers",)), 2.0)
        assert preloads.of(spec) == ("models", "datasets")
        preloads.learn(spec, FirstStep({}, {"transformers": 8.0}), 3.0)
        assert preloads.of(spec) == ("models", "datasets")


def test_scripts_and_modules_are_bounded(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        for number in range(MOST_SCRIPTS + 5):
            store.preloads.put((f"script-{number}", ""), ScriptImports({"m": 1.0}), float(number))
        known = store.preloads.all()
        assert len(known) == MOST_SCRIPTS
        assert ("script-4", "") not in known
        preloads = Preloads(store)
        preloads.learn(SPEC, FirstStep({}, {f"module_{n}": 1.0 + n for n in range(5000)}), 1e6)
        kept = store.preloads.all()[SPEC.identity].modules
        assert "module_4999" in kept
        assert sum(len(name) + 8 for name in kept) < MOST_BYTES


def test_agents_are_told_once_what_to_import_ahead_for_unfinished_trainers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.join("n1", "n2")
    trainer = bench.submit("1-1")
    cluster = bench.cluster
    preparer = Preparer(cluster.jobs.preloads)
    assert preparer.prepare(cluster.nodes, cluster.trainers).messages == []
    cluster.jobs.preloads.learn(cluster.trainers[trainer].spec, FIRST, 1.0)
    told = preparer.prepare(cluster.nodes, cluster.trainers).messages
    assert {node for node, _ in told} == {"n1", "n2"}
    messages = [message for _, message in told]
    assert all(isinstance(message, Prepare) and message.preload == tuple(FIRST.modules) for message in messages)
    assert preparer.prepare(cluster.nodes, cluster.trainers).messages == []
    bench.join("n3")
    assert [node for node, _ in preparer.prepare(cluster.nodes, cluster.trainers).messages] == ["n3"]
    assert MOST_AHEAD == 2


def test_a_worker_is_started_with_what_its_script_imports(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.join("n1")
    trainer = bench.submit("1-2")
    assert bench.started[-1].preload == ()
    bench.cluster.jobs.preloads.learn(bench.cluster.trainers[trainer].spec, FIRST, 1.0)
    bench.join("n2")
    bench.pass_time(60)
    assert bench.started[-1].preload == tuple(FIRST.modules)


def test_modules_to_preload_are_named_in_a_list_or_with_commas() -> None:
    assert parse_spec({"script": "a.py", "preload": "models, utils.data"}).preload == ("models", "utils.data")
    assert parse_spec({"script": "a.py", "preload": ["models"]}).preload == ("models",)
    assert "preload" not in parse_spec({"script": "a.py"}).as_json()
    for wrong in ("a b", "", 7, ["x", 1], "models.py/"):
        with pytest.raises(InputError, match="preload must be names of modules"):
            parse_spec({"script": "a.py", "preload": wrong})


def test_the_caches_of_compilers_are_by_script_and_machine_unless_somebody_named_others(tmp_path: Path) -> None:
    layout = StateLayout(tmp_path, "id")
    same, other = (layout.environment(Launch("t1", "a", spec)) for spec in (SPEC, TrainerSpec(script="/b.py")))
    assert Path(same[variables.COMPILED]).parent == tmp_path / "compiled"
    assert same[variables.COMPILED] != other[variables.COMPILED]
    environment = {variables.COMPILED: same[variables.COMPILED], "TRITON_CACHE_DIR": "/fast"}
    add_caches(environment, "kind")
    assert environment["TRITON_CACHE_DIR"] == "/fast"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == f"{same[variables.COMPILED]}/kind/inductor"
    without: dict[str, str] = {}
    add_caches(without, "kind")
    assert without == {}


def test_machines_share_caches_only_if_their_processors_and_gpus_are_alike(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("flags : sse avx\ncpu MHz : 1000\n")
    second.write_text("flags : sse\ncpu MHz : 1000\n")
    gpus = (GpuDevice("0", "cuda", "H200"),)
    assert machine_kind(gpus, first) == machine_kind(gpus, first)
    kinds = {machine_kind(gpus, first), machine_kind((), first), machine_kind(gpus, second)}
    assert len(kinds) == 3


def test_the_oldest_caches_go_first_and_recent_ones_stay(tmp_path: Path) -> None:
    for name, age_s in (("old", 3 * RECENT_S), ("older", 4 * RECENT_S), ("recent", 0.0)):
        file = tmp_path / name / "kind" / "inductor" / "code"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 100)
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    assert trim_compiled(tmp_path, 250, now=1e9) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "recent"]
    assert trim_compiled(tmp_path, 0, now=1e9) == 100
    assert [path.name for path in tmp_path.iterdir()] == ["recent"]
    assert trim_compiled(tmp_path / "missing", 0, now=1e9) == 0
