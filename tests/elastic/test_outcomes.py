"""Outcomes of meetings, kept for those who missed them."""

from __future__ import annotations

from bftrainer.elastic.torch.state.outcomes import Outcomes, after, top_of


def test_an_outcome_is_found_again_at_its_place_and_number() -> None:
    outcomes = Outcomes()
    outcomes.add(after(2), 0.5)
    outcomes.add(after(2), "stop")
    assert outcomes.has(after(2), 1)
    assert not outcomes.has(after(2), 2)
    assert outcomes.count(after(2)) == 2
    assert outcomes.get(after(2), 1) == "stop"
    assert not outcomes.has(after(3), 0)


def test_a_rank_with_more_outcomes_is_ahead() -> None:
    outcomes = Outcomes()
    seen = [outcomes.passed(1, 8)]
    outcomes.note_data(1, [5])
    seen.append(outcomes.passed(1, 8))
    outcomes.add(after(8), "y")
    seen.append(outcomes.passed(1, 8))
    outcomes.add(top_of(1), "x")
    seen.append(outcomes.passed(1, 8))
    assert seen == sorted(seen)
    assert len(set(seen)) == 4


def test_what_was_said_at_the_top_of_an_epoch_is_kept_for_newcomers_until_it_is_long_over() -> None:
    outcomes = Outcomes()
    outcomes.add(top_of(4), "x")
    for step in range(1, 100):
        outcomes.add(after(step), step)
    assert outcomes.get(top_of(4), 0) == "x"
    assert len(outcomes.as_state()["at"]) == 4
    for epoch in (5, 6, 7):
        outcomes.add(top_of(epoch), "z")
    assert not outcomes.has(top_of(4), 0)


def test_the_state_of_another_rank_is_taken_over_whole() -> None:
    ours, theirs = Outcomes(), Outcomes()
    ours.add(after(2), {"loss": 0.5})
    ours.note_data(3, [100, 8, 0, 1, 0, 7])
    theirs.add(after(1), "old")
    theirs.load(ours.as_state())
    assert theirs.get(after(2), 0) == {"loss": 0.5}
    assert not theirs.has(after(1), 0)
    assert theirs.data_of(3) == theirs.data_of(4) == [100, 8, 0, 1, 0, 7]
    assert theirs.data_is_of(3)
    assert not theirs.data_is_of(4)
    assert theirs.data_of(5) is None
    theirs.load({})
    assert theirs.data_of(0) is None
