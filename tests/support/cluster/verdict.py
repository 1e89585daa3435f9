"""Judges what a disturbed trainer of a live system has computed, and what its controller has decided."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bftrainer.cluster.config.keys import Config
from bftrainer.cluster.config.policy import policy_of
from bftrainer.cluster.report.rerun import KINDS, check
from bftrainer.cluster.store.store import FILE, Store
from support.elastic.ledger import committed, same_as_alone


def assert_trained_as_alone(home: Path, alone: Path, epochs: int) -> None:
    """Assert that each sample counted once per epoch, and that the weights are those of an undisturbed run."""
    counts = committed(home)
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(600)), f"{home.name}, epoch {epoch}"
    same_as_alone(alone, home)


def assert_decisions_can_be_made_again(state: Path) -> int:
    """Assert that every decision of a controller follows from its event log. Return how many there were."""
    with Store.open(state / FILE, read_only=True) as store:
        again = check(store.all_events(KINDS), policy_of(Config()))
    assert again.mismatches == ()
    return again.decisions
