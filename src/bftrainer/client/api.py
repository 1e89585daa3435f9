"""HTTP API client with one method per endpoint of the controller; answers are plain JSON.

The commands use it, and users' programs may too. `find_controller` looks up the controller's address. Every failure is
raised as a `BFTrainerError` with a one-line message.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from bftrainer.cluster.config.load import CLIENT_FILE, DATABASE_FILE
from bftrainer.cluster.owners import signatures
from bftrainer.cluster.owners.folders import own_home
from bftrainer.cluster.wire import tls
from bftrainer.cluster.wire.api import (
    BeliefDetail,
    BeliefView,
    BestView,
    EtaAnswer,
    NodeView,
    ResultsView,
    StatusView,
    TrainerDetail,
    TrainerView,
)
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.util.text import one_line

TOKEN = variables.TOKEN
"""Environment variable with the user's token."""

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CURVE = re.compile(r"c[1-9][0-9]{0,17}")
_CONNECT_S = 5.0
_ANSWER_S = 30.0


class UnreachableError(BFTrainerError):
    """Raised when no controller answers for now: one that is being restarted may answer later."""


class UntrustedError(BFTrainerError):
    """Raised when a server answers but cannot prove that it is the controller."""


class RefusedError(BFTrainerError):
    """Raised when the controller answered and refused the request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.exit_code = 2 if 400 <= status < 500 else 1


@dataclass(frozen=True, slots=True)
class Address:
    """URL of a controller, and the credentials for it."""

    url: str
    token: str = field(default="", repr=False)
    source: str = ""
    """Where the URL came from, for messages."""
    authority: str = ""
    """File of certificates to verify the controller with over https; empty: the system's certificates."""

    def verification(self) -> ssl.SSLContext | bool:
        """httpx's `verify`: how to check the controller's certificate."""
        return tls.client_context(self.authority, tls.CA) if self.url.startswith("https:") else True


def find_controller(
    state: Path, url: str | None = None, token: str | None = None, env: Mapping[str, str] | None = None
) -> Address:
    """Find a controller: from the arguments, else the environment, else `client.json` in the state folder.

    A token from `client.json` is sent only to the controller of `client.json`, whatever other URL is given.
    """
    env = os.environ if env is None else env
    chosen, source = (url, "--url") if url else (env.get(variables.URL), f"${variables.URL}")
    token = token or env.get(TOKEN) or ""
    authority = env.get(tls.CA) or ""
    path = state / CLIENT_FILE
    if chosen and token and (authority or not chosen.startswith("https:")):
        return Address(_checked(chosen, source), token, source, authority)
    try:
        found = json.loads(path.read_text())
        file_url, file_token, file_authority = found["url"], found["token"], found.get("authority", "")
        if not (isinstance(file_url, str) and isinstance(file_token, str) and isinstance(file_authority, str)):
            raise TypeError
    except FileNotFoundError:
        if not chosen:
            raise UnreachableError(
                f"no controller is known in {state}: start one with `bftrainer serve`, or name it with --url or --state"
            ) from None
        return Address(_checked(chosen, source), token, source, authority)
    except OSError as problem:
        if chosen:
            return Address(_checked(chosen, source), token, source, authority)
        raise BFTrainerError(f"{path}: {problem.strerror or problem}; is it another user's?") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        if chosen and token:
            return Address(_checked(chosen, source), token, source, authority)
        raise BFTrainerError(f"{path} is damaged: remove it and restart `bftrainer serve`, which writes it") from None
    if not chosen or chosen.rstrip("/") == file_url.rstrip("/"):
        return Address(_checked(file_url, str(path)), token or file_token, str(path), authority or file_authority)
    return Address(_checked(chosen, source), token, source, authority)


