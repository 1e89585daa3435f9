"""What a rank takes from a peer: any type of tensor, the same containers, and no code."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from bftrainer.elastic.torch.group.group import GroupBroken  # noqa: E402
from bftrainer.elastic.torch.state import transfer as states  # noqa: E402
from bftrainer.errors import BFTrainerError  # noqa: E402


class Wire:
    """What rank 0 sends, kept for the ranks that receive."""

    wire = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.broken = False

    def wait(self, work: Any) -> None:
        raise AssertionError("nothing is sent for real")

    def check_whole(self) -> None:
        if self.broken:
            raise GroupBroken("a peer was lost")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    link = Wire()
    link.receiving = False  # type: ignore[attr-defined]

    def send(tensor: Any, source: int, over: Wire) -> None:
        if not link.receiving:  # type: ignore[attr-defined]
            over.sent.append(tensor.clone())
        else:
            tensor.copy_(over.sent.pop(0))

    monkeypatch.setattr(states, "send", send)
    return link


def received(wire: Wire, state: dict[str, Any]) -> dict[str, Any]:
    states.broadcast(state, 0, wire)
    wire.receiving = True  # type: ignore[attr-defined]
    return states.broadcast(None, 0, wire)


@pytest.mark.parametrize(
    "dtype", ["int16", "uint16", "uint32", "uint64", "uint8", "bool", "complex64", "bfloat16", "float8_e4m3fn"]
)
def test_every_type_of_tensor_arrives_bit_by_bit(wire: Wire, dtype: str) -> None:
    kind = getattr(torch, dtype)
    sent = torch.arange(-3, 9).view(3, 4).to(torch.float32).abs().to(kind)
    found = received(wire, {"t": sent, "turned": sent.t(), "none": sent[:0]})
    for name, tensor in {"t": sent, "turned": sent.t(), "none": sent[:0]}.items():
        assert found[name].dtype is kind
        assert found[name].shape == tensor.shape
        assert states.bytes_of(found[name]).equal(states.bytes_of(tensor))


def test_containers_and_numbers_arrive_as_what_they_were(wire: Wire) -> None:
    model = nn.BatchNorm1d(2)
    sent = {
        "milestones": Counter([3, 5, 5]),
        "module": model.state_dict(),
        "nested": [{"a": (1, 2.5, None)}, "text"],
        "lr": np.float64(0.1),
    }
    found = received(wire, sent)
    assert type(found["milestones"]) is Counter
    assert found["milestones"] == sent["milestones"]
    assert type(found["module"]) is OrderedDict
    assert found["module"]._metadata == model.state_dict()._metadata
    assert found["nested"] == sent["nested"]
    assert found["lr"] == 0.1
    model.load_state_dict(found["module"])


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_that_a_peer_sends_is_not_run(wire: Wire, tmp_path: Path) -> None:
    victim = tmp_path / "touched"
    file = io.BytesIO()
    torch.save({"objects": Evil(victim)}, file)
    for payload in (file.getvalue(), pickle.dumps(Evil(victim))):
        raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        wire.sent = [torch.tensor([len(payload)]), raw]
        wire.receiving = True  # type: ignore[attr-defined]
        with pytest.raises(BFTrainerError, match="the state that rank 0 sent cannot be read"):
            states.broadcast(None, 0, wire)
        assert not victim.exists()
    torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert victim.exists(), "the payload is a real one"


def test_a_state_of_which_a_part_was_aborted_is_not_used(wire: Wire) -> None:
    states.broadcast({"t": torch.ones(3)}, 0, wire)
    wire.receiving = True  # type: ignore[attr-defined]
    wire.broken = True
    with pytest.raises(GroupBroken):
        states.broadcast(None, 0, wire)
