"""What events return, and when the controller decides on it."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from bftrainer.cluster.controller import decision_timer
from bftrainer.cluster.controller.decision_timer import DecisionTimer
from bftrainer.cluster.controller.effects import Effects
from bftrainer.cluster.wire.messages import Bye


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (None, None, None),
        (None, "soon", "soon"),
        ("soon", None, "soon"),
        ("soon", "now", "now"),
        ("now", "soon", "now"),
        ("now", None, "now"),
    ],
)
def test_the_more_urgent_decision_counts(
    first: Literal["now", "soon"] | None, second: Literal["now", "soon"] | None, both: Literal["now", "soon"] | None
) -> None:
    effects = Effects(decide=first)
    effects.add(Effects(decide=second))
    assert effects.decide == both


def test_messages_keep_their_order() -> None:
    effects, later = Effects(), Effects(over=["t1"])
    effects.tell("n1", Bye("one"))
    later.tell("n1", Bye("two"))
    effects.add(later)
    assert effects == Effects([("n1", Bye("one")), ("n1", Bye("two"))], over=["t1"])


def test_requests_that_come_together_lead_to_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_timer, "COALESCE_S", 0.0)

    async def scene() -> None:
        timer = DecisionTimer()
        timer.request(None)
        assert not timer.pending
        timer.request("now")
        timer.request("now")
        async with asyncio.timeout(10):
            await timer.due()
        assert not timer.pending

    asyncio.run(scene())


def test_learned_rates_wait_for_the_last_such_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_timer, "COALESCE_S", 0.0)

    async def scene() -> None:
        timer = DecisionTimer()
        timer.request("soon")
        assert not timer.pending
        timer.tick()
        assert timer.pending
        async with asyncio.timeout(10):
            await timer.due()
        timer.request("soon")
        timer.tick()
        assert not timer.pending, "the last one was just now"
        monkeypatch.setattr(decision_timer, "LEARN_S", 0.0)
        timer.tick()
        assert timer.pending

    asyncio.run(scene())
