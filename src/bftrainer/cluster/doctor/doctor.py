"""The doctor examines a state folder: database, secrets, disk, controller and orphaned processes.

`examine` only reads, so it can run beside a controller or on the folder of a killed one. `bftrainer doctor` prints its
findings.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bftrainer.cluster.config.load import CLIENT_FILE
from bftrainer.cluster.doctor.invariants import (
    EVENT_KINDS,
    DoctorFinding,
    history,
    log_is_whole,
    summed,
    trainers_agree,
    workers_agree,
)
from bftrainer.cluster.owners.accounts import Accounts, account_warnings
from bftrainer.cluster.owners.join_secrets import KEY_FILE
from bftrainer.cluster.owners.modes import ACCOUNT_KEY, MODE_KEY, ROOT_ADVICE, misfit, root_risk
from bftrainer.cluster.pools.slurm import callbacks
from bftrainer.cluster.pools.slurm.submit import failing
from bftrainer.cluster.store import migrations
from bftrainer.cluster.store.environments import FOLDER as ENVIRONMENTS
from bftrainer.cluster.store.environments import has_values, still_holds_values
from bftrainer.cluster.store.events import ServeStarted, ServeStopped, kinds_of
from bftrainer.cluster.store.rows import NodeRow, TrainerRow, WorkerRow
from bftrainer.cluster.store.state_folder import FOLDER_KEY, LOCK_FILE, SECRET_FILE, STATE_ID_KEY, original_of
from bftrainer.cluster.store.store import FILE, Store
from bftrainer.cluster.wire import authority
from bftrainer.elastic.protocol import WORKER
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.variables import STATE_ID
from bftrainer.util.locks import is_locked

ENOUGH_BYTES = 1_000_000_000

_SECRETS = (CLIENT_FILE, SECRET_FILE, KEY_FILE, *authority.KEYS)
_PROC = Path("/proc")
_OUTPUT = re.compile(r"/(t[0-9]+-[0-9]+)\.log(?: \(deleted\))?")


@dataclass(frozen=True, slots=True)
class Found:
    """A process whose environment says that it is a worker of this state folder."""

    pid: int
    worker: str


def examine(state_folder: Path, accounts: Accounts | None = None) -> list[DoctorFinding]:
    """Return all findings about a state folder, good and bad. `InputError` if there is no database.

    `accounts`: those of owners, as the configuration says.
    """
    path = state_folder / FILE
    if not path.is_file():
        raise InputError(
            f"{state_folder}: there is no {FILE} here; name the state folder of a controller with --state "
            "(or start one: bftrainer serve)"
        )
    findings = summed("only its owner can read the state folder and its secrets", _modes(state_folder))
    findings += summed("there is room on the disk", _room(state_folder))
    alive = controller_runs(state_folder)
    findings.append(
        DoctorFinding("ok", "a controller runs on this state" if alive else "no controller runs on this state")
    )
    try:
        with Store.open(path, read_only=True) as store:
            findings += _database(store, alive)
            if accounts is not None and store.kept(MODE_KEY) == "own":
                account_findings = _accounts(store, accounts, state_folder.stat().st_uid)
                findings += summed("owners have accounts of their own", account_findings)
    except BFTrainerError as problem:
        findings.append(DoctorFinding("error", str(problem)))
    return findings


def controller_runs(state_folder: Path) -> bool:
    """Return whether a controller holds the lock of the folder."""
    try:
        return is_locked(state_folder / LOCK_FILE)
    except OSError:  # a file system without locks
        return False


def _database(store: Store, alive: bool) -> Iterator[DoctorFinding]:
    def checked(good: str, check: Callable[[], Iterable[DoctorFinding]]) -> list[DoctorFinding]:
        try:
            return summed(good, check())
        except BFTrainerError as problem:  # a damaged page or invalid JSON: the other checks may still work
            return [DoctorFinding("error", str(problem), "stop the controller and replace the file by a back-up")]

    # Processes are read before rows: a process that is a worker by now has its row by then.
    state_id, folder = store.kept(STATE_ID_KEY), store.kept(FOLDER_KEY)
    original = original_of(store.path.parent, folder)
    is_original = folder is not None and original is None
    processes = list(worker_processes(str(state_id))) if state_id and is_original else []
    with store.transaction():
        yield DoctorFinding("ok", f"the schema version is {len(migrations.MIGRATIONS)}, the newest")
        yield from checked(
            "the database file is sound",
            lambda: (
                DoctorFinding("error", what, "stop the controller and replace the file by a back-up")
                for what in store.problems()
            ),
        )
        try:
            trainers, workers, here = store.trainers(), store.workers(), store.nodes()
            span, newest = store.event_span(), store.events(limit=1)
        except BFTrainerError as problem:
            yield DoctorFinding("error", str(problem), "stop the controller and replace the file by a back-up")
            return
        now = time.time() if alive or not newest else newest[0].time
        yield from summed(f"{len(trainers)} trainers make sense", trainers_agree(trainers))
        running = [worker for worker in workers if worker.ended is None]
        yield from summed(
            f"{len(running)} running workers have a trainer and a node each",
            workers_agree(trainers, workers, here, now),
        )
        yield from summed(f"{span.count} events are without a gap", log_is_whole(span))
        yield from checked(
            "the events agree with one another and with what is stored",
            lambda: history(store.all_events(EVENT_KINDS), trainers, trimmed=span.trimmed > 0),
        )
        yield from summed("the values of all environments are here", _values(store, trainers))
        yield from summed("the mode of users fits the owners", _users(store, trainers, now))
        if original is None:
            yield from checked("the last controller ended in order, or runs", lambda: _ending(store, alive, running))
            yield from _call_backs(store)
    if original is not None:
        where = f"{original.path} on {original.host}"
        yield DoctorFinding(
            "ok",
            f"this folder is a copy of {where}: running processes belong to the original and were not looked at",
            f"for them: `bftrainer doctor --state {original.path}` on {original.host}",
        )
    elif state_id and is_original:
        yield from summed("no process is left over", orphans(processes, running, here, alive))
    elif state_id:
        yield DoctorFinding(
            "ok",
            "processes were not looked at: no controller of this version has run here, so this folder may be a copy",
            "start `bftrainer serve` on it, unless it is one",
        )


def _users(store: Store, trainers: Sequence[TrainerRow], now: float) -> Iterator[DoctorFinding]:
    owners = {trainer.owner for trainer in trainers if not trainer.finished}
    mode = str(store.kept(MODE_KEY) or "shared")
    name, uid = store.kept(ACCOUNT_KEY) or ("", -1)
    if risk := root_risk(mode, owners | store.tokens.owners(now), name, uid):
        yield DoctorFinding("warning", risk, ROOT_ADVICE)
    elif why := misfit(mode, owners):
        yield DoctorFinding("warning", why, 'set users.mode to "own" (docs/security.md), or trust all of them')
    if store.kept(MODE_KEY) == "own":
        try:
            url = str(json.loads((store.path.parent / CLIENT_FILE).read_text())["url"])
        except (OSError, ValueError, LookupError, TypeError):
            return
        if url.startswith("http:"):
            yield DoctorFinding("warning", authority.unencrypted(url, own_users=True), "leave api.tls out")


def _accounts(store: Store, accounts: Accounts, controller: int) -> Iterator[DoctorFinding]:
    owners = {trainer.owner for trainer in store.trainers(unfinished=True)}
    owners |= {token.owner for token in store.tokens.all() if token.revoked is None and token.role != "admin"}
    for what in account_warnings(accounts, owners, controller):
        yield DoctorFinding("warning", what, "give each owner an account of their own in users.accounts")


def _values(store: Store, trainers: Sequence[TrainerRow]) -> Iterator[DoctorFinding]:
    for trainer in trainers:
        env = trainer.spec.get("env") or {}
        there = still_holds_values(env) or store.environments.has(trainer.id)
        if not trainer.finished and has_values(env) and not there:
            yield DoctorFinding(
                "warning",
                f"the values of {', '.join(env)} of trainer {trainer.id} are not in {store.environments.folder}",
                f"copy {ENVIRONMENTS}/ from the original folder: a back-up of the database has only the names",
            )


def _ending(store: Store, alive: bool, running: Sequence[WorkerRow]) -> Iterator[DoctorFinding]:
    if alive:
        return
    advice = "start `bftrainer serve`: it continues where that one stopped"
    started, stopped = (store.events(kind=kind, limit=1) for kind in kinds_of(ServeStarted, ServeStopped))
    if started and not (stopped and stopped[0].seq > started[0].seq):
        yield DoctorFinding("warning", f"the last controller was killed: its {LOCK_FILE} is stale", advice)
    if running:
        yield DoctorFinding("warning", f"{len(running)} workers ran when the controller ended", advice)


def _call_backs(store: Store) -> Iterator[DoctorFinding]:
    """Yield whether pilots reach the controller, if there were any."""
    unreached = store.kept(f"pool.{callbacks.STORED}")
    if unreached:
        yield DoctorFinding("error", str(unreached))
    elif unreached is not None:
        yield DoctorFinding("ok", "no pilot says that it cannot reach the controller")
    if failing_pilots := store.kept(f"pool.{failing.STORED}"):
        yield DoctorFinding("error", str(failing_pilots))


def _modes(folder: Path) -> Iterator[DoctorFinding]:
    folders = (folder, folder / ENVIRONMENTS)
    for path in (*folders, folder / FILE, *(folder / name for name in _SECRETS)):
        try:
            mode = path.stat().st_mode & 0o777
        except OSError:
            continue
        if mode & 0o077:
            secret = path not in (folder, folder / FILE)
            wanted = 0o700 if path in folders else 0o600
            advice = f"chmod {wanted:o} {path}" + (", and replace what it holds: others may know it" if secret else "")
            yield DoctorFinding("error" if secret else "warning", f"{path} is open to others (mode {mode:o})", advice)


def _room(folder: Path) -> Iterator[DoctorFinding]:
    free = shutil.disk_usage(folder).free
    if free < ENOUGH_BYTES:
        yield DoctorFinding(
            "warning",
            f"the disk of {folder} has {free / 1e6:,.0f} MB left",
            "free some space: a controller cannot store anything on a full disk",
        )


def orphans(
    processes: Iterable[Found], running: Sequence[WorkerRow], here: Sequence[NodeRow], controller: bool
) -> Iterator[DoctorFinding]:
    """Yield worker processes that are not known to run, or that no controller and no agent is left to end."""
    node_of = {worker.worker: worker.node for worker in running}
    agents = {node.node: node.pid for node in here}
    for process in processes:
        if process.worker not in node_of:
            why = "is not known to run"
        elif controller or _lives(agents.get(node_of[process.worker], 0)):
            continue
        else:
            why = "has neither a controller nor an agent any more"
        if _worker_of(process.pid) == process.worker:  # the process may have ended meanwhile
            yield DoctorFinding(
                "warning", f"process {process.pid} is worker {process.worker}, which {why}", f"kill {process.pid}"
            )


def worker_processes(state_id: str) -> Iterator[Found]:
    """Yield the worker processes of this user and of one state folder on this machine."""
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        if pid != os.getpid() and _environment(pid).get(STATE_ID) == state_id and (worker := _worker_of(pid)):
            yield Found(pid, worker)


def _worker_of(pid: int) -> str:
    """Return the id of the worker that a process is, or belongs to; empty if there is none."""
    try:
        output = _OUTPUT.search(str((_PROC / str(pid) / "fd" / "1").readlink()))
        if output:
            return output[1]
        forked = b".forker" in (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    # Linux shows the environment that a process was started with. A forked worker shows that of the warm parent, as
    # does the parent itself; only the target of its output distinguishes them.
    return "" if forked else _environment(pid).get(WORKER, "")


def _environment(pid: int) -> dict[str, str]:
    try:
        if (_PROC / str(pid)).stat().st_uid != os.getuid():
            return {}
        block = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in block.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie. A process whose id is unknown is assumed to live."""
    if pid <= 0:
        return True
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