def _checked(url: str, source: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or not url.isascii() or not url.isprintable():
        raise InputError(f"{source}: must be a URL such as http://127.0.0.1:8765, but got {url!r:.80}")
    return url.rstrip("/")


class ApiClient:
    """A connection to a controller. Close it, or use it in a `with`."""

    def __init__(self, address: Address, timeout_s: float = _ANSWER_S) -> None:
        self.address = address
        headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
        if not address.token.isascii() or not address.token.isprintable():
            raise InputError(f"{TOKEN}: must be a token as `bftrainer token create` prints it")
        try:
            # Proxies are for external hosts; a controller is on this machine or in this cluster.
            self._http = httpx.Client(
                base_url=address.url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
                trust_env=False,
                verify=address.verification(),
                follow_redirects=False,
            )
        except (httpx.InvalidURL, ValueError) as problem:
            raise InputError(f"{address.source or 'url'}: must be a URL, but got {address.url!r}: {problem}") from None

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def health(self) -> dict[str, Any]:
        """Whether the controller is up, and its version."""
        return self._ask("GET", "/v1/health")

    def status(self) -> StatusView:
        """The pool, the policy, the trainers and the totals."""
        return cast(StatusView, self._ask("GET", "/v1/status"))

    def me(self) -> dict[str, Any]:
        """The caller's identity, limits and current use."""
        return self._ask("GET", "/v1/me")

    def trainers(self, *, state: str = "", all: bool = False) -> list[TrainerView]:  # noqa: A002 - the API's word
        """Rows of trainers that are unfinished or finished within the last hour; with `all`, of all trainers ever."""
        found = self._ask("GET", "/v1/trainers", {"state": state or None, "all": "true" if all else None})
        return cast(list[TrainerView], found.get("trainers", []))

    def trainer(self, ref: str) -> TrainerDetail:
        """One trainer in detail, by id or name."""
        return cast(TrainerDetail, self._ask("GET", f"/v1/trainers/{_ref(ref)}"))

    def history(self, ref: str) -> dict[str, Any]:
        """A trainer's reports over time, and its newest rescales."""
        return self._ask("GET", f"/v1/trainers/{_ref(ref)}/history")

    def results(self, ref: str) -> ResultsView:
        """The last metrics of a trainer, and the files in its output folder."""
        return cast(ResultsView, self._ask("GET", f"/v1/trainers/{_ref(ref)}/results"))

    def best(self, group: str, by: str, *, direction: str | None = None, limit: int | None = None) -> BestView:
        """The trainers of a group, the best by a metric first."""
        if not _REF.fullmatch(group):
            raise InputError(f"a group must be named as in `bftrainer status`, but got {group!r:.80}")
        query = {"by": by, "direction": direction, "limit": limit}
        return cast(BestView, self._ask("GET", f"/v1/groups/{group}/best", query))

    def submit(self, spec: Mapping[str, Any]) -> TrainerView:
        """Queue a trainer, described as by `TrainerSpec.as_json`, and return its row."""
        try:
            return cast(TrainerView, self._ask("POST", "/v1/trainers", body=spec))
        except RefusedError as refused:
            if refused.status == signatures.NOT_SIGNED and signatures.FIELD not in spec:
                # Agents of this controller start only what the owner has signed: this process's user is the owner.
                key = signatures.read_key(own_home(), make=True)
                return self.submit({**spec, signatures.FIELD: signatures.sign(spec, key)})
            if "submitted_python" not in spec or "submitted_python" not in str(refused):
                raise
        # A controller of version 0.1.0 knows only the agents' interpreter or `python`.
        return self.submit({key: value for key, value in spec.items() if key != "submitted_python"})

    def eta(
        self,
        refs: Sequence[str] = (),
        *,
        group: str | None = None,
        specs: Sequence[Mapping[str, Any]] = (),
        nodes: str | None = None,
    ) -> EtaAnswer:
        """When trainers, a group, or trainers that are not submitted will be done. `nodes`: if they had so many."""
        asked: dict[str, Any] = {"trainers": [_ref(ref) for ref in refs], "specs": list(specs)}
        asked |= {"group": group} if group else {}
        asked |= {"nodes": nodes} if nodes else {}
        return cast(EtaAnswer, self._ask("POST", "/v1/eta", body=asked))

    def curves(self) -> list[BeliefView]:
        """What was learned of scripts, those that were learned about last first."""
        return cast(list[BeliefView], self._ask("GET", "/v1/curves").get("curves", []))

    def curve(self, curve: str) -> BeliefDetail:
        """What was learned of one script, by the id of its row in `curves`."""
        return cast(BeliefDetail, self._ask("GET", f"/v1/curves/{_curve(curve)}"))

    def forget_curve(self, curve: str) -> BeliefView:
        """Forget what was learned of a script, and return its row."""
        return cast(BeliefView, self._ask("DELETE", f"/v1/curves/{_curve(curve)}"))

    def cancel(self, ref: str) -> TrainerView:
        """End a trainer and return its row. A trainer that has ended stays as it is."""
        return cast(TrainerView, self._ask("POST", f"/v1/trainers/{_ref(ref)}/cancel"))

    def prune(
        self, refs: Sequence[str], *, mine: bool = False, older_than_s: float | None = None, dry_run: bool = False
    ) -> dict[str, Any]:
        """Remove files of finished trainers, and return which and how many bytes."""
        named = [_ref(ref) for ref in refs]
        wanted = {"trainers": named, "mine": mine, "older_than_s": older_than_s, "dry_run": dry_run}
        return self._ask("POST", "/v1/prune", body=wanted)

    def logs(
        self, ref: str, *, offset: int | None = None, limit: int | None = None, tail: int | None = None
    ) -> dict[str, Any]:
        """Lines of a trainer's log from a byte offset on, or its last `tail` lines, and the next offset."""
        return self._ask("GET", f"/v1/trainers/{_ref(ref)}/logs", {"offset": offset, "limit": limit, "tail": tail})

    def nodes(self) -> list[NodeView]:
        """The nodes in the pool."""
        return cast(list[NodeView], self._ask("GET", "/v1/nodes").get("nodes", []))

    def events(
        self, *, after: int | None = None, limit: int = 100, trainer: str = "", kind: str = ""
    ) -> dict[str, Any]:
        """Events after a sequence number, or the newest ones; and the last sequence number."""
        ref = _ref(trainer) if trainer else None
        return self._ask("GET", "/v1/events", {"after": after, "limit": limit, "trainer": ref, "kind": kind or None})

    def pause(self) -> dict[str, Any]:
        """Stop harvesting: all nodes are given back at once."""
        return self._ask("POST", "/v1/pause")

    def resume(self) -> dict[str, Any]:
        """Resume harvesting after `pause`."""
        return self._ask("POST", "/v1/resume")

    def drain(self) -> dict[str, Any]:
        """Make the controller exit together with all of its agents."""
        return self._ask("POST", "/v1/drain")

    def _ask(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        params = {key: value for key, value in (query or {}).items() if value is not None}
        try:
            answer = self._http.request(method, path, params=params, json=body)
        except httpx.TimeoutException:
            raise UnreachableError(
                f"the controller at {self._where()} does not answer in time: try again; if it lasts, see its serve.log"
            ) from None
        except httpx.TransportError as problem:
            raise self._unreachable(problem) from None
        except UnicodeEncodeError:
            raise InputError("the request must be valid Unicode") from None
        return self._read(answer)

    def _unreachable(self, problem: httpx.TransportError) -> BFTrainerError:
        if wrong := tls.untrusted(problem):
            return UntrustedError(
                f"the certificate of the controller at {self._where()} cannot be verified: {wrong}; set {tls.CA} to "
                "the file of its authority (api.authority)"
            )
        what = "" if isinstance(problem, httpx.ConnectError) else f" ({one_line(problem)[:120]})"
        source = Path(self.address.source)
        served_here = source.name == CLIENT_FILE and source.with_name(DATABASE_FILE).is_file()
        advice = "start one with `bftrainer serve`" if served_here else "ask its operator whether it runs"
        return UnreachableError(f"no controller answers at {self._where()}{what}: {advice}")

    def _where(self) -> str:
        source = self.address.source
        return self.address.url + (f" (from {source})" if source and source != "--url" else "")

    def _read(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            found = answer.json(parse_constant=lambda _: None)  # NaN is not JSON, and could not be printed as JSON
        except ValueError:
            found = None
        if answer.status_code == 401:
            hint = f"set {TOKEN} to one from `bftrainer token create`"
            what = "does not know this token" if self.address.token else "requires a token"
            said = found.get("error", "") if isinstance(found, dict) else ""
            if self.address.token and "expired" in said:
                raise RefusedError(401, f"the controller at {self._where()} refuses this token: {said}")
            raise RefusedError(401, f"the controller at {self._where()} {what}: {hint}")
        if answer.status_code >= 500 and not isinstance(found, dict):
            raise RefusedError(
                answer.status_code,
                f"the controller at {self._where()} failed (HTTP status {answer.status_code}): see its serve.log",
            )
        if not isinstance(found, dict):
            raise RefusedError(502, f"the server at {self._where()} is not a BFTrainer controller")
        if answer.is_success:
            return cast(dict[str, Any], found)
        said = found.get("error") or found.get("detail") or f"HTTP status {answer.status_code}"
        raise RefusedError(answer.status_code, one_line(said)[:2000])


def _ref(ref: str) -> str:
    if not _REF.fullmatch(ref):
        raise InputError(f"a trainer must be named by its id or its name, but got {ref!r:.80}")
    return ref


def _curve(curve: str) -> str:
    if not _CURVE.fullmatch(curve):
        raise InputError(f"a curve must be named by its id in `bftrainer curves`, such as c3, but got {curve!r:.80}")
    return curve
