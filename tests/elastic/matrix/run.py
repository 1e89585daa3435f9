"""Runs rows of the matrix: `make matrix`. Prints the table and writes it into docs/elastic.md.

Each row trains on one rank, then two, then three, and loses one of the three by SIGKILL. It is *right* if all ranks end
with the same state bit for bit and each sample counted once, *refused* if an error says what to do, else *wrong* or
*hung*. The status is 1 if a verdict is not the one in the registry.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])  # of `matrix` and of `support`

from bftrainer import errors
from bftrainer.elastic.local.coordinator import Coordinator, CoordinatorSettings, Happening
from bftrainer.elastic.protocol import Failed
from bftrainer.processes.launch import Command, ProcessLauncher
from bftrainer.processes.warm import WarmLauncher
from matrix.judge import faults, lines
from matrix.registry import ROWS, Row

WORKER = str(Path(__file__).with_name("worker.py"))
PAGE = Path(__file__).resolve().parents[3] / "docs/elastic.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
ROW_S = 60.0
"""A row that takes longer hangs."""
SETTINGS = CoordinatorSettings(silence_s=3.0, grace_s=20.0, background_start=False)
KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type))
NO_HELP = "an error that does not tell what to do"
ALONE, PAIR, THREE = 4, 12, 20
"""Steps at which the second node joins, the third one joins, and one is killed. An epoch has 8."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a row."""

    row: Row
    word: str
    sentence: str = ""
    seconds: float = 0.0

    @property
    def as_expected(self) -> bool:
        return self.word == self.row.expect


async def judged(row: Row, folder: Path, launcher: ProcessLauncher) -> Verdict:
    """Run a row. Its files are left in the folder."""
    began = time.monotonic()
    disturbed = folder / "disturbed"
    disturbed.mkdir(parents=True)
    undisturbed: Path | None = None
    try:
        async with asyncio.timeout(ROW_S):
            if row.expect == "right":
                undisturbed, (word, sentence) = await asyncio.gather(
                    _train_alone(row, folder / "alone", launcher), _disturb(row, disturbed, launcher)
                )
            else:
                word, sentence = await _disturb(row, disturbed, launcher)
    except TimeoutError:
        word, sentence = "hung", f"after {_steps(disturbed)} steps"
    if word == "right" and row.expect != "right":
        undisturbed = await _train_alone(row, folder / "alone", launcher)
    if word == "right" and (found := faults(row, disturbed, undisturbed)):
        word, sentence = "wrong", "; ".join(found)
    return Verdict(row, word, sentence, time.monotonic() - began)


async def _train_alone(row: Row, folder: Path, launcher: ProcessLauncher) -> Path | None:
    """The same training on one rank without a manager, for comparison."""
    if not row.exact:
        return None
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BFTRAINER_")}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["PYTHONUNBUFFERED"] = "1"  # the same parent as that of the disturbed training
    command = Command((WORKER, row.name, str(folder)), environment, str(Path.cwd()), str(folder / "log"))
    process = await launcher.start(command)
    try:
        await process.wait()
    finally:
        process.kill_group()
    return folder if list(folder.glob("final-*.pt")) else None


async def _disturb(row: Row, folder: Path, launcher: ProcessLauncher) -> tuple[str, str]:
    """1 → 2 → 3 ranks, and one is killed: how the job ended, and what an error said."""
    refusals: list[str] = []

    def watch(happening: Happening) -> None:
        if isinstance(happening.message, Failed):
            refusals.append(happening.message.error)

    async with Coordinator(
        [WORKER, row.name, str(folder)],
        launcher,
        nodes=(1, 3),
        folder=folder / "logs",
        settings=SETTINGS,
        watch=watch,
    ) as job:
        ending = asyncio.create_task(job.wait())
        scenario = asyncio.create_task(_scenario(row, folder, job, refusals))
        try:
            await asyncio.wait({ending, scenario}, return_when=asyncio.FIRST_COMPLETED)
            _allow(folder, float("inf"))  # the rest without holding back
            outcome = await ending
            disturbed = scenario.done() and scenario.exception() is None
        finally:
            for task in (ending, scenario):
                task.cancel()
            await asyncio.gather(ending, scenario, return_exceptions=True)
    if refusals:
        kind, _, sentence = refusals[0].partition(": ")
        return _refusal(row, sentence) if kind in KINDS else ("wrong", f"{NO_HELP}: {_first_line(refusals[0])}")
    if outcome.status == "failed":
        return _refusal(row, outcome.error)
    if not disturbed:
        return "wrong", "it ended before a rank was killed"
    return "right", ""


