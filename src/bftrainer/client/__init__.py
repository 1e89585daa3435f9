"""Clients of a running controller: `Client`, and `AsyncClient` for asyncio."""

from bftrainer.client.api import RefusedError, UnreachableError
from bftrainer.client.async_client import AsyncClient
from bftrainer.client.calls import TrainerFailedError
from bftrainer.client.client import Client, describe
from bftrainer.client.polling import LogLine, Moment, Point, Row
from bftrainer.client.results import ResultFile, TrainerResults
from bftrainer.client.session import ClosedError

__all__ = [
    "AsyncClient",
    "Client",
    "ClosedError",
    "LogLine",
    "Moment",
    "Point",
    "RefusedError",
    "ResultFile",
    "Row",
    "TrainerFailedError",
    "TrainerResults",
    "UnreachableError",
    "describe",
]
