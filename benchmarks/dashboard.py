"""How long the dashboard takes with 1,000 nodes over 24 hours: the controller's answers, and the picture in a browser.

    python benchmarks/dashboard.py [--nodes N] [--hours H] [--fragments F] [--json]

A store is filled with a made-up past, a real controller serves it, and headless Chromium draws it. The limit is 2 s
from the press of "24 h" to the drawn picture; above it the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bftrainer.cluster.config.load import CLIENT_FILE
from bftrainer.cluster.store.events import NodeJoined, NodeLeft, Rescaled
from bftrainer.cluster.store.store import FILE, Store

LIMIT_S = 2.0
CHROMIUM = "/usr/bin/chromium"
TRAINERS = 60


def fill(path: Path, nodes: int, hours: float, fragments: int, now: float, seed: int = 1) -> int:
    """Write a past into a new store: each node comes and goes `fragments` times, mostly with a worker; the events."""
    chance = random.Random(seed)
    happened: list[tuple[float, int, str, str, int]] = []
    for which in range(nodes):
        cuts = sorted(chance.uniform(now - hours * 3600, now - 60) for _ in range(2 * fragments))
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            trainer = 1 + int(TRAINERS * (start - now + hours * 3600) / (hours * 3600)) % TRAINERS
            happened += [(start, 0, f"node{which}", "join", trainer), (end, 1, f"node{which}", "leave", trainer)]
    happened.sort()
    with Store.open(path) as store, store.transaction():
        for i in range(1, TRAINERS + 1):
            spec = {"script": "/train.py", "min_nodes": 1, "max_nodes": nodes}
            row = store.add_trainer(name=f"trial-{i}", owner=f"user{i % 3}", spec=spec, time=now - hours * 3600)
            store.update_trainer(row.id, state="done", ended=now - 30, started=now - hours * 3600)
        workers: dict[str, str] = {}
        for number, (at, _, node, what, trainer) in enumerate(happened):
            if what == "join":
                store.put_node(node, host=node, agent="a", pid=1, joined=at)
                store.log(at, NodeJoined(node, node, "a"))
                if number % 9:
                    workers[node] = f"t{trainer}-{number}"
                    store.put_worker(workers[node], trainer=f"t{trainer}", node=node, agent="a", started=at + 2)
            else:
                store.update_node(node, left=at)
                store.log(at, NodeLeft(node, "gone"))
                if (worker := workers.pop(node, None)) is not None:
                    store.end_worker(worker, ended=at, status=None, outcome="lost")
            if number % 25 == 0:
                store.log(at, Rescaled(f"t{trainer}", number, 2, 3, 0.1, 0.05, 0.02, False, (), "grow"))
        return store.event_span().count


def drawn(url: str, token: str) -> dict[str, float]:
    """In a browser: from the press of "24 h" to the picture, and the drawing alone, in seconds."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector("#gantt[data-runs]", timeout=60_000)
        page.click("#windows >> text=24 h")
        while not page.evaluate("performance.getEntriesByName('asked-to-drawn').length"):
            time.sleep(0.1)
        measured = page.evaluate(
            "['asked-to-drawn', 'draw'].map((name) => performance.getEntriesByName(name).at(-1).duration / 1000)"
        )
        runs = float(page.get_attribute("#gantt", "data-runs") or 0)
        browser.close()
    return {"asked_to_drawn_s": measured[0], "draw_s": measured[1], "runs": runs}


def answers(url: str, token: str) -> dict[str, Any]:
    """How long the controller takes to answer, cold, for a day and a week."""
    found: dict[str, Any] = {}
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
        for name, seconds in (("day", 86400), ("week", 604800)):
            for what in ("pool", "nodes"):
                began = time.perf_counter()
                answer = client.get(f"/v1/history/{what}", params={"seconds": seconds, "cells": 1200})
                answer.raise_for_status()
                found[f"{name}_{what}_s"] = time.perf_counter() - began
                found[f"{name}_{what}_bytes"] = len(answer.content)
        statuses = []
        for _ in range(50):
            began = time.perf_counter()
            client.get("/v1/status").raise_for_status()
            statuses.append(time.perf_counter() - began)
        found["status_ms"] = 1000 * statistics.median(statuses)
    return found


def main() -> int:
    """Measure once and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--fragments", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        state.mkdir(mode=0o700)
        events = fill(state / FILE, asked.nodes, asked.hours, asked.fragments, time.time())
        words = ["serve", "--port", "0", "--state", str(state), "--pool", "local", "--nodes", "1", "--dry-run"]
        process = subprocess.Popen([sys.executable, "-m", "bftrainer", *words], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while not (state / CLIENT_FILE).exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            client = json.loads((state / CLIENT_FILE).read_text())
            wait_for(client["url"], deadline)
            found = {"nodes": asked.nodes, "hours": asked.hours, "events": events, "limit_s": LIMIT_S}
            found |= answers(client["url"], client["token"])
            found |= drawn(client["url"], client["token"])
        finally:
            process.terminate()
            process.wait(20)
    if asked.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {value:,.4g}" if isinstance(value, float) else f"{name:20} {value:,}")
    return int(found["asked_to_drawn_s"] >= LIMIT_S)


def wait_for(url: str, deadline: float) -> None:
    """Until the controller answers."""
    while True:
        try:
            httpx.get(f"{url}/v1/health").raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
