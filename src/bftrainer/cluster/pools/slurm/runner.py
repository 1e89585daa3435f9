"""`SlurmRunner` runs commands of Slurm, each with a time-out and an output limit.

None of them blocks the event loop. Every failure, and output that cannot be parsed, is a `SlurmCommandError`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bftrainer.cluster.pools.script.discovery import DiscoveryError, run
from bftrainer.cluster.pools.slurm.figures import AnswerTimes
from bftrainer.errors import BFTrainerError, InputError

REFUSES = "refuses: "
"""What precedes the reason of a lender that does not submit a pilot."""
_ANSWERED = re.compile(f"it failed with exit status|{REFUSES}")
_NO_ANSWER = re.compile("did not end within|Unable to contact|Socket timed out|Connection refused")
"""Failures of sbatch that are no refusal: Slurm did not answer."""

_Read = TypeVar("_Read")


def is_refusal(problem: str) -> bool:
    """Return whether a failed submission was refused: Slurm has answered, and there is certainly no pilot."""
    return _ANSWERED.search(problem) is not None and _NO_ANSWER.search(problem) is None


class SlurmCommandError(BFTrainerError):
    """A Slurm command failed, took too long, or printed what cannot be parsed."""


class SlurmRunner:
    """Runs commands with an environment, and notes how long Slurm took to answer."""

    def __init__(self, timeout_s: float, environment: Mapping[str, str]) -> None:
        self.answers: defaultdict[str, AnswerTimes] = defaultdict(AnswerTimes)
        """How long each command took."""
        self._timeout_s = timeout_s
        self._environment = environment

    async def ask(
        self,
        argv: Sequence[str],
        read: Callable[[str], _Read],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        name: str = "",
        encoding: str = "utf-8",
    ) -> _Read:
        """Run a command and return what `read` makes of its output. `name` is the command's, if others precede it."""
        began, failed = time.monotonic(), True
        name = name or argv[0]
        try:
            output = await run(argv, self._timeout_s, environment or self._environment, stdin=stdin)
            answer = await asyncio.to_thread(
                lambda: read(output.decode(encoding))
            )  # ten thousand nodes take a while to parse
            failed = False
            return answer
        except (DiscoveryError, InputError, OSError) as problem:
            raise SlurmCommandError(f"{name}: {problem}") from None
        except ValueError as problem:  # this includes output that is not text
            raise SlurmCommandError(f"{name}: its output cannot be read: {str(problem)[:200]}") from None
        finally:
            self.answers[name].add(time.monotonic() - began, failed=failed)
