"""Node states: parses the output of a scheduler's tool or a user's script into the set of idle nodes.

Pure functions of text. The recorder (`record`) calls `read_states` on the output of every poll; the live system's Slurm
pool calls `sinfo_rows`.
Idle means free for anyone right now: any doubt about a node (a suffix, a flag, an unknown word) makes it not idle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from bftrainer.core.hostlist import expand
from bftrainer.core.pool import Node
from bftrainer.errors import InputError

Form = Literal["auto", "sinfo", "slurm-json", "pbs-json", "names"]
FORMS: tuple[Form, ...] = get_args(Form)

# Flags that say how a node was created, not what it does: they do not keep a job off an idle node.
_HARMLESS_FLAGS = frozenset({"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})

# Only to recognise Slurm's output: an unknown word of a newer Slurm simply counts as not idle.
_SLURM_WORDS = re.compile(
    "IDLE|ALLOC(ATED)?|MIX(ED)?|DOWN|DRAIN(ED|ING)?|DRNG|COMP(LETING)?|PLND|PLANNED|RESV|RESERVED|MAINT|FAIL(G|ING)?|"
    "FUTR|FUTURE|UNK(NOWN)?|BLOCK(ED)?|POW_(UP|DN)|POWER(ING|ED)?_(UP|DOWN)|REBOOT|BOOT|INVAL|NO_RESPOND|NPC|ERROR"
)
_IN_USE = frozenset({"allocated", "alloc", "mixed", "mix"})
_SUFFIXES = "*~#!%$@^-"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_NAME_SLOTS = re.compile(rf"({_NAME.pattern})(?::([0-9]{{1,9}}))?")
_PBS_NAME = re.compile(r"[!-~]{1,255}")  # virtual nodes have names such as host[0]
_STATE = re.compile(rf"[A-Za-z][A-Za-z0-9_+]*[{re.escape(_SUFFIXES)}]*")


@dataclass(frozen=True, slots=True)
class NodeStates:
    """Result of one poll: every node that was reported, in order, and the idle ones among them."""

    nodes: tuple[Node, ...]
    idle: frozenset[Node]


def read_states(text: str, form: Form = "auto") -> NodeStates:
    """Parse the node states in `text`.

    `auto` detects the format from the content. Empty text is then a list of no names, a full machine; give `form` where
    that would hide a failure.
    """
    if form not in FORMS:
        raise InputError(f"a form of node states must be one of {', '.join(FORMS)}, but got {form!r}")
    return _READERS[_detect(text) if form == "auto" else form](text)


def read_sinfo(text: str, lent: Collection[Node] = ()) -> NodeStates:
    """Parse `sinfo -N` text. A node has one row for each of its partitions and is idle only if every row says so.

    Nodes `lent` to jobs that any other job may preempt count as idle while they are in use.
    """
    return _combine(
        (row[0], is_idle([row[-1]]) or (row[0] in lent and row[-1].lower() in _IN_USE)) for row in sinfo_rows(text)
    )


def read_lent(text: str, partition: str) -> frozenset[Node]:
    """The nodes on which all jobs are of one partition, from `squeue -h -o '%P|%N'`."""
    lent, others = set[Node](), set[Node]()
    for _, line in _lines(text):
        name, bar, nodes = line.strip().partition("|")
        if not bar:
            raise InputError(f"a line of squeue must be `partition|nodes`, but got {line.strip()!r:.80}")
        (lent if name == partition else others).update(expand(nodes) if nodes not in ("", "(null)") else ())
    return frozenset(lent - others)


def sinfo_rows(text: str) -> list[list[str]]:
    """The rows of `sinfo -N` as words: the first is a node, the last its state. A header is skipped."""
    rows = [(number, line.split()) for number, line in _lines(text)]
    rows = [(number, row) for number, row in rows if row[-1].lower() != "n/a"]  # a partition without nodes
    if rows and rows[0][1][-1].upper() == "STATE":
        del rows[0]
    if not rows:
        raise InputError("sinfo printed no node; check that `sinfo -N` lists the machine's nodes here")
    for number, row in rows:
        if len(row) < 2 or not _NAME.fullmatch(row[0]) or not _STATE.fullmatch(row[-1]):
            raise InputError(
                f"line {number} of the sinfo output must have one node first and its state last, but got "
                f"{_short(' '.join(row))}; print it with sinfo -N -h -o '%N %T'"
            )
    if not any(_SLURM_WORDS.fullmatch(_base(row[-1])) for _, row in rows):
        raise InputError(
            f"no line of the sinfo output ends with a node state (the first: {_short(' '.join(rows[0][1]))}); "
            "print it with sinfo -N -h -o '%N %T'"
        )
    return [row for _, row in rows]


def read_slurm_json(text: str) -> NodeStates:
    """Parse Slurm's JSON: `sinfo --json` of any release, `scontrol show nodes --json`, slurmrestd's `/nodes`."""
    return _slurm_nodes(_json_object(text, "Slurm's JSON"))


def read_pbs_json(text: str) -> NodeStates:
    """Parse `pbsnodes -a -F json`: free nodes without jobs, reservations or allocated CPUs are idle."""
    return _pbs_nodes(_json_object(text, "the JSON of pbsnodes"))


def read_names(text: str) -> NodeStates:
    """Parse idle nodes, one per line: `name` or `name:slots`. Blank lines and `#` comments are skipped.

    An empty list is legal.
    """
    found: list[tuple[Node, bool]] = []
    for number, line in _lines(text):
        match = _NAME_SLOTS.fullmatch(line.split(" #", 1)[0].strip())
        if match is None:
            raise InputError(f"line {number} of the idle nodes must be one node name, but got {_short(line)}")
        found.append((match[1], match[2] is None or int(match[2]) > 0))
    return _combine(found)


def _detect(text: str) -> Form:
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        value = _json_object(text, "the node states")
        return "pbs-json" if isinstance(value.get("nodes"), dict) else "slurm-json"
    several_columns = any(len(line.split(" #", 1)[0].split()) > 1 for _, line in _lines(text))
    return "sinfo" if several_columns else "names"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines with content, with their numbers."""
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def _combine(rows: Iterable[tuple[Node, bool]]) -> NodeStates:
    """Every node once; idle if no row about it says otherwise."""
    verdict: dict[Node, bool] = {}
    for node, idle in rows:
        verdict[node] = idle and verdict.get(node, True)
    return NodeStates(tuple(verdict), frozenset(node for node, idle in verdict.items() if idle))


