"""What a script imports is learned from its first worker, and imported ahead for the next ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.cluster.store.store import FILE, Store
from support.cluster.live import Live

pytestmark = pytest.mark.waits

SCRIPT = Path(__file__).with_name("slow_imports_worker.py")
LIBRARY = "import os, time\nPID = os.getpid()\nREAD = os.environ.get('OF_SLOW')\ntime.sleep(0.3)\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A module that is installed; the variable by which it is found."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where something was compiled
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "slow_library.py").write_text(LIBRARY)
    return {"PYTHONPATH": str(folder)}


def printed(live: Live, trainer: str, after: str = "imported by ") -> str:
    return "".join(line["text"].partition(after)[2] for line in live.api.logs(trainer)["lines"])


def test_modules_are_learned_and_imported_ahead_unless_the_script_changes_what_they_read(
    library: dict[str, str], tmp_path: Path
) -> None:
    with Live(tmp_path / "state", "--nodes", "1", env=library) as live:
        first = live.submit(SCRIPT, "5", nodes="1-1")
        live.until_state(first, "done")
        parts = live.trainer(first)["start_parts"]
        second = live.submit(SCRIPT, "5", nodes="1-1")
        live.until_state(second, "done")
        third = live.submit(SCRIPT, "5", "OF_SLOW=mine", nodes="1-1")
        live.until_state(third, "done")
        for trainer in (first, second, third):
            live.until_printed(trainer, lambda lines: any("caches in " in line for line in lines))
        said = [printed(live, trainer) for trainer in (first, second, third)]
        caches = {Path(printed(live, trainer, "caches in ")) for trainer in (first, second)}
        warned = [event["data"]["warning"] for event in live.api.events(kind="worker.warned", trainer=third)["events"]]
    assert said == ["itself with None", "another with None", "itself with mine"]
    assert {cache.parents[2] for cache in caches} == {tmp_path / "state" / "compiled"}
    assert len(caches) == 1
    assert list(parts) == ["start", "imports", "device", "build", "join", "first_step"]
    assert parts["imports"] >= 0.3
    assert any("OF_SLOW" in words for words in warned)
    with Store.open(tmp_path / "state" / FILE) as store:
        (known,) = store.preloads.all().values()
    assert "slow_library" in known.modules
    assert tuple(known.left_out) == ("slow_library",)
