"""Finishing times in words, and the options of `eta` and `submit --deadline`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.cli.live.eta import _specs, eta
from bftrainer.cli.live.show_eta import deadline_text, eta_text, short_eta
from bftrainer.cli.live.submit import _deadline
from bftrainer.cluster.spec.trainer import parse_spec
from bftrainer.cluster.wire.api import EtaView
from bftrainer.errors import InputError

NOW = 1_800_000_000.0
HOUR = 3600.0


def view(low: float | None, point: float | None, high: float | None, **more: object) -> EtaView:
    at = {
        name: None if value is None else NOW + value for name, value in (("low", low), ("point", point), ("high", high))
    }
    rest = {"why": "", "deadline": None, "likely": None, "basis": "as ever", "computed": NOW, "futures": 40}
    return {**rest, **at, **more}  # type: ignore[typeddict-item]


def test_a_time_and_its_interval_are_told_in_one_unit() -> None:
    found = view(2 * HOUR, 3 * HOUR, 5 * HOUR)
    assert eta_text(found, NOW) == "about 3 h; 80 %: 2 to 5 h"
    assert short_eta(found, NOW) == "2 to 5 h"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (view(20, 60, 85), "about 60 s; 80 %: 20 to 85 s"),
        (view(60, 600, 8 * HOUR), "about 10 min; 80 %: 60 s to 8 h"),
        (view(150, 160, 170), "about 2.7 min; 80 %: 2.5 to 2.8 min"),
        (view(48 * HOUR, 60 * HOUR, 72 * HOUR), "about 2.5 d; 80 %: 2 to 3 d"),
        (view(2 * HOUR, 9 * HOUR, None), "about 9 h; 90 %: later than 2 h"),
        (view(2 * HOUR, None, None), "later than 2 h"),
        (view(None, None, None, why="its speed is not known"), "not known: its speed is not known"),
        (view(None, None, None), "not known yet"),
        (view(-50, -20, -10), "about 0 s; 80 %: 0 to 0 s"),
    ],
)
def test_other_times_in_words(found: EtaView, words: str) -> None:
    assert eta_text(found, NOW) == words


def test_without_an_interval_the_column_is_empty() -> None:
    assert short_eta(None, NOW) == short_eta(view(1, None, None), NOW) == ""


@pytest.mark.parametrize(
    ("likely", "words"), [(0.97, "likely, 97%"), (0.6, "uncertain, 60%"), (0.1, "unlikely, 10%"), (None, "")]
)
def test_a_deadline_is_told_with_its_probability(likely: float | None, words: str) -> None:
    text = deadline_text(view(1, 2, 3, deadline=NOW + 60, likely=likely))
    assert text == f"deadline 2027-01-15 08:01 UTC{': ' if words else ''}{words}"
    assert deadline_text(view(1, 2, 3)) == ""


def test_a_deadline_is_a_duration_or_a_time_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    assert _deadline("12h") == NOW + 12 * HOUR
    for wrong in ("never", "yesterday", "12", "2027-13-01"):
        with pytest.raises(
            InputError, match=rf"--deadline must be a time .* such as 90m, 12h or 3d, but got '{wrong}'"
        ):
            _deadline(wrong)
    spec = parse_spec({"script": "a.py", "deadline": _deadline("2027-01-15T08:00")})
    assert spec.deadline == NOW
    assert parse_spec({"script": "a.py", "deadline": "2027-01-15T09:00+01:00"}).deadline == NOW
    assert spec.as_json()["deadline"] == NOW
    assert "deadline" not in parse_spec({"script": "a.py"}).as_json()  # older controllers do not know it


@pytest.mark.parametrize("given", ["soon", -5, [1], True, "2027-13-01"])
def test_a_deadline_that_is_no_time_is_refused(given: object) -> None:
    with pytest.raises(InputError, match="deadline must be a time in UTC"):
        parse_spec({"script": "a.py", "deadline": given})


def test_eta_reads_files_of_trainers_and_of_sweeps(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("script: a.py\n")
    (tmp_path / "sweep.yaml").write_text("script: a.py\nargs: ['{lr}']\ngrid: {lr: [1, 2, 3]}\n")
    assert len(_specs(tmp_path / "one.yaml")) == 1
    assert [spec.name for spec in _specs(tmp_path / "sweep.yaml")] == ["sweep-1", "sweep-2", "sweep-3"]


def test_eta_takes_one_way_to_name_trainers() -> None:
    with pytest.raises(InputError, match="only one of them"):
        eta(["t1"], group="lr")
