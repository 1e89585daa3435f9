"""Setting of the experiments: the machine, the workloads and the values that sweeps go through.

`bftrainer paper` makes one `Setting` from its options. Every experiment reads it, and every replay loads its inputs
through it. With a folder of published data the trace is Summit's; without one it is synthetic, and all results say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bftrainer.core.curve import Curve
from bftrainer.core.models import PAPER_CURVES
from bftrainer.core.trace import Trace, Window
from bftrainer.core.trainer import Trainer
from bftrainer.errors import InputError
from bftrainer.simulate.workload import find_curve, load_workload
from bftrainer.traces.files import load_trace
from bftrainer.traces.synthetic.synth import DEFAULT_START, synthesise
from bftrainer.traces.times import parse_time
from bftrainer.util.provenance import file_hash

TRACE, HPO, DIVERSE, CURVES = "fragments.parquet", "hpo-shufflenet-1000.csv", "diverse-1001.csv", "curves.json"
PAPER_START = parse_time("2021-02-10T20:21:15", UTC, "the start of the paper's window")
SYNTHETIC_HOURS = 336.0
SAMPLES = 130e6
"""100 epochs of ImageNet, the work of every trainer in the paper."""
UP_S, DOWN_S, SUBMIT_EVERY_S = 18.0, 12.0, 36.0


@dataclass(frozen=True, slots=True)
class Setting:
    """The paper's setup by default; tests use a small one."""

    data: Path | None = None
    """A folder with the published trace and workloads; None: a synthetic Summit."""
    nodes: int = 1024
    hours: float | None = None
    """Length of the trace used; None: all there is, or two weeks if it is synthetic."""
    seed: int = 1
    machine_nodes: int | None = None
    """Size of a synthetic whole machine; None: the real one's."""
    trials: int | None = None
    """Trainers of each workload; None: all of its file, or 1000 and 1001."""
    samples: float = SAMPLES
    """Work of a trainer in the synthetic workloads."""
    horizon_s: float = 120.0
    max_parallel: int = 10
    horizons_s: tuple[float, ...] = (10.0, 20.0, 30.0, 60.0, 90.0, 120.0, 170.0, 300.0, 600.0)
    diverse_horizons_s: tuple[float, ...] = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
    max_parallels: tuple[int, ...] = (5, 10, 15, 20, 25, 30, 35)
    cost_factors: tuple[float, ...] = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    scalability_hours: float = 60.0
    solve_sizes: tuple[tuple[int, int], ...] = tuple(
        (trainers, nodes) for trainers in (5, 10, 20, 35) for nodes in (50, 100, 200, 400, 800)
    )
    """Trainers and nodes of the problems whose solution is timed."""
    solve_repetitions: int = 2
    solve_limit_s: float = 10.0

    @property
    def synthetic(self) -> bool:
        """Whether the trace is synthetic."""
        return self.data is None

    def check(self) -> None:
        """Refuse a data folder that lacks a file, before any work is done."""
        if self.data is None:
            return
        if not self.data.is_dir():
            raise InputError(f"{self.data}: is not a folder; --data must name the one with {TRACE}")
        missing = [name for name in (TRACE, HPO, DIVERSE) if not (self.data / name).is_file()]
        if missing:
            raise InputError(f"{self.data}: has no {missing[0]}; --data must name a folder with it")

    def inputs(self) -> dict[str, str]:
        """The SHA-256 of each input file."""
        if self.data is None:
            return {}
        names = (TRACE, "nodes.txt", HPO, DIVERSE, CURVES)
        return {name: file_hash(self.data / name) for name in names if (self.data / name).is_file()}

    def identity(self) -> dict[str, Any]:
        """Inputs that a replay's result depends on, apart from the run itself: the trace and the workloads."""
        made_up = {"seed": self.seed, "samples": self.samples} if self.synthetic else {}
        return {"inputs": self.inputs(), "nodes": self.nodes, "hours": self.hours, "trials": self.trials, **made_up}

    def describe(self) -> str:
        """The setting in one line, for figures and pages."""
        if self.synthetic:
            hours = self.hours or SYNTHETIC_HOURS
            return f"SYNTHETIC Summit trace, {self.nodes:,} nodes, {hours:g} h, seed {self.seed}"
        return f"Summit log from 2021-02-10T20:21:15, first {self.nodes:,} nodes"

    def machine(self) -> Trace:
        """The whole machine in the window."""
        return _machine(self.data, self.machine_nodes, self.hours, self.seed)

    def trace(self) -> Trace:
        """The part of the machine that is replayed."""
        return _part(self.data, self.nodes, self.hours, self.seed)

    def workload(self, name: str) -> tuple[Trainer, ...]:
        """`hpo`, `diverse`, or `hpo:MODEL`, the trials of `hpo` with another model."""
        kind, _, model = name.partition(":")
        trainers = _workload(self.data, kind, self.samples)[: self.trials]
        if not model:
            return trainers
        curve = self.curves()[model]
        return tuple(replace(trainer, curve=curve, model=model) for trainer in trainers)

    def curves(self) -> dict[str, Curve]:
        """The seven models' curves by the paper's names: measured ones where the data has them."""
        if self.data is None:
            return dict(PAPER_CURVES)
        found = {paper_name(t.model): t.curve for t in _workload(self.data, "diverse", self.samples)}
        return {name: found.get(name, curve) for name, curve in PAPER_CURVES.items()}


def paper_name(model: str) -> str:
    """The name of a model in the paper's tables; any other model keeps its name."""
    try:
        curve = find_curve(model)
    except InputError:
        return model
    return next(name for name, known in PAPER_CURVES.items() if known is curve)


@lru_cache(maxsize=2)
def _machine(data: Path | None, nodes: int | None, hours: float | None, seed: int) -> Trace:
    if data is None:
        return synthesise("summit", nodes=nodes, hours=hours or SYNTHETIC_HOURS, seed=seed)
    trace = load_trace(data / TRACE)
    end = trace.window.end if hours is None else min(trace.window.end, PAPER_START + hours * 3600)
    return trace.clip(Window(max(trace.window.start, PAPER_START), end))


@lru_cache(maxsize=2)
def _part(data: Path | None, nodes: int, hours: float | None, seed: int) -> Trace:
    if data is None:
        return synthesise("summit", nodes=nodes, hours=hours or SYNTHETIC_HOURS, seed=seed)
    whole = _machine(data, None, hours, seed)
    if nodes > len(whole.nodes):
        raise InputError(f"{data / TRACE}: has {len(whole.nodes)} nodes, but {nodes} are needed")
    return whole.select(whole.nodes[:nodes])


@lru_cache(maxsize=4)
def _workload(data: Path | None, kind: str, samples: float) -> tuple[Trainer, ...]:
    if data is not None:
        return load_workload(data / (HPO if kind == "hpo" else DIVERSE)).trainers
    if kind == "hpo":
        return _made_up(["ShuffleNet"], 1000, samples)
    return _made_up(list(PAPER_CURVES), 1001, samples)


def _made_up(models: Sequence[str], count: int, samples: float) -> tuple[Trainer, ...]:
    """Trainers like those of the published files, cycling through `models`."""
    return tuple(
        Trainer(
            name=f"J{i:05d}-{model}",
            curve=PAPER_CURVES[model],
            up_s=UP_S,
            down_s=DOWN_S,
            work=samples,
            submit=DEFAULT_START + i * SUBMIT_EVERY_S,
            model=model,
        )
        for i, model in enumerate(islice(cycle(models), count))
    )
