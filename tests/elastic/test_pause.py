"""What the time of a rescale is spent on."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bftrainer.elastic.protocol import PAUSE_PARTS, Formed, as_json, decode, encode
from bftrainer.elastic.torch.state.pause import PauseClock


def test_the_parts_of_a_pause_are_the_pause_together() -> None:
    times = iter([10.0, 10.25, 20.0, 20.125, 30.0, 31.0])
    clock = PauseClock(lambda: next(times))
    with clock.part("copy"):
        pass
    with clock.part("send"):
        pass
    with clock.part("send"):
        pass
    parts = clock.parts(3.0, 0.5, 1.5)
    assert parts == {"wait": 1.0, "form": 0.5, "catch_up": 0.125, "copy": 0.25, "send": 1.125}
    assert tuple(parts) == PAUSE_PARTS
    clock.begin()
    assert clock.parts(1.0, 0.5, 0.25) == {"wait": 0.25, "form": 0.5, "catch_up": 0.25, "copy": 0.0, "send": 0.0}


def test_a_worker_that_says_no_parts_says_what_it_said_before() -> None:
    assert as_json(Formed(2, 1, 0.5, 0.25, 0.125)).keys() == {
        "type",
        "generation",
        "world",
        "pause_s",
        "form_s",
        "sync_s",
    }
    said = Formed(2, 1, 0.5, 0.25, 0.125, {"wait": 0.125, "form": 0.25, "catch_up": 0.125})
    assert decode(encode(said)) == said