async def _scenario(row: Row, folder: Path, job: Coordinator, refusals: list[str]) -> None:
    """What happens to the job. It ends early if a worker refuses to train."""
    victim = ROWS.index(row) % 3 if row in ROWS else 0

    async def until(condition: Callable[[], bool]) -> None:
        while not condition() and not refusals:
            await asyncio.sleep(0.02)

    _allow(folder, ALONE)
    (folder / "go-node-1").touch()
    await job.add(3)  # the second and the third wait until it is their turn
    await until(lambda: _steps(folder) >= ALONE)
    for world, steps in ((2, PAIR), (3, THREE)):
        (folder / f"go-node-{world}").touch()
        await until(lambda name=f"node-{world}": job.roster.is_ready(name))
        _allow(folder, steps)
        await until(lambda world=world, steps=steps: _steps(folder) >= steps and _steps(folder, world) >= 2)
    if not refusals:
        job.signal(job.members[victim], signal.SIGKILL)


def _allow(folder: Path, steps: float) -> None:
    """Let training run freely up to this step."""
    beside = folder / "limit.new"
    beside.write_text(str(steps))
    beside.rename(folder / "limit")


def _steps(folder: Path, world: int | None = None) -> int:
    """How many steps are committed, in all or in a world of this size."""
    steps = [line for line in lines(folder) if "world" in line]
    return len({line["step"] for line in steps if world in (None, line["world"])})


def _refusal(row: Row, sentence: str) -> tuple[str, str]:
    """An error of ours is a refusal if it names the construct."""
    if row.says and row.says in sentence:
        return "refused", sentence
    return "wrong", f"{NO_HELP}: {_first_line(sentence)}"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "no text"


def table(verdicts: list[Verdict]) -> str:
    """The page's block."""
    head = ["| construct | verdict | what it says | remark, or how to write it |", "| --- | --- | --- | --- |"]
    return "\n".join([BEGIN, *head, *map(table_line, verdicts), END])


def table_line(verdict: Verdict) -> str:
    """The line of one row."""
    said = f"“{verdict.sentence}”" if verdict.word == "refused" else verdict.sentence
    cells = (verdict.row.title, f"*{verdict.word}*", said, verdict.row.remark)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def block_of(page: str) -> list[str]:
    """The lines of the table on a page, without its head."""
    (block,) = re.findall(f"{BEGIN}\n(.*?){END}", page, re.DOTALL)
    return block.splitlines()[2:]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows; all of them if none is given")
    parser.add_argument("--page", type=Path, help="the page whose block is written; all rows must be run")
    args = parser.parse_args()
    if unknown := set(args.rows) - {row.name for row in ROWS}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}")
    chosen = [row for row in ROWS if row.name in args.rows or not args.rows]
    began, launcher, verdicts = time.monotonic(), WarmLauncher(), []
    folder = Path(tempfile.mkdtemp(prefix="matrix-"))
    try:
        for row in chosen:
            verdict = await judged(row, folder / row.name, launcher)
            verdicts.append(verdict)
            mark = "  " if verdict.as_expected else "! "
            print(f"{mark}{row.name:22} {verdict.word:8} {verdict.seconds:5.1f} s  {verdict.sentence}", flush=True)
    finally:
        await launcher.close()
    bad = [verdict for verdict in verdicts if not verdict.as_expected]
    print(f"{len(verdicts)} rows in {time.monotonic() - began:.0f} s, {len(bad)} not as expected")
    if args.page and not args.rows:
        text = args.page.read_text()
        args.page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table(verdicts), text, flags=re.DOTALL))
    if bad:
        print(f"the files are in {folder}")
    else:
        with suppress(OSError):
            shutil.rmtree(folder)
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
