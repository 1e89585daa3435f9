"""A trainer spec describes one trainer, from `submit` to the controller and its store.

A `TrainerSpec` is checked when it is made, as far as possible without looking at files. `parse_spec` makes one from the
content of a file, a command line or a request, and reports what is wrong with it in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bftrainer.cluster.spec.names import LIKE_AN_ID, NAME
from bftrainer.core.curve import Curve
from bftrainer.elastic import protocol
from bftrainer.elastic.defaults import MOST_RANKS
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.util.suggest import unknown
from bftrainer.util.text import short_repr

Launcher = Literal["elastic", "ddp", "torchrun", "hosts"]

MOST_NODES = 100_000
MOST_ENV_BYTES = MOST_ARG_BYTES = 100_000
"""Linux refuses to start a program beyond about 128 kB."""
DEFAULT_MAX_NODES = 64
AGENTS_OWN = "agent"
"""The value of `python` for the interpreter that the agents run under."""
MOST_PARAMS, MOST_PARAM_BYTES = 100, 10_000
MOST_PRELOAD = 100
NO_PRELOAD = "none"
"""The value of `preload` by which nothing is imported ahead, not even what was learned."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_SHORT_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
_OURS = frozenset(
    {
        *(protocol.CHANNEL, protocol.WORKER, protocol.HOST, protocol.LOCAL_RANK, protocol.LOCAL_WORLD),
        *(variables.NODE, variables.URL, variables.SECRET),
    }
)
"""Variables by which agents and workers find each other. Users may not set them."""

_RULES: Mapping[str, str] = MappingProxyType(
    {
        "name": "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit",
        "script": "the path of a script, or `-m MODULE`",
        "args": "a list of texts",
        "nodes": "a number of nodes or a range such as 1-8",
        "min_nodes": f"a whole number from 1 to {MOST_NODES:,}",
        "max_nodes": f"a whole number from 1 to {MOST_NODES:,}",
        "weight": "a number above 0",
        "env": "a mapping of names to texts",
        "cwd": "the path of a folder",
        "python": "the path of a Python interpreter, or agent for the agents' own",
        "launcher": "one of elastic, ddp, torchrun, hosts",
        "curve": "points such as {nodes: [1, 2, 4], rates: [100, 190, 350]}",
        "up_s": "a number of seconds, 0 or more",
        "down_s": "a number of seconds, 0 or more",
        "work": "a whole number of samples above 0",
        "model": "a label of at most 200 characters",
        "max_restarts": "a whole number, 0 or more",
        "log_all_ranks": "true or false",
        "preload": f"names of modules with commas between them, a list of up to {MOST_PRELOAD}, or {NO_PRELOAD} alone",
        "ranks_per_node": f"a whole number from 1 to {MOST_RANKS}, or gpu for one per GPU of the node",
        "ranks": f"a whole number from 1 to {MOST_NODES:,}",
        "group": "a name as a trainer's, or empty",
        "params": "a mapping of at most 100 names to texts",
        "deadline": "a time in UTC such as 2026-03-01T08:00, or seconds since 1970",
    }
)
"""The rule for each key, used in error messages."""
KEYS = tuple(_RULES)


