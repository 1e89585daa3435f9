"""Converts typed events to the columns of their rows, and rows to typed events.

The log is kept for years and read by other versions: `event_of` accepts rows with missing, additional or damaged values
and kinds that this version does not know.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from bftrainer.cluster.store import events
from bftrainer.cluster.store.events import LogEvent, OtherEvent, PoolNote, TypedEvent
from bftrainer.cluster.store.rows import EventRow

_COLUMNS = ("trainer", "node")
"""Fields that have a column of their own. All others are in the JSON of the column `data`."""
_TYPES: dict[str, tuple[tuple[type, ...], Any]] = {
    "str": ((str,), ""),
    "int": ((int,), 0),
    "float": ((float, int), 0.0),
    "bool": ((bool,), False),
    "Mapping": ((dict,), {}),
    "Sequence": ((list,), ()),
}
"""Types that a value may have in JSON, and what stands for a missing one, by the annotation of the field."""


class EventColumns(NamedTuple):
    """An event as columns of its row."""

    kind: str
    trainer: str
    node: str
    data: dict[str, Any]


class _Value(NamedTuple):
    """A field of an event that is in the JSON of its row."""

    name: str
    key: str
    types: tuple[type, ...]
    empty: Any
    default: Any
    """A value that is not stored, as older versions did not know the field; `MISSING` if there is none."""


class _Form(NamedTuple):
    """Where the fields of a kind are in its rows."""

    event: type[TypedEvent]
    columns: tuple[str, ...]
    """The first fields of the class."""
    values: tuple[_Value, ...]
    """In the order of the keys in the JSON."""
    keys: frozenset[str]


def columns_of(event: LogEvent) -> EventColumns:
    """Return the columns that hold an event."""
    if isinstance(event, OtherEvent):
        return EventColumns(event.kind, event.trainer, event.node, dict(event.data))
    if isinstance(event, PoolNote):
        return EventColumns(event.kind, "", "", dict(event.facts))
    found = ((value, getattr(event, value.name)) for value in _FORMS[event.kind].values)
    data = {value.key: content for value, content in found if content != value.default}
    data.update(event.extra)
    return EventColumns(event.kind, getattr(event, "trainer", ""), getattr(event, "node", ""), data)


def event_of(row: EventRow) -> LogEvent:
    """Return the event that a row holds. A value that is missing or of another type is empty, 0 or None."""
    form, data = _FORMS.get(row.kind), row.data
    if form is None:
        if row.kind.startswith(PoolNote.prefix):
            return PoolNote(row.kind.removeprefix(PoolNote.prefix), data)
        return OtherEvent(row.kind, row.trainer, row.node, data)
    found: list[Any] = [getattr(row, name) for name in form.columns]
    for _, key, types, empty, _ in form.values:
        value = data.get(key, empty)
        found.append(value if isinstance(value, types) else empty)
    if data.keys() <= form.keys:
        return form.event(*found)
    return form.event(*found, extra={key: value for key, value in data.items() if key not in form.keys})


def _form(event: type[TypedEvent]) -> _Form:
    values = []
    for each in fields(event):
        if each.name not in (*_COLUMNS, "extra"):
            annotation, _, optional = str(each.type).partition(" | ")
            types, empty = _TYPES[annotation.partition("[")[0]]
            accepted = (*types, type(None)) if optional else types
            key, empty = each.name.rstrip("_"), None if optional else empty
            default = each.default if each.default_factory is MISSING else each.default_factory()
            values.append(_Value(each.name, key, accepted, empty, default))
    columns = tuple(each.name for each in fields(event) if each.name in _COLUMNS)
    return _Form(event, columns, tuple(values), frozenset(value.key for value in values))


_FORMS = {
    each.kind: _form(each)
    for each in vars(events).values()
    if isinstance(each, type) and issubclass(each, TypedEvent) and each is not TypedEvent
}
