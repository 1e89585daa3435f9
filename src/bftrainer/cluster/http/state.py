"""`ApiState` holds the controller and the objects that the routes of the API share between requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.history.history import History
from bftrainer.cluster.http.feed import StatusFeed
from bftrainer.cluster.http.prometheus import PrometheusMetrics
from bftrainer.cluster.http.readiness import Readiness
from bftrainer.cluster.http.status import StatusReader
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.owners.folders import OwnFolders
from bftrainer.cluster.report.daily import DailyEfficiency
from bftrainer.cluster.spec.access import AccessCheck
from bftrainer.cluster.store.state_folder import STATE_ID_KEY
from bftrainer.cluster.store.store import Store
from bftrainer.errors import InputError
from bftrainer.util.daemon_threads import DaemonThreads

MOST_READS = 32
"""How many requests may read logs at the same time."""
MOST_READERS = 2
"""How many requests may read all rows of a table at the same time."""

T = TypeVar("T")


class ApiState:
    """Shared objects of one web application: `app.state.api`. Agents join with `agent_secret`."""

    def __init__(self, controller: Controller, agent_secret: str) -> None:
        self.controller = controller
        self.cluster = controller.cluster
        self.store = controller.cluster.store
        self.agent_secret = agent_secret
        self.status = StatusReader(controller)
        self.feed = StatusFeed(self.status.read)
        self.history = History(self.store.path)
        self.insights = DailyEfficiency(self.store.path, controller.config.policy)
        self.metrics = PrometheusMetrics(controller)
        self.readiness = Readiness(controller)
        self.files = DaemonThreads(MOST_READS, "log reader")
        self.access = AccessCheck()
        self._ending = False
        self._readers = asyncio.Semaphore(MOST_READERS)

    async def read(self, question: Callable[[Store], T]) -> T:
        """Ask a question of the database that takes long. It is answered in a thread, on a connection of its own."""

        def answer() -> T:
            with Store.open(self.store.path, read_only=True) as store:
                return question(store)

        async with self._readers:
            return await asyncio.to_thread(answer)

    def output_folder(self, trainer: str, owner: str, chosen: str = "") -> str:
        """Return the folder that a trainer's script writes to: the one that its user chose, or else its own."""
        users = self.controller.config.users
        if chosen or not users.own:
            return chosen or str(StateLayout(self.controller.config.state, "").output(trainer))
        try:
            home = users.as_accounts().of(owner).home
        except InputError:  # its account was removed
            home = Path("~")
        return str(OwnFolders(home).output(str(self.store.kept(STATE_ID_KEY)), trainer))

    @property
    def ending(self) -> bool:
        """Whether the controller is about to end."""
        return self._ending or self.controller.draining

    def mark_open(self) -> None:
        """Report the controller as ready. Called once its pool is open and it listens to agents."""
        self.readiness.opened = True

    def mark_ending(self) -> None:
        """End all streams. Called before the web server stops, which does not wait long for them."""
        self._ending = True
