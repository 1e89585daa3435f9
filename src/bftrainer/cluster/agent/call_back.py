"""The call back: an agent that a batch job started tells its pool through a file that it cannot reach the controller.

`link.py` reports each failed attempt here until the first welcome. The file is in the pool's folder, which the node and
the controller see (`variables.CALL_BACK`); `pools/slurm/callbacks.py` reads it. An agent without such a file waits for
its controller for longer and tells nobody.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path

from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException

from bftrainer.cluster.wire import tls
from bftrainer.errors import BFTrainerError
from bftrainer.processes import variables
from bftrainer.util.files import replace_file
from bftrainer.util.text import one_line

TRY_S = 15.0
"""How long a pilot tries to reach its controller for the first time. Then it ends: its node is of use to others."""
TELL_AFTER_S = 3.0
"""Failures are not told before: a controller that is being restarted is away for a moment."""

_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM, errno.EADDRNOTAVAIL)

_log = logging.getLogger(__name__)


class CallBack:
    """Tells once per reason why the controller at `url` cannot be reached, and takes it back when it was reached."""

    def __init__(self, path: Path, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._url = url
        self._clock = clock
        self._began = clock()
        self._told: tuple[str, str] | None = None
        self._reached = False

    def failed(self, kind: str, reason: str, *, for_good: bool = False) -> None:
        """Note a failed attempt; with `for_good` the last one."""
        early = not for_good and self._clock() - self._began < TELL_AFTER_S
        if early or self._reached or self._told == (kind, reason):
            return
        self._told = (kind, reason)
        try:
            replace_file(self._path, json.dumps({"url": self._url, "kind": kind, "reason": reason}) + "\n")
        except OSError as problem:
            _log.warning("cannot tell the controller: %s: %s", self._path, problem.strerror)

    def ended(self, problem: BFTrainerError) -> None:
        """Tell that the agent has ended before it reached the controller, unless the reason was told before."""
        if self._told is None:
            self.failed("agent", one_line(problem)[:300], for_good=True)

    def reached(self) -> None:
        """Take back what was told: the controller has answered."""
        self._reached = True
        if self._told is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def call_back_of(environment: MutableMapping[str, str]) -> CallBack | None:
    """Return the call back of a pilot, None for other agents. The variable is removed: workers must not inherit it."""
    path = environment.pop(variables.CALL_BACK, "")
    return CallBack(Path(path), environment.get(variables.URL, "")) if path else None


def why_unreached(problem: BaseException) -> tuple[str, str]:
    """Return the kind of a failed attempt to connect, and its reason in words."""
    if isinstance(problem, InvalidStatus):
        status = problem.response.status_code
        if status in (401, 403):
            return "secret", "the controller refuses the secret of this agent"
        return "other", f"what listens there answers with HTTP status {status}"
    if isinstance(problem, ssl.SSLCertVerificationError):
        return "tls", f"the certificate is not to be trusted: {tls.reason(problem)}"
    if isinstance(problem, ssl.SSLError):
        return "tls", f"no TLS connection can be made: {tls.reason(problem)}"
    if isinstance(problem, socket.gaierror):
        return "name", f"the host name cannot be resolved: {problem.strerror}"
    if isinstance(problem, TimeoutError):  # this includes the kernel's, which has an errno
        return "timeout", "the connection timed out"
    if isinstance(problem, ConnectionRefusedError):
        return "refused", "the connection is refused"
    if isinstance(problem, OSError) and problem.errno in _NO_ROUTE:
        return "route", f"there is no route: {os.strerror(problem.errno).lower()}"
    if isinstance(problem, InvalidHandshake | WebSocketException | EOFError):
        return "other", f"what listens there is not this controller: {one_line(problem)[:120]}"
    if isinstance(problem, OSError) and problem.errno:
        return "other", os.strerror(problem.errno).lower()
    return "other", one_line(problem)[:200] or type(problem).__name__
