"""`bftrainer serve` prepares the state folder and runs the controller.

It takes the folder's lock, reads or makes the secrets, opens the socket, and runs the controller until a signal or a
`drain` request. Everything that must be right before the first node is requested is checked here. A problem is reported
in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import getpass
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.config.load import CLIENT_FILE
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.controller.active import ControllerSettings
from bftrainer.cluster.controller.controller import Controller
from bftrainer.cluster.controller.output.logbook import Logbook
from bftrainer.cluster.controller.reconciler import Reconciler
from bftrainer.cluster.controller.restore import check_mode
from bftrainer.cluster.http.app import build
from bftrainer.cluster.http.limits import (
    KEEP_ALIVE_S,
    MOST_HEADER_BYTES,
    LimitedListener,
    TimedH11Protocol,
    TimedServer,
    most_connections,
)
from bftrainer.cluster.jobs.worker import JobSettings
from bftrainer.cluster.launchers import make_launchers
from bftrainer.cluster.launchers.base import StateLayout
from bftrainer.cluster.listening import ANY, LOOPBACK, ControllerAddress, choose_address, in_url, listen
from bftrainer.cluster.pools.registry import make_pool, node_addresses
from bftrainer.cluster.retention.stored import store_settings
from bftrainer.cluster.stopping import left_running
from bftrainer.cluster.store import event_logging
from bftrainer.cluster.store.environments import move_values
from bftrainer.cluster.store.state_folder import (
    FOLDER_KEY,
    LOCK_FILE,
    SECRET_FILE,
    STATE_ID_KEY,
    FolderIdentity,
    original_of,
)
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.cluster.store.tokens import LOCAL_TOKEN
from bftrainer.cluster.wire import tls
from bftrainer.cluster.wire.authority import OWN_AUTHORITY, own_identity, unencrypted
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes import variables
from bftrainer.scheduler import Scheduler
from bftrainer.util import locks
from bftrainer.util.files import replace_file
from bftrainer.util.net import is_loopback

_HOST_KEY, _PORT_KEY = "host", "port"
"""Keys in the store of the address at which agents of an earlier controller look for one."""
_START_KEY = "start"
"""Key in the store of the number of the last start."""
REWRITTEN_BYTES = 10**9
"""Largest database of an older version that is rewritten at the start, which takes seconds."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running controller, as reported to its starter."""

    url: str
    pool: str
    state: Path


async def serve(
    config: Config,
    *,
    dry_run: bool = False,
    drain: bool | None = None,
    up: Callable[[Running], None] = lambda running: None,
) -> None:
    """Run a controller until SIGTERM, SIGINT or a `drain` request.

    `drain`: give all nodes back at the end; None: only if they are virtual nodes of this machine. `up` is called once
    the controller runs.
    """
    folder = prepare_folder(config.state)
    with (
        _locked(folder),
        event_logging.to_file(config.log, folder),
        Store.open(folder / FILE) as store,
    ):
        check_mode(store, own=config.users.own)
        move_values(folder / FILE)
        if why := store.make_shrinkable(REWRITTEN_BYTES):
            complain(f"{store.path} cannot shrink: {why}; stop the controller once and call `bftrainer prune`")
        listening, address = await _listen(config, store)
        with listening:
            store_settings(store, config, time.time())
            prepared = _prepare(config, folder, store, listening, address)
            controller = _build(config, prepared, store, dry_run=dry_run)
            give_back = config.pool.kind == "local" if drain is None else drain
            await _run(controller, prepared, listening, give_back=give_back, up=up)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Where a controller runs: its folder, its address and its credentials."""

    folder: Path
    host: str
    url: str
    identity: tls.Identity | None
    secret: str = field(repr=False)
    """Agents join with it."""
    state_id: str

    @property
    def authority(self) -> str:
        """File of certificates by which agents and commands verify the controller; empty: the system's."""
        return self.identity.authority if self.identity is not None else ""

    @property
    def authority_of_agents(self) -> str:
        """The same for agents. The controller's own authority is given as text: not all nodes see the state folder."""
        own = self.folder / OWN_AUTHORITY
        return tls.one_line(own) if self.authority == str(own) else self.authority


