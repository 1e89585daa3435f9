"""How many examples a property is tried with: few in every run, many in `make test-deep`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

USUAL, DEEP = 100, 1000


def register_profiles() -> None:
    """Examples are the same in every run; no example fails for being slow on a busy machine."""
    for name, count in (("usual", USUAL), ("deep", DEEP)):
        settings.register_profile(
            name, max_examples=count, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("usual")


def examples(deep: int, usual: int = USUAL) -> int:
    """The number of examples of a property in the profile of this run (`--hypothesis-profile`)."""
    return deep if settings.default is not None and settings.default.max_examples >= DEEP else min(deep, usual)
