"""Decision: which way makes a script elastic. Puts its explanation together.

The order of the questions matters. A script that uses bftrainer already is one, whatever else it does, and the
distributed code of a framework says nothing about the script.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from bftrainer.errors import InputError
from bftrainer.explain.edits import Edits
from bftrainer.explain.lines import WAYS
from bftrainer.explain.places import evidence, notice
from bftrainer.explain.reading.finding import read_files
from bftrainer.explain.reading.program import Program
from bftrainer.explain.report import Evidence, Explanation, Notice
from bftrainer.explain.training.loops import Training, backward_calls, find_training, step_calls
from bftrainer.explain.ways import distributed, frameworks, in_place, lightning, other, plain, written


def explain(words: Sequence[str], folder: Path, nodes: str = "1-4") -> Explanation:
    """Explain the script of a command line: `SCRIPT [ARGS]` or `-m MODULE [ARGS]`, seen from a folder.

    The script and the local modules it imports are read, and none of them is run or imported. `nodes` is what the
    command to submit the script says. Raises `InputError` for a script that cannot be read.
    """
    files, notices = read_files(words, folder)
    try:
        return _Explainer(Program(files), words, nodes).explain(notices)
    except RecursionError:
        raise InputError(f"{files[0].name}: is nested too deeply to be read") from None


def kept_values(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the names of a script's variables that keep plain values from epoch to epoch.

    Raises `InputError` if the script cannot be read, or its training loop is not found.
    """
    files, _ = read_files(words, folder)
    program = Program(files)
    training = find_training(program)
    if training is None:
        raise InputError(f"{files[0].name}: no training loop was found")
    return tuple(value.name for value in in_place.kept_in_epochs(program, training))


def what_keeps_from_place(words: Sequence[str], folder: Path, *, fewer_ranks: bool = False) -> Notice | None:
    """Return the first line for which the ddp launcher cannot run a script; None if none was found.

    `fewer_ranks`: there may be fewer ranks than the script sees, so that its batches come in parts. A script that
    cannot be read, or whose training loop is not found, may still be one that it can run.
    """
    try:
        files, _ = read_files(words, folder)
        program = Program(files)
        training = find_training(program)
        refused = distributed.refusals(program)
        if training is not None and training.batch is not None:
            refused += in_place.in_place_refusals(program, training)
            refused += in_place.accumulation_in_parts(program, training) if fewer_ranks else []
    except (InputError, RecursionError):
        return None
    return refused[0] if refused else None


class _Explainer:
    def __init__(self, program: Program, words: Sequence[str], nodes: str) -> None:
        self._program = program
        self._words = words
        self._nodes = nodes
        self._edits = Edits()

    def explain(self, notices: Iterable[Notice]) -> Explanation:
        way, shown, more = self._way()
        launcher = ["--launcher", WAYS[way].launcher] if WAYS[way].launcher else []
        command = (
            ""
            if way == "none"
            else shlex.join(["bftrainer", "submit", *launcher, "--nodes", self._nodes, *self._words])
        )
        return Explanation(
            self._program.files[0].name,
            way,
            command,
            tuple(sorted(shown, key=lambda one: (one.file, one.line))),
            self._edits.changes(),
            tuple(dict.fromkeys([*notices, *more, *map(_left_out, self._edits.left_out())])),
            self._edits.diff(),
        )

    def _way(self) -> tuple[str, list[Evidence], list[Notice]]:
        program, edits = self._program, self._edits
        training = find_training(program)
        if shown := written.elastic_evidence(program):
            return "elastic", shown, list(written.explain_written(program, training))
        if calls := lightning.lightning_calls(program):
            shown = [evidence(program, call, "makes a Lightning Trainer") for call in calls]
            return self._framework("lightning", shown, list(lightning.explain_lightning(program, calls, edits)))
        if calls := frameworks.trainer_calls(program):
            shown = [evidence(program, call, "makes a Hugging Face Trainer") for call in calls]
            return self._framework("transformers", shown, list(frameworks.explain_transformers(program, edits)))
        if calls := frameworks.accelerator_calls(program):
            shown = [evidence(program, call, "makes an Accelerator") for call in calls]
            return self._framework("accelerate", shown, list(frameworks.explain_accelerate(program, training, edits)))
        if shown := distributed.distributed_evidence(program):
            return self._distributed(shown, training)
        if shown := other.restart_evidence(program):
            return "torchrun", shown, list(distributed.restart_notices(program, shown[0]))
        if training is not None:
            return self._plain(training)
        return self._no_loop()

    def _framework(
        self, way: str, shown: list[Evidence], notices: list[Notice]
    ) -> tuple[str, list[Evidence], list[Notice]]:
        """The way of a framework, unless it shards the model: then torchrun is what is left."""
        if any(one.refused and "--launcher torchrun" in one.remedy for one in notices):
            self._edits = Edits()
            return "torchrun", shown, notices
        return way, shown, notices

    def _distributed(
        self, shown: list[Evidence], training: Training | None
    ) -> tuple[str, list[Evidence], list[Notice]]:
        program = self._program
        refused = distributed.refusals(program)
        if training is not None and training.batch is None:
            if distributed.is_optional(program) and not refused:
                way, more, notices = self._plain(training)
                return way, [*more, *(_optional(one) for one in shown)], notices
            refused.append(distributed.own_batches(program, training))
        refused = refused or in_place.in_place_refusals(program, training)
        if refused:
            return "torchrun", shown, [*refused, *distributed.restart_notices(program, shown[0])]
        return "ddp", shown, []

    def _plain(self, training: Training) -> tuple[str, list[Evidence], list[Notice]]:
        notices = list(plain.explain_plain(self._program, training, self._edits))
        return "prepare", list(plain.plain_evidence(self._program, training)), notices

    def _no_loop(self) -> tuple[str, list[Evidence], list[Notice]]:
        """A script with gradients and steps, but no loop around them in its files; or one without training."""
        program = self._program
        backwards, steps = backward_calls(program), step_calls(program)
        if not backwards or not steps:
            return "none", other.other_evidence(program), other.other_notices(program)
        shown = [evidence(program, backwards[0], "computes gradients")]
        shown += [evidence(program, next(iter(steps)), "steps an optimizer")]
        told = notice(
            program,
            backwards[0],
            "the loop that runs this line was not found in the script and the modules beside it",
            "call elastic.prepare before that loop with the model, the optimizer, the DataLoader and the scheduler",
        )
        return "prepare", shown, [told]


def _left_out(name: str) -> Notice:
    what = "the changed lines of this file would not be valid Python, so they are not shown"
    return Notice(name, 1, what, "make the changes of docs/which-way.md by hand")


def _optional(one: Evidence) -> Evidence:
    return Evidence(one.file, one.line, one.text, f"{one.what}; not used, because it is under a condition")
