"""What the controller writes of itself: lines of text or JSON to stderr and to `serve.log`, without secrets.

`serve` sets it up from the settings below `[log]`; everybody else just uses `logging`. What happens to nodes and
trainers is told by the store (`event`), so that the log reads like the event log and can be kept elsewhere.
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

from bftrainer.cluster.settings import LogSettings
from bftrainer.errors import InputError

FILE = "serve.log"
"""In the state folder, unless set otherwise."""
MOST_REASONS = 8
MOST_DATA = 1000
"""Characters of what belongs to an event; the store has all of it."""

_QUIET_KINDS = frozenset({"trainer.learned"})
"""Too many, and of no use to a person."""
_SECRETS = re.compile(r"bft_[A-Za-z0-9_-]{8,}|(?i:(?<=bearer )|(?<=bearer%20))[^\s\"',;]+")
_events = logging.getLogger("bftrainer.events")


class Hidden:
    """Takes secrets out of text: those it was told of, and whatever looks like a token."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def hide(self, *secrets: str) -> None:
        """Let none of these be written."""
        self._known += [secret for secret in secrets if len(secret) >= 8 and secret not in self._known]

    def without(self, text: str) -> str:
        """The text without them."""
        for secret in self._known:
            text = text.replace(secret, "***")
        return _SECRETS.sub("***", text)


hidden = Hidden()
"""What this process must not write."""


class Text(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging`."""
        line = f"{_moment(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}"
        trouble = _traceback(self, record)
        return hidden.without(f"{line}\n{trouble}" if trouble else line)


class Json(logging.Formatter):
    """An object for programs, one a line: time, level, logger, message, and what else is known."""

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
    """A file for its owner alone, which is moved aside when it has grown. A full disk stops nobody."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors="backslashreplace", opener=_private)

    def close(self) -> None:
        """See `logging`."""
        with contextlib.suppress(OSError):  # what could not be written before cannot be now
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """What cannot be written is lost; stderr has what is important."""


def to_stderr(settings: LogSettings, *, verbose: bool, stream: TextIO | None = None) -> None:
    """Say on stderr what is wrong; with `verbose` what happens, too."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(settings))
    handler.setLevel(logging.INFO if verbose else logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(handler.level)


@contextlib.contextmanager
def to_file(settings: LogSettings, folder: Path) -> Iterator[Path | None]:
    """Write what happens to a file, and begin another whenever it has grown; where it is."""
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
    # Of others' packages only what is wrong; they tell much of every connection.
    others = [logging.getLogger(name) for name in ("uvicorn", "websockets", "httpx", "httpcore", "asyncio")]
    for other in others:
        other.setLevel(logging.WARNING)
    try:
        yield path
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


def event(kind: str, trainer: str, node: str, data: Mapping[str, Any] | None) -> None:
    """Something happened, and is being stored."""
    brief: Mapping[str, Any] = data or {}
    level = logging.WARNING if _is_trouble(kind, brief) else logging.INFO
    if kind in _QUIET_KINDS or not _events.isEnabledFor(level):
        return
    if kind == "decision":
        brief = {"pool": brief.get("pool"), "ms": brief.get("ms"), "reasons": list(brief.get("reasons", ()))}
        brief["reasons"][MOST_REASONS:] = ["…"] * (len(brief["reasons"]) > MOST_REASONS)
    told = json.dumps(brief, default=str, ensure_ascii=False) if brief else ""
    message = " ".join(part for part in (kind, trainer, node, told[:MOST_DATA]) if part)
    facts: dict[str, Any] = {"event": kind, "trainer": trainer, "node": node}
    facts |= {"data": brief if len(told) <= MOST_DATA else told[:MOST_DATA]} if told else {}
    _events.log(level, "%s", message, extra={"facts": facts})


def _is_trouble(kind: str, data: Mapping[str, Any]) -> bool:
    """Whether somebody should look: a pool that fails, a training that failed, a node that fell silent."""
    if kind == "trainer.state":
        return data.get("to") == "failed"
    if kind == "node.left":
        return data.get("reason") in ("silent", "did not come back")
    return (kind.startswith("pool.") and kind.endswith("failed")) or kind == "pool.not_drained"


def _formatter(settings: LogSettings) -> logging.Formatter:
    return Json() if settings.format == "json" else Text()


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


def _one_line(message: str) -> str:
    """Without what would look like another line, or steer a terminal."""
    if message.isprintable():
        return message
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_stderr(path: Path) -> bool:
    """Whether what goes to stderr ends up in this file already."""
    try:
        return os.path.samestat(path.stat(), os.fstat(2))
    except OSError:
        return False