class CurvePoints(BaseModel):
    """A scaling curve as written in a spec: node counts and the samples per second at each."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    nodes: tuple[int, ...] = Field(max_length=4096)
    rates: tuple[float, ...] = Field(max_length=4096)


class TrainerSpec(BaseModel):
    """One trainer as its user describes it. In the input, `nodes` may replace `min_nodes` and `max_nodes`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    script: str = Field(min_length=1, max_length=4096)
    """A path, or `-m MODULE`."""
    name: str | None = None
    """None: the controller derives the name from the script (`names.default_name`)."""
    args: tuple[str, ...] = ()
    min_nodes: int = Field(1, ge=1, le=MOST_NODES)
    max_nodes: int = Field(DEFAULT_MAX_NODES, ge=1, le=MOST_NODES)
    weight: float = Field(1.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that override the agents' environment."""
    cwd: str = ""
    python: str = ""
    """The interpreter; empty: `submitted_python`, else the one that the agents run under, as for `AGENTS_OWN`."""
    submitted_python: str = Field("", max_length=4096)
    """The interpreter of the submitting environment. Commands and clients set it."""
    signature: str = Field("", max_length=100)
    """That its owner wants it to run (`owners.signatures`); empty where trainers do not run as their owners."""
    launcher: Launcher = "elastic"
    curve: CurvePoints | None = None
    """The user's estimate of its speed, a prior that measurements override."""
    up_s: float | None = Field(None, ge=0, le=86400)
    down_s: float | None = Field(None, ge=0, le=86400)
    work: int | None = Field(None, gt=0)
    """The total number of samples, if the script does not report it."""
    model: str = Field("", max_length=200)
    max_restarts: int = Field(5, ge=0, le=1_000_000)
    """How often a script that failed by itself is restarted before the trainer has failed; preemptions do not count."""
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS)] | Literal["gpu"] = "gpu"
    """How many processes it runs on each node; `gpu`: one per GPU of the node, or one if there is none."""
    ranks: int | None = Field(None, ge=1, le=MOST_NODES)
    """How many ranks its batch size was chosen for; None: 1, and for `ddp` those on its fewest nodes."""
    log_all_ranks: bool = False
    """Whether the output of all processes is collected, and not only that of the first one on each node."""
    preload: Annotated[tuple[str, ...], Field(max_length=MOST_PRELOAD)] = ()
    """Modules that agents import ahead, besides those they learn of: those of the user's own, say."""
    group: str = ""
    """The sweep or study that it belongs to. Trainers of one group are shown together."""
    deadline: float | None = Field(None, gt=0, le=1e11)
    """When its user wants it to be done, in seconds since 1970. It is shown, and changes no decision."""
    params: dict[str, str] = Field(default_factory=dict)
    """The values that a sweep or a study chose for it, for display. The script gets them by `args`."""

    @model_validator(mode="before")
    @classmethod
    def _nodes_as_a_range(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "nodes" not in given:
            return given
        rest = {key: value for key, value in given.items() if key != "nodes"}
        both = [key for key in ("min_nodes", "max_nodes") if key in rest]
        if both:
            raise ValueError(f"nodes and {both[0]} set the same thing: give one of them")
        least, most = node_range(given["nodes"])
        return {**rest, "min_nodes": least, "max_nodes": most}

    @field_validator("args", "env", "params", mode="before")
    @classmethod
    def _numbers_as_texts(cls, given: Any) -> Any:
        """Convert numbers to text: a file may have `["--epochs", 3]` instead of `["--epochs", "3"]`."""
        if isinstance(given, Mapping):
            return {key: _as_text(value) for key, value in given.items()}
        return tuple(_as_text(value) for value in given) if isinstance(given, list | tuple) else given

    @field_validator("log_all_ranks", mode="before")
    @classmethod
    def _yes_or_no(cls, given: Any) -> bool:
        """Take `true` and `false` also as texts: a YAML file has only those."""
        known = {True: True, False: False, "true": True, "false": False}
        if not isinstance(given, bool | str) or given not in known:
            raise ValueError(f"log_all_ranks must be {_RULES['log_all_ranks']}, but got {short_repr(given)}")
        return known[given]

    @field_validator("preload", mode="before")
    @classmethod
    def _some_modules(cls, given: Any) -> Any:
        """Take names with commas between them also as one text."""
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        bad = [name for name in names if not _is_module(name)] if isinstance(names, list | tuple) else [given]
        if not bad and NO_PRELOAD in names and len(names) > 1:
            bad = [",".join(names)]
        if bad:
            raise ValueError(f"preload must be {_RULES['preload']}, but got {short_repr(bad[0])}")
        return tuple(names)

    @field_validator("ranks_per_node", mode="before")
    @classmethod
    def _a_number_of_ranks(cls, given: Any) -> Any:
        """Convert a text such as `2`, as command lines and YAML files have it, to a number."""
        number = int(given) if isinstance(given, str) and _SHORT_NUMBER.fullmatch(given) else given
        if number == "gpu" or (type(number) is int and 1 <= number <= MOST_RANKS):
            return number
        raise ValueError(f"ranks_per_node must be {_RULES['ranks_per_node']}, but got {short_repr(given)}")

    @field_validator("ranks", mode="before")
    @classmethod
    def _ranks_as_a_number(cls, given: Any) -> Any:
        """Convert a text such as `4`, as YAML files have it, to a number."""
        number = int(given) if isinstance(given, str) and _SHORT_NUMBER.fullmatch(given) else given
        if number is not None and (type(number) is not int or not 1 <= number <= MOST_NODES):
            raise ValueError(f"ranks must be {_RULES['ranks']}, but got {short_repr(given)}")
        return number

    @field_validator("deadline", mode="before")
    @classmethod
    def _a_time(cls, given: Any) -> Any:
        """Convert a text such as 2026-03-01T08:00, in UTC unless it says otherwise, to seconds since 1970."""
        try:
            words = "no time" if isinstance(given, bool) else given
            time = datetime.fromisoformat(words) if isinstance(words, str) else words
        except ValueError:
            raise ValueError(f"deadline must be {_RULES['deadline']}, but got {short_repr(given)}") from None
        return time.replace(tzinfo=time.tzinfo or UTC).timestamp() if isinstance(time, datetime) else time

    @field_validator("name")
    @classmethod
    def _a_good_name(cls, name: str | None) -> str | None:
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(f"name must be {_RULES['name']}, but got {short_repr(name)}")
        return name

    @field_validator("group")
    @classmethod
    def _a_good_group(cls, group: str) -> str:
        if group and not NAME.fullmatch(group):
            raise ValueError(f"group must be {_RULES['name']}, but got {short_repr(group)}")
        return group

    @field_validator("params")
    @classmethod
    def _some_params(cls, params: dict[str, str]) -> dict[str, str]:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in params.items())
        if len(params) > MOST_PARAMS or size > MOST_PARAM_BYTES:
            most = f"at most {MOST_PARAMS} names and {MOST_PARAM_BYTES:,} bytes"
            raise ValueError(f"params must be {most}, but got {len(params):,} names and {size:,} bytes")
        return params

    @field_validator("script")
    @classmethod
    def _a_script_or_a_module(cls, script: str) -> str:
        if script == "-m" or script.startswith("-m "):
            module = script[3:].strip()
            if not _MODULE.fullmatch(module):
                raise ValueError(f"script must be `-m` and the name of a module, but got {short_repr(script)}")
            return f"-m {module}"
        if not script.strip():
            raise ValueError(f"script must be {_RULES['script']}, but got {short_repr(script)}")
        return script

    @field_validator("env")
    @classmethod
    def _an_environment(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not _ENV_NAME.fullmatch(name):
                rule = "a letter or underscore, then letters, digits and underscores"
                raise ValueError(f"env: a name must be {rule}, but got {short_repr(name)}")
            if name in _OURS:
                raise ValueError(f"env: {name} is set by BFTrainer itself: leave it out")
        size = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in env.items())
        if size > MOST_ENV_BYTES:
            raise ValueError(f"env must be at most {MOST_ENV_BYTES:,} bytes in all, but is {size:,}")
        return env

    @field_validator("args")
    @classmethod
    def _arguments(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        size = sum(len(arg.encode()) + 1 for arg in args)
        if size > MOST_ARG_BYTES:
            raise ValueError(f"args must be at most {MOST_ARG_BYTES:,} bytes in all, but are {size:,}")
        return args

    @model_validator(mode="after")
    def _together(self) -> TrainerSpec:
        if self.max_nodes < self.min_nodes:
            if "max_nodes" not in self.model_fields_set:
                raise ValueError(f"max_nodes is missing: min_nodes ({self.min_nodes}) is above its default")
            raise ValueError(f"max_nodes must be at least min_nodes ({self.min_nodes}), but got {self.max_nodes}")
        texts = {"script": [self.script], "args": self.args, "cwd": [self.cwd]}
        texts["python"] = [self.python, self.submitted_python]
        for key, values in {**texts, "env": self.env.values(), "model": [self.model]}.items():
            if any("\0" in value for value in values):
                raise ValueError(f"{key} must not hold NUL characters")
        if self.ranks is not None and self.launcher not in ("elastic", "ddp"):
            raise ValueError(f"ranks is for the launchers elastic and ddp, but launcher is {self.launcher}")
        if self.ranks is not None and protocol.RANKS in self.env:
            raise ValueError(f"ranks and env {protocol.RANKS} set the same thing: give one of them")
        try:
            self.prior_curve()
        except InputError as problem:
            raise ValueError(str(problem)) from None
        return self

    @property
    def argv(self) -> tuple[str, ...]:
        """The script and its arguments, as on the command line of `python`."""
        script = ("-m", self.script[3:]) if self.script.startswith("-m ") else (self.script,)
        return (*script, *self.args)

    @property
    def module(self) -> str | None:
        """The module to run; None if the script is a file."""
        return self.script[3:] if self.script.startswith("-m ") else None

    @property
    def identity(self) -> tuple[str, str]:
        """What trainers of one script have in common: the script, with its folder, and the interpreter."""
        where = _path(self.cwd, self.script) if self.module is None else f"{self.script} in {self.cwd}"
        return where, self.python or self.submitted_python

    def ranks_on(self, default: int) -> int:
        """Return how many processes it runs on a node. `default` is the node's own default."""
        return default if self.ranks_per_node == "gpu" else self.ranks_per_node

    @property
    def chosen_ranks(self) -> int | None:
        """How many ranks its batch size was chosen for; None if its script decides that."""
        if self.ranks is not None or self.launcher != "ddp":
            return self.ranks
        return self.min_nodes * (1 if self.ranks_per_node == "gpu" else self.ranks_per_node)

    def prior_curve(self) -> Curve | None:
        """Return the user's curve, if there is one."""
        if self.curve is None:
            return None
        curve = Curve.through(self.curve.nodes, self.curve.rates, "curve")
        if curve.rate(self.min_nodes) <= 0:
            raise InputError(f"curve: the rate at min_nodes ({self.min_nodes}) must be above 0")
        return curve

    def as_json(self) -> dict[str, Any]:
        """Return the spec as JSON, as a request or the store contains it and `parse_spec` reads it."""
        values = self.model_dump(mode="json")
        if self.python == AGENTS_OWN:
            values["python"] = ""
        if self.ranks_per_node == "gpu":
            del values["ranks_per_node"]  # controllers of version 0.1.0 do not know it
        for name in ("submitted_python", "signature", "log_all_ranks", "ranks", "preload", "deadline"):  # likewise
            if not getattr(self, name):
                del values[name]
        return values


def parse_spec(given: object, where: str = "") -> TrainerSpec:
    """Make a spec from the content of a file or a request. Any problem is one `InputError` that begins with `where`."""
    place = f"{where}: " if where else ""
    if not isinstance(given, Mapping):
        raise InputError(
            f"{place}a trainer must be a mapping of keys such as script and nodes, but got {short_repr(given)}"
        )
    try:
        spec = TrainerSpec.model_validate(dict(given))
    except ValidationError as problem:
        raise InputError(place + _said(problem)) from None
    if spec.name is not None and LIKE_AN_ID.fullmatch(spec.name):  # not in the model: older versions stored such names
        raise InputError(f"{place}name must not look like a trainer's id, as `t` and a number do, but got {spec.name}")
    return spec


def node_range(given: object) -> tuple[int, int]:
    """Return the least and most nodes of a text such as `4` or `1-8`. Raises ValueError."""
    match = _RANGE.fullmatch(str(given)) if isinstance(given, str | int) and not isinstance(given, bool) else None
    if match is None:
        raise ValueError(f"nodes must be {_RULES['nodes']}, but got {short_repr(given)}")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= MOST_NODES:
        raise ValueError(f"nodes must be 1 or more and at most {MOST_NODES:,}, but got {short_repr(given)}")
    if most < least:
        raise ValueError(
            f"nodes must be a range from the least to the most, but got {short_repr(given)}: {least} > {most}"
        )
    return least, most


def _is_module(name: object) -> bool:
    return isinstance(name, str) and _MODULE.fullmatch(name) is not None


def _as_text(value: object) -> object:
    """Convert a number to text. Other values are returned as they are, and refused if they are not text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _said(problem: ValidationError) -> str:
    """Describe the first problem in one line."""
    errors = problem.errors(include_url=False)
    # An unknown key is probably the reason for a missing one, so it is reported first.
    error = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    where = [str(part) for part in error["loc"]]
    key = where[0] if where else ""
    if error["type"] == "extra_forbidden":
        inside = "curve: " if len(where) > 1 else ""
        return inside + unknown("key", where[-1], ("nodes", "rates") if inside else KEYS)
    if error["type"] == "missing":
        return f"{key}: {where[1]} is missing" if len(where) > 1 else f"{key} is missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    inside = f" ({'.'.join(where)})" if len(where) > 1 else ""
    return f"{key} must be {_RULES.get(key, 'something else')}, but got {short_repr(error['input'])}{inside}"


@lru_cache(maxsize=4096)  # the controller asks for the identities of all trainers at every tick
def _path(folder: str, name: str) -> str:
    return str(PurePath(folder, name))
