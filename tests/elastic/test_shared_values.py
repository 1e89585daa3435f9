"""Values that rank 0 gives to all ranks, written and read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bftrainer.elastic.torch.meetings.shared_values import MOST_BYTES, packed, unpacked  # noqa: E402
from bftrainer.errors import InputError  # noqa: E402


@pytest.mark.parametrize(
    "value", [None, True, 3, -(2**70), "é\0\ud800", 0.1, math.inf, [1, (2.5, "a")], {"loss": 0.5, 3: None}, ()]
)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    found = unpacked(packed(value, "run.share()"))
    assert found == value
    assert type(found) is type(value)


def test_tensors_arrive_without_their_graph_and_paths_as_text() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    found = unpacked(packed({"t": tensor}, "run.share()"))["t"]
    assert found.tolist() == [2.0, 2.0]
    assert not found.requires_grad
    assert unpacked(packed(Path("/best.pt"), "run.share()")) == "/best.pt"


@pytest.mark.parametrize(
    "value",
    [torch.zeros(MOST_BYTES // 4), "a" * MOST_BYTES, "é" * (MOST_BYTES // 2), [0.5] * (MOST_BYTES // 4)],
    ids=["tensor", "text", "text whose bytes are more than its letters", "list"],
)
def test_what_is_too_large_for_the_store_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^run.share\(\) gives at most 4 MiB to all ranks, but got \d+\.\d MiB; give"):
        packed(value, "run.share()")


def test_what_nobody_could_read_is_refused_by_its_place() -> None:
    with pytest.raises(InputError, match=r"run.evaluate\(\) gives plain values and tensors to all ranks: .*'f'"):
        packed({"f": print}, "run.evaluate()")
