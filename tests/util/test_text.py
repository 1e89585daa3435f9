from hypothesis import given
from hypothesis import strategies as st

from bftrainer.util.text import last_line, natural, one_line


def test_node2_comes_before_node10() -> None:
    names = ["rack2-node1", "rack1-node10", "rack1-node2", "a", "10", "9", "x" + "9" * 40]
    assert sorted(names, key=natural)[:2] == ["9", "10"]
    assert sorted(names, key=natural).index("rack1-node2") < sorted(names, key=natural).index("rack1-node10")


@given(st.lists(st.integers(0, 10**30), min_size=2))
def test_numbers_are_sorted_by_value(numbers: list[int]) -> None:
    assert sorted((f"n{number}" for number in numbers), key=natural) == [f"n{number}" for number in sorted(numbers)]


@given(st.text(), st.text())
def test_names_that_differ_have_different_places(one: str, other: str) -> None:
    assert (natural(one) == natural(other)) == (one == other)


def test_a_message_becomes_one_line() -> None:
    assert one_line(ValueError(" two\n  lines\tand tabs ")) == "two lines and tabs"
    assert one_line("") == ""


def test_the_last_line_is_the_last_one_with_something_in_it() -> None:
    assert last_line("first\n  second \n \n\n") == "second"
    assert last_line(" \n\n") == last_line("") == ""
