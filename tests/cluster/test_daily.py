"""The efficiency of the last day is computed with the whole policy of the controller."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.config.keys import PolicySettings
from bftrainer.cluster.report import daily
from bftrainer.cluster.store.events import NodeJoined, ServeStopped
from bftrainer.cluster.store.store import FILE, Store

POLICIES = [
    PolicySettings(),
    PolicySettings("equal", "throughput", None, None, "/site/topology.conf"),
    PolicySettings("milp", "weighted", 30.5, 3, "compact"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_process_gets_the_whole_policy(policy: PolicySettings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, PolicySettings]] = []

    def look_back(path: Path, policy: PolicySettings, now: float) -> dict[str, Any]:
        asked.append((path, policy))
        return {"efficiency": None}

    class Process:
        returncode = 0

        async def communicate(self) -> tuple[bytes, bytes]:
            return b'{"efficiency": null}', b""

    async def start(*words: str, **more: Any) -> Process:
        daily.main(words[words.index(daily.__name__) + 1 :])
        return Process()

    async def scene() -> None:
        figures = daily.DailyEfficiency(Path("/state") / FILE, policy)
        figures.newest()
        assert figures._task is not None
        await figures._task

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(daily, "look_back", look_back)
    monkeypatch.setattr(daily.os, "nice", lambda by: 0)
    asyncio.run(scene())
    assert asked == [(Path("/state") / FILE, policy)]


def test_a_placement_that_cannot_be_read_is_the_reason_why_there_is_no_figure(tmp_path: Path) -> None:
    with Store.open(tmp_path / FILE) as store:
        store.log(100.0, NodeJoined("n1", "h", "a"))
        store.log(110.0, ServeStopped(drained=True))
    topology = tmp_path / "topology.conf"
    topology.write_text("SwitchName=s0 Nodes=n[1-8]\n")
    good = daily.look_back(tmp_path / FILE, PolicySettings(placement=str(topology)), 120.0)
    assert good["why"] == "no sample was made"
    topology.write_text("nonsense\n")
    bad = daily.look_back(tmp_path / FILE, PolicySettings(placement=str(topology)), 120.0)
    assert bad["efficiency"] is None
    assert "topology.conf" in bad["why"], json.dumps(bad)
