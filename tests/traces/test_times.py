from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.errors import InputError
from bftrainer.traces.times import Clock, parse_elapsed, parse_time, time_zone

BERLIN = ZoneInfo("Europe/Berlin")


@given(st.datetimes(datetime(1970, 1, 2), datetime(2199, 1, 1)).map(lambda t: t.replace(microsecond=0)))
def test_the_fast_way_reads_what_datetime_reads(when: datetime) -> None:
    for zone in (UTC, BERLIN):
        assert Clock(zone)(when.strftime("%Y-%m-%dT%H:%M:%S")) == when.replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    "text",
    ["2021-02-10T20:21:15", "2021-02-10 20:21:15", "2021-02-10T21:21:15+01:00", "1612988475", "2021-02-10T20:21:15Z"],
)
def test_one_instant_has_many_forms(text: str) -> None:
    assert Clock()(text) == 1612988475.0


@pytest.mark.parametrize(
    "text",
    ["", "Unknown", "2021-13-01T00:00:00", "2021-02-10T25:00:00", "2021-02-10T20:21:75", "-5", "nan", "inf", "9e99"],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not"):
        Clock()(text)


def test_a_job_across_the_repeated_hour_of_autumn_keeps_its_length() -> None:
    # 02:50 summer time to 02:10 winter time: twenty minutes, though the clock went backwards.
    start, end = Clock(BERLIN).span("2021-10-31T02:50:00", "2021-10-31T02:10:00")
    assert end - start == 1200.0


def test_a_job_that_truly_ends_before_it_starts_stays_so() -> None:
    start, end = Clock(BERLIN).span("2021-06-01T02:50:00", "2021-06-01T02:10:00")
    assert end < start


@pytest.mark.parametrize(
    ("text", "seconds"), [("7-20:39:39", 679179.0), ("00:05:35", 335.0), ("05:35", 335.0), ("335", 335.0)]
)
def test_elapsed_times_have_days_or_not(text: str, seconds: float) -> None:
    assert parse_elapsed(text) == seconds


def test_a_wrong_time_on_the_command_line_names_its_option() -> None:
    with pytest.raises(InputError, match="--from must be a time such as .* but got 'yesterday'"):
        parse_time("yesterday", UTC, "--from")


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../../etc/passwd", "UTC+1x"])
def test_an_unknown_zone_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match="time zone must be a name"):
        time_zone(name)
