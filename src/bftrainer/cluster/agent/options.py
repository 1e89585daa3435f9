"""Agent options are resolved from the command line, else from the environment.

A pool passes URL, secret and node in the environment, or as lines on standard input where a remote shell does not pass
variables on.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bftrainer.cluster.wire import messages, tls
from bftrainer.cluster.wire.authority import OWN_AUTHORITY
from bftrainer.elastic.defaults import MOST_RANKS
from bftrainer.errors import InputError
from bftrainer.processes import variables
from bftrainer.util.net import is_loopback

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The options as given on the command line; None: not given."""

    url: str | None = None
    node: str | None = None
    host: str | None = None
    secret_file: Path | None = None
    folder: Path | None = None
    ca: Path | None = None
    slots: str | None = None


@dataclass(frozen=True, slots=True)
class ResolvedAgent:
    """An agent's settings, complete and checked."""

    url: str
    """The address of the websocket to connect to."""
    node: str
    host: str
    """The address under which other nodes reach this one."""
    secret: str = field(repr=False)
    folder: Path | None = None
    """The folder for the workers' output; None: a private folder that is removed at the end."""
    authority: str = ""
    """A file of certificates to verify the controller with; empty: the system's."""
    slots: int = 0
    """How many ranks a worker has here by default; 0: one per GPU, or one if there is none."""
    owner: str = ""
    """The owner whose signed trainers this agent starts, and no others; empty: those of all owners."""

    @property
    def on_loopback(self) -> bool:
        """Whether the node's address is a loopback address. If so, the other nodes are on this machine, too."""
        return is_loopback(self.host)


def resolve(options: AgentOptions, environment: MutableMapping[str, str]) -> ResolvedAgent:
    """Return the settings of an agent.

    The secret is removed from the environment, so that processes started by the agent do not see it.
    """
    secret = environment.pop(variables.SECRET, "")
    environment.pop(
        variables.TOKEN, None
    )  # the user's own token, from the shell that started the controller or this agent: workers do not need it
    if options.secret_file is not None:
        try:
            secret = options.secret_file.read_text().strip()
        except (OSError, ValueError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
            raise InputError(f"cannot read the secret: {options.secret_file}: {reason}") from None
    if not secret:
        raise InputError(f"there is no secret to join with: give --secret-file or set {variables.SECRET}")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise InputError("the secret must be one word of ASCII characters, but it has others")
    url, loopback = _websocket(options.url or environment.get(variables.URL) or "")
    node = options.node or environment.get(variables.NODE) or socket.gethostname()
    if not node.isprintable() or len(node) > 255 or node != node.strip():
        raise InputError(f"`--node` must be a name of at most 255 printable characters, but got {node[:300]!r}")
    host = options.host or ("127.0.0.1" if loopback else socket.gethostname())
    slots = _slots(options.slots, environment)
    folder = options.folder.absolute() if options.folder is not None else None
    if folder is not None:
        _make_private(folder)
    owner = environment.pop(variables.OWNER, "")
    return ResolvedAgent(url, node, host, secret, folder, _authority(options, environment), slots, owner)


def read_environment(lines: Iterable[str], environment: MutableMapping[str, str]) -> None:
    """Read variables from lines `NAME=value`, up to an empty line, into `environment`."""
    for line in lines:
        text = line.rstrip("\r\n")
        if not text:
            return
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()) or "\0" in value:
            raise InputError("standard input must have lines NAME=value and then an empty line, but one differs")
        environment[name] = value


def _slots(option: str | None, environment: MutableMapping[str, str]) -> int:
    """Return the number of ranks that was given, or 0. Workers do not see the variable: it is about this agent."""
    given = environment.pop(variables.SLOTS, "")
    name, text = ("`--slots`", option) if option is not None else (variables.SLOTS, given)
    if option is None and not given:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or not 1 <= int(text) <= MOST_RANKS:
        raise InputError(f"{name} must be a whole number from 1 to {MOST_RANKS}, but got {text[:100]!r}")
    return int(text)


def _authority(options: AgentOptions, environment: Mapping[str, str]) -> str:
    """Return the certificates to verify the controller with: those given, else those beside the file of the secret."""
    if options.ca is not None:
        tls.client_context(str(options.ca), "--ca")
        return str(options.ca)
    if given := environment.get(tls.CA):
        return given
    beside = options.secret_file.parent / OWN_AUTHORITY if options.secret_file is not None else None
    return str(beside) if beside is not None and beside.is_file() else ""


def _websocket(url: str) -> tuple[str, bool]:
    """Return the websocket address for a controller's URL, and whether it is on this machine."""
    if not url:
        raise InputError(
            "the address of the controller is missing: give --url or set "
            f"{variables.URL}, such as http://127.0.0.1:8765"
        )
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is no number
        scheme, host = _SCHEMES[parts.scheme], parts.hostname or ""
    except (KeyError, ValueError):
        scheme, host = "", ""
    if not host:
        raise InputError(f"`--url` must be such as http://127.0.0.1:8765, but got {url!r}")
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{messages.PATH}", is_loopback(host)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"`--folder` must be a folder to write to: {folder}: {problem.strerror}") from None
