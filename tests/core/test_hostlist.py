import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.core.hostlist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu01", ["gpu01"]),
        ("cpn-f[15-17,19],gpu01", ["cpn-f15", "cpn-f16", "cpn-f17", "cpn-f19", "gpu01"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("d09n04s[01-02],d09n05s02", ["d09n04s01", "d09n04s02", "d09n05s02"]),
        ("a[1,3]-ib", ["a1-ib", "a3-ib"]),
        ("n1,n1", ["n1"]),
    ],
)
def test_a_host_list_names_every_node_once_in_order(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-3", "n1-3]", "n[[1-2]]", "n[3-1]", "n[a-b]", "n[]", "", "a,,b", "two words", "n[1-99999999]",
     "a[1-9999]b[1-9999]", "n[1-2", "n[" + "9" * 5000 + "]"],
)  # fmt: skip
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand(text)


@given(st.text(alphabet="n0123456789[],-", max_size=30))
def test_any_text_either_expands_or_is_refused(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert len(set(names)) == len(names) > 0
