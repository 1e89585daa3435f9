"""What a newcomer does before the others pause for it changes nothing that the script computes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bftrainer.elastic.torch.rehearsal import rehearse_backward  # noqa: E402


def test_a_rehearsal_draws_no_random_number_and_works_where_gradients_are_off() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        rehearse_backward(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
