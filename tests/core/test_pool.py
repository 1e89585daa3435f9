import pytest

from bftrainer.core import Event, Fragment, Pool


def test_a_pool_remembers_since_when_each_node_is_idle() -> None:
    pool = Pool().after(Event(10.0, joined=("a", "b"))).after(Event(20.0, joined=("c",), left=("a",)))
    assert dict(pool.since) == {"b": 10.0, "c": 20.0}
    assert len(pool) == 2
    assert "a" not in pool


def test_a_node_that_leaves_and_returns_at_once_is_idle_anew() -> None:
    pool = Pool().after(Event(10.0, joined=("a",))).after(Event(20.0, joined=("a",), left=("a",)))
    assert dict(pool.since) == {"a": 20.0}


def test_an_event_leaves_the_earlier_pool_as_it_was() -> None:
    before = Pool().after(Event(0.0, joined=("a",)))
    before.after(Event(1.0, left=("a",)))
    assert list(before) == ["a"]


@pytest.mark.parametrize(
    ("event", "words"),
    [(Event(5.0, left=("x",)), "not in the pool"), (Event(5.0, joined=("a",)), "in the pool already")],
)
def test_an_impossible_event_is_an_error_that_names_the_node(event: Event, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pool().after(Event(0.0, joined=("a",))).after(event)


def test_the_length_of_a_fragment_is_its_idle_time() -> None:
    assert Fragment("a", 10.0, 25.0).length == 15.0