def _base(word: str) -> str:
    """The state in a word such as `mixed-` or `IDLE+DRAIN`, for recognising it."""
    return word.rstrip(_SUFFIXES).split("+")[0].upper()


def is_idle(words: Iterable[str]) -> bool:
    """Whether Slurm's state and flags, as words or joined by `+`, are IDLE and nothing else that matters.

    A suffix means not idle.
    """
    parts = [part.upper() for word in words for part in word.split("+")]
    return "IDLE" in parts and all(part == "IDLE" or part in _HARMLESS_FLAGS for part in parts)


def _slurm_nodes(value: dict[str, object]) -> NodeStates:
    entries = value.get("sinfo", value.get("nodes"))
    rows = [row for entry in entries for row in _slurm_entry(entry)] if isinstance(entries, list) else []
    if not rows:
        raise InputError(f"Slurm's JSON has no nodes{_slurm_errors(value.get('errors'))}")
    return _combine(rows)


def _slurm_entry(entry: object) -> Iterator[tuple[Node, bool]]:
    """The nodes of one entry: one node, or, in `sinfo --json` since 23.02, all that share partition and state."""
    if not isinstance(entry, dict):
        raise InputError(f"a node in Slurm's JSON must be an object, but got {_short(entry)}")
    node, group = entry.get("node"), entry.get("nodes")
    if isinstance(node, dict) and isinstance(group, dict):
        names, state = group.get("nodes"), node.get("state")
    else:
        names, state = [entry.get("name")], entry.get("state")
    if not isinstance(names, list):
        raise InputError(f"an entry of sinfo's JSON must list its nodes, but got {_short(names)}")
    words = [*_words(state, "state"), *_words(entry.get("state_flags") or [], "state_flags")]
    idle = is_idle(words) and not entry.get("reservation")
    for name in names:
        yield _json_name(name, _NAME, "Slurm's JSON"), idle


def _words(value: object, key: str) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"the {key} of a node in Slurm's JSON must be words, but got {_short(value)}")
    return words


def _slurm_errors(errors: object) -> str:
    """Slurm's own error messages, to append to a message."""
    if not isinstance(errors, list) or not errors:
        return "; give the output of `sinfo --json` or slurmrestd's nodes"
    first = errors[0]
    said = (first.get("description") or first.get("error")) if isinstance(first, dict) else first
    return f"; Slurm says {_short(said)}"


def _pbs_nodes(value: dict[str, object]) -> NodeStates:
    nodes = value.get("nodes")
    if not isinstance(nodes, dict) or not nodes:
        raise InputError("the JSON of pbsnodes has no nodes; give the output of `pbsnodes -a -F json`")
    return _combine((_json_name(name, _PBS_NAME, "the JSON of pbsnodes"), _pbs_idle(nodes[name])) for name in nodes)


def _pbs_idle(node: object) -> bool:
    if not isinstance(node, dict):
        raise InputError(f"a node in the JSON of pbsnodes must be an object, but got {_short(node)}")
    assigned = node.get("resources_assigned") or {}
    if not isinstance(assigned, dict):
        raise InputError(f"the resources_assigned of a node in the JSON of pbsnodes is {_short(assigned)}, no object")
    cpus_free = assigned.get("ncpus") in (None, 0, "0", "")
    return node.get("state") == "free" and cpus_free and not node.get("jobs") and not node.get("resv")


def _json_name(name: object, pattern: re.Pattern[str], where: str) -> Node:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise InputError(f"a node in {where} must have a name, but got {_short(name)}")
    return name


def _json_object(text: str, what: str) -> dict[str, object]:
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{what} cannot be read ({error.msg} at {where}); was the output cut short?") from None
    except (ValueError, RecursionError):
        raise InputError(f"{what} cannot be read: nested too deep or a number too long") from None
    if not isinstance(value, dict):
        raise InputError(f"{what} must be an object with nodes, but got {_short(value)}")
    return value


def _short(value: object) -> str:
    """A value of unknown size and content, shortened for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:77]!r}..."
    return "nothing" if value is None else repr(value)[:80]


_READERS: dict[Form, Callable[[str], NodeStates]] = {
    "sinfo": read_sinfo,
    "slurm-json": read_slurm_json,
    "pbs-json": read_pbs_json,
    "names": read_names,
}
