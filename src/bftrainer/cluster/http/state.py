"""`ApiState` holds the controller and the objects that the routes of the API share between requests."""

from __future__ import annotations

from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.history.history import History
from bftrainer.cluster.http.feed import StatusFeed
from bftrainer.cluster.http.prometheus import PrometheusMetrics
from bftrainer.cluster.http.readiness import Readiness
from bftrainer.cluster.http.status import StatusReader
from bftrainer.cluster.report.daily import DailyEfficiency
from bftrainer.cluster.spec.access import AccessCheck
from bftrainer.util.daemon_threads import DaemonThreads

MOST_READS = 32
"""How many requests may read logs at the same time."""


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