def _prepare(
    config: Config, folder: Path, store: Store, listening: LimitedListener, address: ControllerAddress
) -> _Prepared:
    """Read or make the controller's certificate, its secrets and its `client.json`."""
    bound, port = listening.getsockname()[:2]
    host = bound if address.host == address.listen else address.host
    name = config.api.name or in_url(host)
    identity = _identity(config, folder, bound, name)
    url = f"{'http' if identity is None else 'https'}://{name}:{port}"
    state_id = take_identity(folder, store)
    prepared = _Prepared(folder, host, url, identity, _secret(folder / SECRET_FILE), state_id)
    token = make_client_file(folder, store, url, prepared.authority)
    event_logging.hidden.hide(prepared.secret, token)
    store.keep(_PORT_KEY, port)
    store.keep(_HOST_KEY, host)
    store.number_after(StateLayout(folder, state_id).last_number())
    return prepared


def take_identity(folder: Path, store: Store) -> str:
    """Return the id of the folder's processes, and store it with the folder's identity. A copy gets its own id."""
    original = original_of(folder, store.kept(FOLDER_KEY))
    if original is not None:
        complain(
            f"{folder} is a copy of {original.path} on {original.host}: it is served under an id of its own. Agents, "
            "pilots and workers of the original are left alone; let one of the two controllers run, not both"
        )
    state_id = str((store.kept(STATE_ID_KEY) if original is None else None) or secrets.token_hex(8))
    store.keep(STATE_ID_KEY, state_id)
    store.keep(FOLDER_KEY, FolderIdentity.of(folder).as_json())
    return state_id


def next_start(store: Store) -> int:
    """Return the number of this start, and store it. The clock makes it rise also after the restore of a back-up."""
    start = max(int(store.kept(_START_KEY) or 0) + 1, int(time.time()))
    store.keep(_START_KEY, start)
    return start


def _identity(config: Config, folder: Path, bound: str, name: str) -> tls.Identity | None:
    """Return the controller's certificate; None without TLS."""
    api = config.api
    identity = tls.identity_of(api.certificate, api.key, api.authority, name)
    if identity is not None or (is_loopback(bound) and not config.users.own):
        return identity
    if api.tls:
        addresses = (bound,) if bound not in ANY else ()
        return own_identity(folder, (name, *addresses, LOOPBACK), (socket.gethostname(), socket.getfqdn(), "localhost"))
    complain(unencrypted(bound, config.users.own))
    return None


def _build(config: Config, prepared: _Prepared, store: Store, *, dry_run: bool) -> Controller:
    """Build the controller with its pool, its launchers and its scheduler."""
    folder, state_id, every_s = prepared.folder, prepared.state_id, config.trainers.snapshot_every_s
    launchers = make_launchers(folder, state_id, prepared.host, store.keep, store.kept, every_s, next_start(store))
    settings = ControllerSettings(
        reattach_s=config.agents.reattach_s,
        reconnect_s=config.agents.reconnect_s,
        silence_s=config.agents.silence_s,
        default_up_s=config.trainers.default_up_s,
        default_down_s=config.trainers.default_down_s,
        max_weight=config.policy.max_weight,
        dry_run=dry_run,
        own_users=config.users.own,
        job=JobSettings(
            leave_grace_s=config.agents.leave_grace_s,
            finish_grace_s=config.trainers.finish_grace_s,
            stuck_after_s=config.trainers.stuck_after_s,
            most_breaks=config.trainers.max_broken_groups,
            restart_backoff_s=config.trainers.restart_backoff_s,
        ),
    )
    cluster = Reconciler(store, Scheduler(policy_of(config)), settings, launchers)
    pool = make_pool(config.pool.kind, config.pool.settings, folder)

    def logbook(trainer: str) -> Logbook:
        return Logbook(StateLayout(folder, state_id).folder(trainer), config.trainers.max_log_mb << 20)

    agents = {variables.URL: prepared.url, variables.SECRET: prepared.secret, variables.STATE_ID: state_id}
    agents |= {tls.CA: prepared.authority_of_agents} if prepared.authority else {}
    if config.users.own:
        del agents[variables.SECRET]  # each agent gets a secret of its own
    return Controller(cluster, pool, config, logbook, agents)


async def _run(
    controller: Controller,
    prepared: _Prepared,
    listening: LimitedListener,
    *,
    give_back: bool,
    up: Callable[[Running], None],
) -> None:
    """Run the controller and its web server until there is a reason to end."""
    config = controller.config
    app = build(controller, prepared.secret)
    server = _web_server(app, prepared.identity)
    listening.set_inheritable(False)
    listening.most = most_connections()
    web = asyncio.create_task(server.serve(sockets=[listening]))
    stop = _on_signals()
    try:
        await controller.start()
        app.state.api.mark_open()
        up(Running(prepared.url, config.pool.kind, prepared.folder))
        await _until(stop, controller, web)
    finally:
        app.state.api.mark_ending()
        drain = (controller.draining or give_back) and not controller.failed.done()
        left = "" if drain else left_running(controller.cluster, controller.pool.describe(), controller.give_up_s)
        await controller.stop(drain=drain)
        if left:
            complain(left)
        server.should_exit = True
        await asyncio.gather(web, return_exceptions=True)
    if controller.failed.done() and (problem := controller.failed.exception()) is not None:
        raise problem


