"""The controller's log: lines that programs can read, files that do not grow without end, and no secret in them."""

from __future__ import annotations

import io
import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from bftrainer.cluster.config.keys import LogSettings
from bftrainer.cluster.store import event_logging
from bftrainer.errors import InputError
from support.cluster.bench import Bench

_log = logging.getLogger("bftrainer.tests.logs")
TOKEN = "bft_" + "A1b2C3d4" * 5


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging is one for the whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_has_an_object_a_line_with_what_went_wrong(tmp_path: Path) -> None:
    with event_logging.to_file(LogSettings(format="json"), tmp_path) as path:
        assert path == tmp_path / event_logging.FILE
        _log.warning("two\nlines and ü \x1b[31m")
        try:
            raise ValueError("no")
        except ValueError:
            _log.exception("it failed")
        _log.info("said %s", "well", extra={"facts": {"node": "n1", "empty": ""}})
    first, second, third = rows(tmp_path / event_logging.FILE)
    assert first["message"] == "two\nlines and ü \x1b[31m"
    assert first["level"] == "warning"
    assert str(first["time"]).endswith("Z")
    assert "ValueError: no" in str(second["traceback"])
    assert (third["node"], third["message"]) == ("n1", "said well")
    assert "empty" not in third


def test_text_has_a_line_for_each_message_whatever_is_in_it(tmp_path: Path) -> None:
    with event_logging.to_file(LogSettings(), tmp_path):
        _log.warning("agent of %s", "n1\n2026-01-01T00:00:00Z ERROR root: forged \x1b[2J")
    (line,) = (tmp_path / event_logging.FILE).read_text().splitlines()
    assert r"\n2026" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_is_written(tmp_path: Path, form: str) -> None:
    event_logging.hidden.hide("the agents' secret", "short")
    screen = io.StringIO()
    settings = LogSettings(format=form)
    event_logging.to_stderr(settings, verbose=True, stream=screen)
    with event_logging.to_file(settings, tmp_path):
        _log.warning("joined with the agents' secret, short")
        _log.warning("header Authorization: Bearer abcdefgh.ijk and %s", TOKEN)
        _log.warning("x", extra={"facts": {"token": TOKEN}})
        try:
            raise ValueError(TOKEN)
        except ValueError:
            _log.exception("failed")
    for text in ((tmp_path / event_logging.FILE).read_text(), screen.getvalue()):
        assert len(text.splitlines()) >= 4
        assert "***" in text
        assert "short" in text  # too short to be a secret: it would hide words
        for secret in (TOKEN, "the agents' secret", "abcdefgh"):
            assert secret not in text


def test_the_file_is_its_owners_alone_and_older_ones_are_dropped(tmp_path: Path) -> None:
    with event_logging.to_file(LogSettings(max_mb=0.001, keep=2), tmp_path):
        for number in range(100):
            _log.warning("%d %s", number, "x" * 50)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["serve.log", "serve.log.1", "serve.log.2"]
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= 1000
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert " 99 x" in (tmp_path / "serve.log").read_text()


def test_without_a_file_none_is_written(tmp_path: Path) -> None:
    with event_logging.to_file(LogSettings(file="none"), tmp_path) as path:
        assert path is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    settings = LogSettings(file=str(tmp_path / "no" / "folder.log"))
    with pytest.raises(InputError, match=r"log\.file"), event_logging.to_file(settings, tmp_path):
        pass


def test_a_full_disk_stops_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    with event_logging.to_file(LogSettings(file="/dev/full", max_mb=1e6), Path("/")):
        _log.warning("lost")
    assert capfd.readouterr().err == ""


def test_what_happens_is_in_the_log_without_what_nobody_reads(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with event_logging.to_file(LogSettings(format="json"), tmp_path):
        bench.submit("1-2", env={"PASSWORD": "from-the-environment"})
        bench.join("n1", "n2")
    bench.store.close()
    text = (tmp_path / event_logging.FILE).read_text()
    told = rows(tmp_path / event_logging.FILE)
    kinds = [row["event"] for row in told]
    assert {"node.joined", "trainer.submitted", "trainer.state", "decision", "worker.started"} <= set(kinds)
    assert "trainer.learned" not in kinds
    assert "from-the-environment" not in text
    decision = next(row for row in told if row["event"] == "decision" and row["data"]["reasons"])  # type: ignore[index]
    assert "nodes" not in decision["data"]  # type: ignore[operator]


def test_what_somebody_should_look_at_is_a_warning_and_on_stderr(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stderr = io.StringIO()
    event_logging.to_stderr(LogSettings(format="json"), verbose=False, stream=stderr)
    for kind, data in (
        ("pool.slurm_failed", {"error": "no answer"}),
        ("pool.slurm_works", {}),
        ("trainer.state", {"from": "running", "to": "failed", "reason": "ValueError"}),
        ("trainer.state", {"from": "running", "to": "done"}),
        ("node.left", {"reason": "silent"}),
        ("node.left", {"reason": "taken"}),
    ):
        bench.store.log(1.0, kind, data=data)
    bench.store.close()
    told = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert [row["event"] for row in told] == ["pool.slurm_failed", "trainer.state", "node.left"]
    assert {row["level"] for row in told} == {"warning"}


def test_below_the_level_nothing_is_written(tmp_path: Path) -> None:
    with event_logging.to_file(LogSettings(level="error"), tmp_path):
        _log.warning("no")
        _log.error("yes")
    assert "no" not in (tmp_path / event_logging.FILE).read_text().replace("tests.logs", "")
