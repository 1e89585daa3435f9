"""MLflow writer: a run on the tracking server, or in the folder `mlruns` of the trainer's output folder.

A tag with our own id finds the run again. MLflow chooses the run's id itself, and a process that is killed while it
creates the run would not get to know it.
"""

from __future__ import annotations

import os
from typing import Any

from bftrainer.elastic.torch.tracking.journal import LoggedValues
from bftrainer.elastic.torch.tracking.writers import Opening
from bftrainer.errors import InputError

FOLDER = "mlruns"
TAG = "bftrainer.run"
_OPTIONS = ("tracking_uri", "experiment", "name", "params", "tags")


class MlflowWriter:
    """Writes to a run of MLflow. See `TrackerWriter`. Each value is stored before `write` returns."""

    def __init__(self, opening: Opening) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        options: dict[str, Any] = dict(opening.options)
        if wrong := [name for name in options if name not in _OPTIONS]:
            raise InputError(f"run.tracker('mlflow') takes {', '.join(_OPTIONS)}, but got {wrong[0]!r}")
        uri = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow 3 asks for this. Its alternative, SQLite, is not for the shared file systems of a cluster.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (opening.folder / FOLDER).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._known: dict[str, int] | None = None
        name = options.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{opening.run}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            self._known = {}
            return
        tags = {**{key: str(value) for key, value in (options.get("tags") or {}).items()}, TAG: opening.run}
        made = self._client.create_run(experiment, tags=tags, run_name=options.get("name") or opening.name or None)
        self._run = made.info.run_id
        params = [Param(key, str(value)) for key, value in (options.get("params") or {}).items()]
        if params:
            self._client.log_batch(self._run, params=params)

    def write(self, logged: LoggedValues) -> None:
        """See `TrackerWriter`."""
        from mlflow.entities import Metric

        at = round(logged.time * 1000)
        new = {name: value for name, value in logged.values.items() if logged.step > self._last_step(name)}
        self._client.log_batch(self._run, metrics=[Metric(name, value, at, logged.step) for name, value in new.items()])

    def _last_step(self, name: str) -> int:
        """Return the last step that MLflow has of a metric: a killed process may not have noted it in the journal."""
        if self._known is None:
            return -1
        if name not in self._known:
            history = self._client.get_metric_history(self._run, name)
            self._known[name] = max((point.step for point in history), default=-1)
        return self._known[name]

    def close(self) -> None:
        """See `TrackerWriter`. The run stays as it is: running."""

    def finish(self) -> None:
        """See `TrackerWriter`."""
        self._client.set_terminated(self._run)
