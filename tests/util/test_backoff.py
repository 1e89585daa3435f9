import math

from hypothesis import given
from hypothesis import strategies as st

from bftrainer.util.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    assert [Backoff(1.0, 10.0).wait_s(failures) for failures in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@given(st.floats(0.001, 1e6), st.integers(-1, 10**9))
def test_no_number_of_failures_is_too_large(first_s: float, failures: int) -> None:
    assert first_s <= Backoff(first_s).wait_s(failures) < math.inf
