"""The order of the tests in a run: `tests/support/order.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.order import TOGETHER, unit_of

HERE = Path(__file__).resolve().parent


def test_tests_that_share_a_long_fixture_are_one_unit_and_any_other_is_its_own() -> None:
    page, synth = "tests/dashboard/test_page.py", "tests/traces/test_synth.py"
    assert unit_of(f"{page}::test_one") == unit_of(f"{page}::test_two[a::b/test_synth.py]") == page
    assert unit_of(f"{synth}::test_one") == synth
    assert unit_of(f"{__name__}.py::test_one") == f"{__name__}.py::test_one"
    assert (
        unit_of("tests/cli/test_progress.py::test_x[test_page.py]")
        == "tests/cli/test_progress.py::test_x[test_page.py]"
    )


def test_every_module_that_stays_together_exists_once() -> None:
    assert [name for name in TOGETHER if len(list(HERE.rglob(name))) != 1] == []


def test_this_run_keeps_them_together(request: pytest.FixtureRequest) -> None:
    order = list(dict.fromkeys(unit_of(item.nodeid) for item in request.session.items))
    units = [unit_of(item.nodeid) for item in request.session.items]
    assert [
        unit for unit in order if units[units.index(unit) :][: units.count(unit)] != [unit] * units.count(unit)
    ] == []
