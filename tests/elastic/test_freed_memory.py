"""A worker's C library keeps the memory that a step frees."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bftrainer.elastic.torch.freed_memory import HEAP_BYTES, KEPT_BYTES, keep_freed_memory


class Library:
    """The C library's function for its settings."""

    def __init__(self, *, accepts: bool = True) -> None:
        self.settings: dict[int, int] = {}
        self._accepts = accepts

    def __call__(self, number: int, value: int) -> int:
        self.settings[number] = value
        return int(self._accepts)


def test_freed_memory_is_kept_up_to_a_limit() -> None:
    library = Library()
    assert keep_freed_memory({}, library)
    assert library.settings == {-1: KEPT_BYTES, -3: HEAP_BYTES}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_chosen_stays(name: str) -> None:
    library = Library()
    assert not keep_freed_memory({name: "1000000"}, library)
    assert not library.settings


def test_a_library_that_refuses_is_left_as_it_is() -> None:
    assert not keep_freed_memory({}, Library(accepts=False))
