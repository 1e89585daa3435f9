"""What the page makes of what it is told: names that are meant badly, figures that are no numbers, long words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.dashboard.browsing import Watched, needs_browser, until
from support.dashboard.stage import NOW, TOKEN, Stage, node, status, trainer

pytestmark = [pytest.mark.browser, needs_browser]


@pytest.fixture(scope="module")
def served() -> Iterator[Stage]:
    with Stage() as found:
        yield found


@pytest.fixture(scope="module")
def window(browser: Any, served: Stage) -> Iterator[Watched]:
    """One for all tests: it takes a while to open, and to read Plotly."""
    with Watched(browser, served.url) as found:
        found.page.set_default_timeout(20_000)
        found.page.goto(f"{served.url}/#token={TOKEN}")
        yield found


@pytest.fixture
def stage(served: Stage, window: Watched) -> Iterator[Stage]:
    """What the page is told; it begins as after another login, and it must not complain."""
    served.reset()
    window.page.set_viewport_size({"width": 1280, "height": 900})
    yield served
    # The browser itself notes every answer that is a refusal.
    complaints = [text for text in window.complaints if "Failed to load resource" not in text]
    window.complaints.clear()
    assert complaints == []


@pytest.fixture
def page(stage: Stage, window: Watched) -> Any:
    return window.page


def enter(page: Any) -> None:
    """Log in."""
    if page.is_visible("#leave"):
        page.click("#leave") if not page.is_visible("dialog[open]") else page.reload()
    if page.is_visible("#login"):
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
    page.wait_for_selector("#link.live")
    page.wait_for_selector("#gantt[data-runs]")


def details(page: Any) -> None:
    """Log in and open the first trainer."""
    enter(page)
    page.click("#trainers tr button")
    page.wait_for_selector("#detail .plot .main-svg")


def test_a_metric_cannot_put_a_link_into_the_page(page: Any, stage: Stage) -> None:
    name = '<a href="https://evil.example/x">loss</a>'
    points = [{"time": NOW - 30 + i, "samples": i, "metrics": {name: 3.0 + i, "b&amp;c": 1.0}} for i in range(9)]
    stage.show(trainer(name="<a href='https://evil.example/y'>x</a>", metrics={name: 3.0}), points)
    details(page)
    page.wait_for_selector("#detail .small-plots .main-svg")
    until(page, "document.querySelectorAll('#detail .small-plots .main-svg').length >= 4")  # two for each plot
    assert page.evaluate("document.querySelectorAll('a:not(.skip)').length") == 0
    assert "loss</a>" in page.inner_text("#detail .small-plots"), "it is written as it was given"


def test_each_metric_has_its_own_scale(page: Any, stage: Stage) -> None:
    names = ["lr", "loss", "perplexity", *(f"m{i}" for i in range(7))]
    points = [{"time": NOW - 30 + i, "samples": i, "metrics": dict.fromkeys(names, 1.0 + i)} for i in range(9)]
    for i, point in enumerate(points):
        point["metrics"] |= {"lr": 1e-4 / (1 + i), "loss": 3.0 - i / 9, "perplexity": 500.0 - i}
    stage.show(trainer(), points)
    lines = "document.querySelectorAll('#detail .small-plots .scatterlayer path.js-line')"
    heights = f"[...{lines}].map((line) => line.getBBox().height)"
    details(page)
    until(page, f"{heights}.length === 8")
    assert min(page.evaluate(heights)) > 50, "no line is flat"
    page.click("text=All 10 metrics")
    until(page, f"{heights}.length === 10")
    page.click("text=Only the first 8")
    until(page, f"{heights}.length === 8")


def test_a_pool_that_fails_is_told(page: Any, stage: Stage) -> None:
    enter(page)
    assert page.is_hidden("#notice")
    stage.tell(status(pool={"kind": "script", "size": 0, "used": 0, "problem": "/bin/false ended with 1 <b>"}))
    page.wait_for_selector("text=The pool has a problem: /bin/false ended with 1 <b>")
    stage.tell(status())
    page.wait_for_selector("#notice", state="hidden")


def test_a_refused_window_leaves_no_other_picture_under_its_button(page: Any, stage: Stage) -> None:
    enter(page)
    good, asked = stage.answers["/v1/history/nodes"], threading.Event()

    def refuse(query: dict[str, str]) -> Any:
        week = query["seconds"] == "604800" and asked.wait(20)
        return (422, {"error": "too much happened"}) if week else good(query)

    stage.answers["/v1/history/nodes"] = refuse
    page.click("#windows >> text=7 d")
    assert page.get_attribute("#chart", "aria-busy") == "true", "it says that it is on its way"
    assert page.inner_text("#pool-words") == "loading …"
    asked.set()
    page.wait_for_selector("#pool-words.error")
    assert page.inner_text("#pool-words") == "too much happened"
    assert page.evaluate("document.getElementById('gantt').height + document.getElementById('pool').height") == 0
    assert page.get_attribute("#gantt", "data-runs") is None
    assert page.get_attribute("#chart", "aria-busy") is None
    page.click("#windows >> text=5 min")
    page.wait_for_selector("#gantt[data-runs]")
    assert "node-hours" in page.inner_text("#pool-words")
    # Also when it is the page itself that asks again.
    stage.answers["/v1/history/nodes"] = (422, {"error": "no more"})
    page.wait_for_selector("#pool-words.error")
    assert page.inner_text("#pool-words") == "no more"


def test_one_can_go_back_in_time_and_it_is_not_called_live(page: Any, stage: Stage) -> None:
    enter(page)
    assert page.get_attribute("#later", "aria-disabled") == page.get_attribute("#now", "aria-disabled") == "true"
    page.click("#windows >> text=5 min")  # it is looked at every two seconds
    page.focus("#earlier")
    for _ in range(2):
        page.keyboard.press("Enter")
    page.wait_for_selector("#when:has-text('not live')")
    until(page, "!document.getElementById('chart').hasAttribute('aria-busy')")
    ends = [float(path.rpartition("end=")[2]) for path in stage.asked if "history/nodes" in path and "end=" in path]
    assert ends[-1] == pytest.approx(page.evaluate("Date.now() / 1000") - 300, abs=30), "half a window at a time"
    page.focus("#later")
    page.keyboard.press("Enter")
    until(page, "!document.getElementById('chart').hasAttribute('aria-busy')")
    before = len([path for path in stage.asked if "history" in path])
    with page.expect_request("**/v1/insight"):  # every four seconds
        pass
    assert len([path for path in stage.asked if "history" in path]) == before, "the past stays as it is"
    page.keyboard.press("Tab")
    with page.expect_request("**/v1/history/nodes?*") as asked:
        page.keyboard.press("Enter")
    assert "end=" not in asked.value.url
    assert page.inner_text("#when") == ""


def test_figures_say_as_of_when_and_a_loss_that_is_no_number_is_told(page: Any, stage: Stage) -> None:
    lost = {"preemption": 1.5e16, "rescale": 3e-5}
    found = {"computed": NOW, "since": NOW - 60, "efficiency": None, "bound": None, "why": "no sample was made"}
    stage.answers["/v1/insight"] = {"insight": {**found, "lost": lost}}
    points = [{"time": NOW - 9 + i, "samples": i, "metrics": {"loss": None if i > 5 else 2.0}} for i in range(9)]
    stage.show(trainer(metrics={"acc": 0.5, "b": 1.0, "c": 1.0, "loss": None}), points)
    details(page)
    at = page.evaluate(f"new Date({NOW * 1000}).toLocaleTimeString('en-GB', {{hour: '2-digit', minute: '2-digit'}})")
    texts = page.locator("#tiles div").all_inner_texts()
    assert [f"as of {at}" in text for text in texts[-3:]] == [True] * 3
    assert "no sample was made" in texts[-3]
    assert "1.5e16" in texts[-2]
    assert "3e-5" in texts[-1]
    assert "loss not finite" in page.inner_text("#trainers tr")
    assert "loss not finite; 3 of 9 moments not finite" in page.inner_text("#detail .small-plots")


def test_a_healthy_trainer_is_not_asked_why_it_failed(page: Any, stage: Stage) -> None:
    stage.show(trainer(), error="")
    slow, seen = threading.Event(), stage.answers["/v1/trainers/t1"]
    stage.answers["/v1/trainers/t1"] = lambda query: slow.wait(20) and seen
    enter(page)
    page.click("#trainers tr button")
    page.wait_for_selector("#detail-title")
    assert page.is_hidden("text=Why it failed")
    slow.set()
    page.wait_for_selector("#detail .state.running")
    assert page.is_hidden("text=Why it failed")


def test_while_the_controller_is_away_the_page_says_since_when(page: Any, stage: Stage) -> None:
    enter(page)
    opacity = "getComputedStyle(document.getElementById('tiles')).opacity"
    assert page.evaluate(opacity) == "1"
    stage.tell(None)
    page.wait_for_selector("#link.off:has-text('nothing new since')")
    assert float(page.evaluate(opacity)) < 1
    stage.tell(status())
    page.wait_for_selector("#link.live")
    assert page.evaluate(opacity) == "1"


def test_long_words_stay_within_their_dialogs(page: Any, stage: Stage) -> None:
    name = "x" * 64
    stage.show(trainer(name=name, state="waiting", reason="y" * 300, nodes=[]), error="z" * 300)
    details(page)
    wide = "(id) => { const box = document.getElementById(id); return box.scrollWidth - box.clientWidth; }"
    for width in (390, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(wide, "detail") == 0, width
        page.click("#cancel")
        assert page.evaluate(wide, "confirm") == 0, width
        page.click("#confirm-no")


def test_what_has_the_focus_is_not_under_the_header(page: Any, stage: Stage) -> None:
    stage.tell(status(*(trainer(i, f"trial-{i}") for i in range(1, 80))))
    enter(page)
    page.locator("#trainers tr button").last.focus()
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        top, header = page.evaluate(
            "[document.activeElement.getBoundingClientRect().top,"
            " document.querySelector('header').getBoundingClientRect().bottom]"
        )
        assert top >= header


def test_what_was_lost_stands_below_the_decision_that_followed(page: Any, stage: Stage) -> None:
    about = {"trainer": "t1", "name": "a b"}
    change = {**about, "action": "grow", "before": 1, "after": 2, "gain": 2.0, "cost": 1.0, "reason": "a b grows"}
    lost = {**about, "time": NOW - 5, "nodes": ["node-8"], "before": 2, "after": 1, "min_nodes": 1}
    rest = {"pool": 2, "horizon_s": 60, "waiting": 0, "ms": 1}
    decisions = [{"seq": 9, "time": NOW, "changes": [change], "lost": [lost], **rest}]
    stage.answers["/v1/decisions"] = {"decisions": decisions, "before": None}
    enter(page)
    page.wait_for_selector("#decisions tr.lost")
    rows = [text.split("\t") for text in page.locator("#decisions tr").all_inner_texts()]
    assert [(row[3], row[4]) for row in rows] == [("1 → 2 ▲", "grows"), ("2 → 1 ▼", "lost node-8")]


def test_what_finished_long_ago_can_be_searched(page: Any, stage: Stage) -> None:
    old = [trainer(i, f"old-{i}", state="done", ended=NOW - 9e5) for i in range(60, 0, -1)]

    def answer(query: dict[str, str]) -> Any:
        rows = [row for row in old if query.get("search", "") in row["name"]]
        rows = [row for row in rows if int(row["id"][1:]) < int(query.get("before", 99))]
        shown = rows[: int(query["limit"])]
        return {"trainers": shown, "before": int(shown[-1]["id"][1:]) if len(shown) == int(query["limit"]) else None}

    stage.answers["/v1/finished"] = answer
    stage.show(old[0], [])
    stage.tell(status())
    enter(page)
    rows = "document.querySelectorAll('#finished tr').length"
    page.click("text=Finished trainers")
    until(page, f"{rows} === 50")
    page.click("#more")
    until(page, f"{rows} === 60")
    assert page.is_hidden("#more")
    page.fill("#search", "old-60")
    until(page, f"{rows} === 1")
    page.click("#finished button")
    page.wait_for_selector("#detail .state.done")
    page.keyboard.press("Escape")
    page.fill("#search", "nothing")
    page.wait_for_selector("#finished-words:has-text('No trainer found')")
    page.click("#leave")
    assert page.evaluate(rows) == 0


def test_a_sweep_shows_what_it_chose_and_a_queue_why_it_waits(page: Any, stage: Stage) -> None:
    params = {"lr": 0.001, "layers": [64, 32], "note": "<b>x</b>"}
    why = "needs at least 9 nodes; the pool has 4"
    stage.show(trainer(group="grid", params=params, state="queued", reason=why, nodes=[]))
    details(page)
    for where in ("#trainers tr", "#detail"):
        assert "lr 0.001, layers [64,32], note <b>x</b>" in page.inner_text(where)
        assert why in page.inner_text(where)


def test_gpus_ranks_and_their_use_are_shown_where_some_node_has_gpus(page: Any, stage: Stage) -> None:
    unknown = {"name": "", "memory_mb": None, "percent": None, "used_mb": None}
    silent = [{"id": f"GPU-{i}{'f' * 40}", "kind": "cuda", **unknown} for i in range(2)]
    rows = [node("n1", 4), node("n2", 2) | {"gpus": silent, "ranks": []}, node("n3")]
    ranks = [{"pid": 100 + i, "device": str(i)} for i in range(4)]
    worker = {"worker": "t1-1", "node": "n1", "state": "training", "pid": 100, "ranks": ranks}
    row = trainer(nodes=["n1", "n3"], ranks=5, gpu_seconds=7200.0)
    stage.show(row, workers=[worker])
    stage.tell(status(row, pool={"kind": "local", "size": 3, "used": 2, "gpus": 6, "used_gpus": 4}))
    stage.answers["/v1/nodes"] = {"nodes": rows}
    enter(page)
    assert "GPUs in use\n4\nof 6" in page.inner_text("#tiles")
    assert "2 of 4, 5 ranks" in page.inner_text("#trainers")
    page.click("text=Nodes as a table")
    page.wait_for_selector("#nodes tr:nth-child(3)")
    cells = [
        [cell.strip() for cell in line.split("\t")][3:6] for line in page.inner_text("#nodes").splitlines() if line
    ]
    assert cells[0] == ["4 × A100 80 GB", "4 ranks: 0, 1, 2, 3", "50 %, 80 of 320 GB"]
    assert cells[1] == ["2 GPUs", "–", "–"]
    assert cells[2] == ["–", "1 rank: CPU", "–"]
    stage.answers["/v1/nodes"] = {"nodes": rows[2:]}
    until(page, "document.querySelectorAll('#nodes tr').length === 1")
    assert page.is_hidden("th.gpu >> nth=0")
    page.click("#trainers tr button")
    page.wait_for_selector("#detail .plot .main-svg")
    shown = page.inner_text("#detail")
    assert "5 ranks" in shown
    assert "2 GPU-hours" in shown
    assert "n1 training (4 ranks: 0, 1, 2, 3)" in shown
