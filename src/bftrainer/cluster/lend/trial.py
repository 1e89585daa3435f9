"""`bftrainer lend --dry-run`: what a lender would submit, and whether Slurm would accept it. It changes nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from bftrainer.cluster.lend.daemon import LenderOptions, pilot_files
from bftrainer.cluster.lend.jobs import LenderJobs
from bftrainer.cluster.pools.slurm.runner import SlurmCommandError, SlurmRunner
from bftrainer.cluster.pools.slurm.submit.job import command_environment
from bftrainer.cluster.wire.lender_messages import LendPilot
from bftrainer.errors import BFTrainerError
from bftrainer.util.text import one_line

_TIMEOUT_S = 20.0
_EXAMPLE = "0123456789abcdef"


async def try_out(options: LenderOptions) -> Sequence[str]:
    """Return lines on each partition: the command for one of its nodes, and Slurm's verdict on it."""
    files, rules = pilot_files(options), options.rules
    runner = SlurmRunner(_TIMEOUT_S, command_environment(os.environ))
    await LenderJobs(files, rules).check_partitions()
    lines = ["script of pilots:"]
    lines += [f"  {line}" for line in files.text(_EXAMPLE, "OWNER").splitlines()]
    for partition in sorted(rules.partitions):
        try:
            node = await runner.ask(("sinfo", "-h", "-N", "-p", partition, "-o", "%N"), _first_word)
        except SlurmCommandError as problem:
            raise BFTrainerError(f"partition {partition}: {problem}") from None
        request = LendPilot(1, _EXAMPLE, node, partition, rules.most_minutes, "")
        words = LenderJobs(files, rules).words(request, _EXAMPLE)
        lines.append(f"partition {partition}: {shlex.join(words)}")
        test = [word for word in words[1:-2] if not word.startswith(("--output", "--chdir"))]
        try:
            wrapped = ("sbatch", "--test-only", "--output=/dev/null", *test, "--wrap=true")
            await runner.ask(wrapped, lambda text: None)
            lines.append("  Slurm would accept it")
        except SlurmCommandError as problem:
            lines.append(f"  Slurm would refuse it: {one_line(str(problem))}")
    return lines


def _first_word(text: str) -> str:
    words = text.split()
    if not words:
        raise ValueError("it has no nodes")
    return words[0]
