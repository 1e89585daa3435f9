"""A hostile trainer: trains like any other, and tries to get at what belongs to another owner.

`hostile.py TARGETS LOOT`: once the file TARGETS is there, it tries every attack below on what the file names, and
writes to LOOT what each one got. It needs nothing that a user's script would not have.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from bftrainer.elastic.membership import Leave, Membership
from bftrainer.elastic.protocol import Formed, Report

ATTACKS = {}


def attack(function):
    ATTACKS[function.__name__] = function
    return function


def each(call, things):
    """What `call` got of each thing, or the name of the error."""
    found = {}
    for thing in things:
        try:
            found[str(thing)] = f"GOT {call(thing)!r:.200}"
        except Exception as problem:
            found[str(thing)] = type(problem).__name__
    return found


@attack
def read_files(targets):
    return each(lambda path: Path(path).read_bytes()[:20], targets["files"])


@attack
def list_folders(targets):
    return each(lambda path: sorted(os.listdir(path)), targets["folders"])  # noqa: PTH208


@attack
def write_files(targets):
    return each(lambda path: Path(path).open("ab").close(), targets["files"])


@attack
def read_processes(targets):
    paths = [f"/proc/{pid}/{what}" for pid in targets["pids"] for what in ("environ", "mem", "maps", "cwd/x", "fd/1")]
    return each(lambda path: Path(path).open("rb").read(20), paths)


@attack
def signal_processes(targets):
    return each(lambda pid: os.kill(pid, signal.SIGCONT), targets["pids"])


@attack
def connect_to_sockets(targets):
    def knock(path):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)

    return each(knock, targets["sockets"])


def trust(targets):
    """The controller's authority, which is no secret: every agent has it."""
    return ssl.create_default_context(cadata=targets["authority"])


@attack
def ask_the_api(targets):
    def ask(request):
        method, path = request.split()
        headers = {"Authorization": f"Bearer {targets['token']}"}
        sent = urllib.request.Request(targets["url"] + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(sent, timeout=10, context=trust(targets)) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as refusal:
            raise type(f"Status{refusal.code}", (Exception,), {})() from None

    return each(ask, targets["requests"])


def join(targets, secret, node):
    """Say that this is the agent of a node. Returns the controller's answer, or what happened instead."""
    url = targets["url"].replace("http", "ws", 1) + "/v1/agents"
    try:
        headers = {"Authorization": f"Bearer {secret}"}
        with connect(url, additional_headers=headers, open_timeout=30, ssl=trust(targets)) as link:
            link.send(json.dumps({"type": "join", "node": node, "host": "127.0.0.1", "agent": "hostile"}))
            answer = json.loads(link.recv(timeout=30))
            return answer["type"] + " " + str(answer.get("reason", ""))
    except InvalidStatus as refusal:
        return f"status {refusal.response.status_code}"
    except Exception as problem:
        return f"{type(problem).__name__} {problem}"


@attack
def join_for_another(targets):
    secret = targets["secret"]
    prefix, body, mac = secret.split(".")
    fields = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    forged = base64.urlsafe_b64encode(json.dumps([targets["owner"], *fields[1:]]).encode()).decode().rstrip("=")
    return {
        "as another's node": join(targets, secret, targets["node"]),
        "as its own node, beside its own agent": join(targets, secret, fields[1]),
        "as the head": join(targets, secret, "@head"),
        "with another owner in its secret": join(targets, f"{prefix}.{forged}.{mac}", fields[1]),
        "with a user's token": join(targets, targets["token"], targets["node"]),
        "without a secret": join(targets, "", targets["node"]),
    }


@attack
def lend_for_another(targets):
    """Say that this is the lender of another owner. Only a pool with lenders is asked."""
    if "lenders" not in targets:
        return {}
    url = targets["url"].replace("http", "ws", 1) + targets["lenders"]
    offer = {"type": "offer", "account": targets["owner"], "uid": targets["uid"], "most_pilots": 100}

    def knock(credential):
        try:
            headers = {"Authorization": f"Bearer {credential}"}
            with connect(url, additional_headers=headers, open_timeout=10, ssl=trust(targets)) as link:
                link.send(json.dumps(offer))
                return link.recv(timeout=10)
        except InvalidStatus as refusal:
            return f"status {refusal.response.status_code}"
        except ConnectionClosed as end:  # before the answer was read: it says the same
            return f"{end.rcvd}"

    return {
        "with its own token": knock(targets["token"]),
        "with the secret of its own agent": knock(targets["secret"]),
        "without a token": knock(""),
    }


@attack
def run_commands(targets):
    """Run commands of the batch system, as every user may."""
    found = {}
    for words in targets.get("commands", []):
        environment = {**os.environ, **targets["environment"]}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
        found[" ".join(words)] = f"{done.returncode} {done.stdout}"
    return found


@attack
def use_the_rendezvous(targets):
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[7] == str(targets["uid"]):
            ports.append(int(words[1].rpartition(":")[2], 16))
    found = {"ports": str(len(ports))}
    for number, port in enumerate(ports):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
            client.sendall(os.urandom(64))
        found[f"store {number}"] = "no answer"  # it may be no store
        asking = threading.Thread(target=ask_store, args=(port, found, f"store {number}"), daemon=True)
        asking.start()
        asking.join(1.5)
    return dict(found)


def ask_store(port, found, name):
    from torch.distributed import TCPStore

    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        names = list(store.list_keys()) if hasattr(store, "list_keys") else []
        found[name] = json.dumps({"known": store.check(["0", "rank", "default_pg/0"]), "names": names})
    except Exception as problem:
        found[name] = type(problem).__name__


def attack_all():
    while not Path(sys.argv[1]).exists():
        time.sleep(0.1)
    targets, found = json.loads(Path(sys.argv[1]).read_text()), {}
    for name, function in ATTACKS.items():
        try:
            found[name] = function(targets)
        except Exception as problem:
            found[name] = {"the attack itself": repr(problem), "at": traceback.format_exc()}
    beside = Path(sys.argv[2] + ".new")
    beside.write_text(json.dumps(found))
    beside.rename(sys.argv[2])


threading.Thread(target=attack_all, daemon=True).start()
job = Membership.connect()
step = 0
job.report = lambda: Report(job.formed, step, samples=10 * step)
print("hello")
job.ready()
try:
    while True:
        place = job.arrive(lambda rank: f"{job.address}:{rank}")
        job.entered(place.generation)
        job.send(Formed(place.generation, place.world, 0.1, 0.05, 0.02))
        while not job.changed:
            step += 1
            time.sleep(0.02)
except Leave:
    job.leave(step)