def _web_server(app: FastAPI, identity: tls.Identity | None) -> TimedServer:
    return TimedServer(
        uvicorn.Config(
            app,
            ssl_certfile=identity.certificate if identity is not None else None,
            ssl_keyfile=identity.key if identity is not None else None,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="websockets-sansio",
            ws_ping_interval=None,
            ws_max_size=16 << 20,
            http=TimedH11Protocol,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
    )


async def _until(stop: asyncio.Event, controller: Controller, web: asyncio.Task[None]) -> None:
    """Wait for a reason to end: a signal, a failure, the end of the web server, or a `drain` request."""
    stopping = asyncio.create_task(stop.wait())
    try:
        while not controller.draining:
            reasons: set[asyncio.Future[Any]] = {stopping, web, controller.failed}
            done, _ = await asyncio.wait(reasons, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
    finally:
        stopping.cancel()


def _on_signals() -> asyncio.Event:
    """Return an event that the first signal sets. The second signal ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked(signum: int) -> None:
        if stop.is_set():
            os._exit(128 + signum)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked, signum)
    return stop


def prepare_folder(folder: Path) -> Path:
    """Make the state folder, readable only by its owner, and return its resolved path."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable", str(folder))
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o700)
    except OSError as problem:
        raise BFTrainerError(
            f"state folder {folder}: {problem.strerror}. Choose another one by --state or BFTRAINER_STATE."
        ) from None
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / LOCK_FILE
    try:
        lock = locks.take_lock(path, wait_s=0.3)  # `doctor` holds the lock for an instant
    except OSError as problem:
        raise InputError(
            f"the state folder cannot be locked: {problem.strerror}. Its file system must have flock (Lustre: mount it "
            "with -o flock), or choose another folder by --state or BFTRAINER_STATE."
        ) from None
    if lock is None:
        pid = locks.read_pid(path) or "?"
        raise BFTrainerError(f"a controller (pid {pid}) already uses the state folder {folder}")
    try:
        locks.write_pid(lock, os.getpid())
        yield
    finally:
        os.close(lock)


async def _listen(config: Config, store: Store) -> tuple[LimitedListener, ControllerAddress]:
    """Choose the address of the controller and listen on it."""
    nodes = await node_addresses(config.pool.kind, config.pool.settings)
    before, port = str(store.kept(_HOST_KEY, "")), config.server.port
    address = await asyncio.to_thread(
        choose_address, config.server.host, nodes, name=config.api.name, before=before
    )  # looking up names may take long
    encrypted = config.api.tls or config.api.certificate
    tokens = any(token.name != LOCAL_TOKEN and token.revoked is None for token in store.tokens.all())
    if not (is_loopback(address.listen) or encrypted or tokens):
        raise InputError(
            f"refusing to listen on {address.listen}, where others can reach it, without encryption and without "
            "tokens: make one with `bftrainer token create NAME`, or set server.host to 127.0.0.1"
        )
    # Agents of an earlier controller look for a controller at its port.
    ports = tuple(dict.fromkeys((port or int(store.kept(_PORT_KEY, 0)), port)))
    return listen(address.listen, ports), address


def _secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        secret = secrets.token_urlsafe(32)
        replace_file(path, secret + "\n")
        return secret


def make_client_file(folder: Path, store: Store, url: str, authority: str) -> str:
    """Write the file by which commands on this machine find the controller, and return the token that they use."""
    path = folder / CLIENT_FILE
    token = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        token = str(json.loads(path.read_text()).get("token", ""))
    if token and not store.tokens.knows(token):
        aside = next(one for n in itertools.count(1) if not (one := path.with_name(f"{path.name}.{n}")).exists())
        path.rename(aside)
        complain(f"{path} had the address and the token of another controller: it is now {aside}")
    if not token or store.tokens.check(token) is None:
        token = "bft_" + secrets.token_urlsafe(32)
        store.tokens.adopt(token, name=LOCAL_TOKEN, owner=getpass.getuser(), role="admin", time=time.time())
    known_by = {"authority": authority} if authority else {}
    replace_file(path, json.dumps({"url": url, "token": token, **known_by}) + "\n")
    return token


def complain(message: str) -> None:
    """Print a warning for the user who started the controller."""
    print(f"bftrainer: {message}", file=sys.stderr, flush=True)
