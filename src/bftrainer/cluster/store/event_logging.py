"""Event logging writes the controller's log, as text or JSON, to stderr and to `serve.log`.

Secrets are removed. `serve` configures it from the settings below `[log]`; all other modules just use `logging`. The
store passes every event of nodes and trainers to `log_event`, so that the log reads like the event log and can be kept
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from bftrainer.cluster.config.keys import LogSettings
from bftrainer.cluster.store.event_columns import EventColumns
from bftrainer.cluster.store.events import Decided, NodeLeft, PoolNote, StateChanged, TrainerLearned
from bftrainer.errors import InputError

FILE = "serve.log"
"""Name of the log file in the state folder, unless set otherwise."""
MOST_REASONS = 8
MOST_DATA = 1000
"""Limit of characters of an event's data in the log; the store has all of it."""

_QUIET_KINDS = frozenset({TrainerLearned.kind})
"""Kinds that are not logged: there are too many, and they are of no use to a person."""
_SECRETS = re.compile(r"bft_[A-Za-z0-9_-]{8,}|(?i:(?<=bearer )|(?<=bearer%20))[^\s\"',;]+")
_events = logging.getLogger("bftrainer.events")


class Hidden:
    """Removes secrets from text: those it was given, and anything that looks like a token."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def hide(self, *secrets: str) -> None:
        """Add secrets that must not be written."""
        self._known += [secret for secret in secrets if len(secret) >= 8 and secret not in self._known]

    def without(self, text: str) -> str:
        """Return the text with each secret replaced by `***`."""
        for secret in self._known:
            text = text.replace(secret, "***")
        return _SECRETS.sub("***", text)


hidden = Hidden()
"""Secrets that this process must not write."""


class Text(logging.Formatter):
    """Formats a record as one line of text, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging`."""
        line = f"{_moment(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}"
        trouble = _traceback(self, record)
        return hidden.without(f"{line}\n{trouble}" if trouble else line)


class Json(logging.Formatter):
    """Formats a record as one JSON object per line, for programs: time, level, logger, message and further facts."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging`."""
        facts = getattr(record, "facts", None) or {}
        row = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in facts.items() if value not in ("", None)},
        }
        if trouble := _traceback(self, record):
            row["traceback"] = trouble
        return hidden.without(json.dumps(row, default=str, ensure_ascii=False))


class Rotating(RotatingFileHandler):
    """Log file, readable by its owner only, that is moved aside when it has grown. A full disk raises no error."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors="backslashreplace", opener=_private)

    def close(self) -> None:
        """See `logging`."""
        with contextlib.suppress(OSError):  # text that could not be written before cannot be written now
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop a record that cannot be written; important records also go to stderr."""


def to_stderr(settings: LogSettings, *, verbose: bool, stream: TextIO | None = None) -> None:
    """Log warnings and errors to stderr; with `verbose`, information too."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(settings))
    handler.setLevel(logging.INFO if verbose else logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(handler.level)


@contextlib.contextmanager
def to_file(settings: LogSettings, folder: Path) -> Iterator[Path | None]:
    """Log to a file that is rotated when it has grown. Yields its path, or None if no file is written."""
    path = folder / FILE if not settings.file else Path(settings.file)
    if settings.file == "none" or _is_stderr(path):
        yield None
        return
    try:
        handler = Rotating(
            path, maxBytes=max(1, int(settings.max_mb * 1e6)), backupCount=settings.keep, encoding="utf-8"
        )
    except OSError as problem:
        raise InputError(f"log.file: {path}: {problem.strerror}; choose another, or none") from None
    handler.setFormatter(_formatter(settings))
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    handler.setLevel(level)
    root = logging.getLogger()
    before = root.level
    root.setLevel(min(level, before or level))
    root.addHandler(handler)
    # Only warnings of other packages: they log a lot for every connection.
    others = [logging.getLogger(name) for name in ("uvicorn", "websockets", "httpx", "httpcore", "asyncio")]
    for other in others:
        other.setLevel(logging.WARNING)
    try:
        yield path
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


def log_event(event: EventColumns) -> None:
    """Log an event that is being stored."""
    kind, trainer, node, brief = event
    level = logging.WARNING if _is_trouble(kind, brief) else logging.INFO
    if kind in _QUIET_KINDS or not _events.isEnabledFor(level):
        return
    if kind == Decided.kind:
        brief = {"pool": brief.get("pool"), "ms": brief.get("ms"), "reasons": list(brief.get("reasons", ()))}
        brief["reasons"][MOST_REASONS:] = ["…"] * (len(brief["reasons"]) > MOST_REASONS)
    told = json.dumps(brief, default=str, ensure_ascii=False) if brief else ""
    message = " ".join(part for part in (kind, trainer, node, told[:MOST_DATA]) if part)
    facts: dict[str, Any] = {"event": kind, "trainer": trainer, "node": node}
    facts |= {"data": brief if len(told) <= MOST_DATA else told[:MOST_DATA]} if told else {}
    _events.log(level, "%s", message, extra={"facts": facts})


def _is_trouble(kind: str, data: Mapping[str, Any]) -> bool:
    """Return whether a person should look: a pool that fails, a failed trainer, a node that fell silent."""
    if kind == StateChanged.kind:
        return data.get("to") == "failed"
    if kind == NodeLeft.kind:
        return data.get("reason") in ("silent", "did not come back")
    return PoolNote.tells_trouble(kind)


def _formatter(settings: LogSettings) -> logging.Formatter:
    return Json() if settings.format == "json" else Text()


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


def _one_line(message: str) -> str:
    """Escape characters that would look like another line or control a terminal."""
    if message.isprintable():
        return message
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_stderr(path: Path) -> bool:
    """Return whether stderr goes to this file already."""
    try:
        return os.path.samestat(path.stat(), os.fstat(2))
    except OSError:
        return False
