"""The page in a browser, against a real controller: what a person sees and does."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bftrainer.cluster.store.store import FILE, Store
from dashboard import fill
from support.cluster.live import EXAMPLES, Live
from support.dashboard.browsing import Watched, needs_browser, until
from support.waiting import wait_until

pytestmark = [
    pytest.mark.browser,
    needs_browser,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

PACE = {"BFTRAINER_PACE": "1:0.05,4:0.06"}


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with Live(tmp_path_factory.mktemp("page") / "state", "--pool", "local", "--nodes", "3") as live:
        yield live


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A controller that decides nothing, with a day of 1,000 nodes behind it and 100 decisions about `trial-1`."""
    state = tmp_path_factory.mktemp("past") / "state"
    state.mkdir(mode=0o700)
    now = time.time()
    fill(state / FILE, nodes=1000, hours=24, fragments=8, now=now)
    change = {"trainer": "t1", "action": "grow", "gain": 2.0, "cost": 1.0}
    with Store.open(state / FILE) as store, store.transaction():
        for i in range(100):
            changes = [{**change, "before": i, "after": i + 1}]
            data = {"pool": 9, "horizon_s": 60, "changes": changes, "reasons": ["trial-1: a free node"], "ms": 1}
            store.log(now - 100 + i, "decision", data=data)
    with Live(state, "--pool", "local", "--nodes", "1", "--dry-run") as live:
        yield live


def client_of(live: Live) -> tuple[str, str]:
    found = json.loads((live.folder / "client.json").read_text())
    return found["url"], found["token"]


def test_a_wrong_token_is_refused_and_a_good_one_lets_in(browser: Any, controller: Live) -> None:
    url, token = client_of(controller)
    with Watched(browser, url) as watched:
        page = watched.page
        page.goto(url)
        for wrong in ("bft_wrong", "\N{SNOWMAN}", "<b>x</b>"):
            page.fill("#token", wrong)
            page.press("#token", "Enter")
            until(page, "document.getElementById('login-error').textContent.includes('token')")
            assert page.is_hidden("#board")
        page.fill("#token", token)
        page.press("#token", "Enter")
        page.wait_for_selector("#tiles div")
        assert page.evaluate("sessionStorage.length + localStorage.length") == 1
        page.click("text=Log out")
        assert page.is_visible("#login")
        assert page.evaluate("sessionStorage.length") == 0


def test_a_running_trainer_appears_the_gantt_grows_and_it_is_cancelled(browser: Any, controller: Live) -> None:
    trainer = controller.submit(EXAMPLES / "digits.py", "--epochs", "500", nodes="1-3", name="digits", env=PACE)
    url, token = client_of(controller)
    with Watched(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/#token={token}")
        # The token is out of the address at once.
        assert page.evaluate("location.href") == f"{url}/"
        row = page.locator("#trainers tr", has_text="digits")
        row.locator(".state.running").wait_for()
        drawn = "Number(document.getElementById('pool-words').textContent.split(' ')[0])"
        until(page, f"{drawn} > 0")
        before = page.evaluate(drawn)
        until(page, f"{drawn} > {before}")
        assert page.get_attribute("#gantt", "data-runs") != "0"
        assert "digits" in page.inner_text("#legend")
        page.locator("#decisions tr", has_text="digits").first.wait_for()
        # With the keyboard alone: open it, ask, and confirm.
        row.locator("button").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#detail .plot .main-svg")
        until(page, "document.querySelector('#detail pre[aria-label*=log]').textContent.length > 0")
        page.focus("#cancel")
        page.keyboard.press("Enter")
        assert page.inner_text("#confirm-title") == "Cancel digits?"
        page.keyboard.press("Escape")
        assert controller.trainer(trainer)["state"] != "cancelled"
        page.click("#cancel")
        page.click("#confirm-yes")
        page.locator("#detail .state.cancelled").wait_for()
        controller.until_state(trainer, "cancelled")
        page.keyboard.press("Escape")
        row.locator(".state.cancelled").wait_for()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[str]:
    """The address that a running demo prints."""
    argv = [sys.executable, "-m", "bftrainer", "demo", "--folder", str(tmp_path / "demo")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(line.split()[-1] for line in process.stdout if "in a browser" in line)
        yield address
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130


def test_a_running_demo_appears_and_nodes_come_and_go_on_it(browser: Any, demo: str) -> None:
    with Watched(browser, demo.partition("/#")[0]) as watched:
        page = watched.page
        page.goto(demo)
        for name in ("digits", "images", "chars"):
            page.locator("#trainers tr", has_text=name).locator(".state.running").wait_for()
        words = "document.getElementById('pool-words').textContent"
        until(page, f"/[1-9][0-9]* preemption/.test({words})")
        early = int(page.get_attribute("#gantt", "data-runs"))
        until(page, f"Number(document.getElementById('gantt').dataset.runs) > {early}")
        share = re.search(r"([\d.]+) ?% used", page.evaluate(words))
        assert share, page.evaluate(words)
        assert 0 < float(share[1]) <= 100


def test_the_page_reads_well_when_it_is_narrow_and_in_the_dark(browser: Any, controller: Live, tmp_path: Path) -> None:
    url, token = client_of(controller)
    with Watched(browser, url, color_scheme="dark") as watched:
        page = watched.page
        page.set_viewport_size({"width": 400, "height": 800})
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector("#gantt[data-runs]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement !== document.body")


def test_a_thousand_nodes_and_a_day_are_drawn(browser: Any, past: Live) -> None:
    url, token = client_of(past)
    with Watched(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector("#gantt[data-runs]")
        page.click("#windows >> text=24 h")
        until(page, "Number(document.getElementById('gantt').dataset.runs) > 5000")
        # What the benchmark reads. The page keeps one of it, however often a window is chosen.
        until(page, "performance.getEntriesByName('asked-to-drawn').length === 1")
        assert page.evaluate("performance.getEntriesByType('mark').length") == 0
        assert "1001 nodes" in page.get_attribute("#gantt", "aria-label")


def test_older_decisions_come_once_however_often_one_presses(browser: Any, past: Live) -> None:
    url, token = client_of(past)
    rows = "document.querySelectorAll('#decisions tr').length"
    with Watched(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/#token={token}")
        until(page, f"{rows} === 40")
        for least in (80, 100):
            page.evaluate("[1, 2, 3].forEach(() => document.getElementById('older').click())")
            until(page, f"{rows} >= {least}")
        # Also after the newest have been read again.
        with page.expect_response(lambda answer: answer.url.endswith("/v1/decisions?limit=40")):
            pass
        until(page, "document.getElementById('older').hidden")
        keys = page.evaluate("[...document.querySelectorAll('#decisions tr')].map((row) => row.dataset.key)")
        assert len(keys) == len(set(keys)) == 100
        assert len([url for url in watched.asked if "before=" in url]) == 2


def test_the_next_user_sees_nothing_of_the_last(browser: Any, past: Live) -> None:
    url, token = client_of(past)
    with Store.open(past.folder / FILE) as store:
        nobody = store.create_token(name="nobody", owner="nobody", role="user", time=time.time())
    inked = "document.getElementById('gantt').width * document.getElementById('gantt').height"
    seen = "document.body.textContent.includes('trial-')"
    with Watched(browser, url) as watched:
        page = watched.page
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector("#gantt[data-runs]")
        page.click("#trainers button >> nth=0")
        page.wait_for_selector("#detail .plot .main-svg")
        assert page.evaluate(seen)
        # A link with another token, and then the button.
        page.goto(f"{url}/#token={nobody}")
        assert not page.evaluate(seen)
        until(page, "!document.getElementById('no-trainers').hidden && !document.getElementById('no-decisions').hidden")
        assert not page.evaluate(seen)
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector("#trainers tr")
        page.wait_for_selector("#gantt[data-runs]")
        assert page.evaluate(seen)
        page.click("text=Log out")
        assert not page.evaluate(seen)
        assert page.evaluate(inked) == 0


def test_a_hidden_page_lets_go_of_its_stream(browser: Any, past: Live) -> None:
    url, token = client_of(past)
    with Watched(browser, url) as watched:
        page, ended = watched.page, []
        page.on("requestfailed", lambda request: ended.append(request.url))
        page.goto(f"{url}/#token={token}")
        page.wait_for_selector("#link.live")
        for hidden in ("true", "false"):
            page.evaluate(f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }})")
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            if hidden == "true":
                wait_until(lambda: page.title() and f"{url}/v1/stream" in ended, what="the end of the stream")
        wait_until(lambda: page.title() and watched.asked.count(f"{url}/v1/stream") == 2, what="another stream")
        assert page.is_visible("#link.live")


def test_a_report_opens_from_a_file_and_draws(browser: Any, tmp_path: Path) -> None:
    from bftrainer.cli.main import run

    defaults = "{min_nodes: 1, max_nodes: 8, scale_up_s: 18, scale_down_s: 12, samples: 3e7}"
    workload = f"defaults: {defaults}\ntrainers:\n  - {{hpo: 6, model: ShuffleNet, every_s: 10}}\n"
    (tmp_path / "w.yaml").write_text(workload)
    words = ["trace", "synth", "--profile", "summit", "--nodes", "32", "--hours", "4", "--seed", "1"]
    trace, report = str(tmp_path / "t.parquet"), tmp_path / "r.html"
    assert run([*words, "-o", trace]) == 0
    assert run(["simulate", "--trace", trace, "--workload", str(tmp_path / "w.yaml"), "--report", str(report)]) == 0
    with Watched(browser, report.as_uri()) as watched:
        watched.page.goto(report.as_uri())
        until(watched.page, "document.getElementById('gantt-legend').children.length > 3")
        inked = watched.page.evaluate(
            "(() => { const c = document.getElementById('gantt-canvas'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; return d.some((v, i) => i % 4 === 3 && v > 0); })()"
        )
        assert inked
        assert watched.asked == [report.as_uri()]
        watched.page.set_viewport_size({"width": 390, "height": 800})  # a phone
        narrow = "[...document.querySelectorAll('#losses td')].map((cell) => cell.clientWidth)"
        assert min(watched.page.evaluate(narrow)) > 40, "no cell is two letters wide"
        prose = "[...document.querySelectorAll('#losses tbody td:last-child')].map((cell) => cell.clientWidth)"
        assert min(watched.page.evaluate(prose)) > 150
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_says_when_the_controller_is_gone_and_finds_it_again(browser: Any, past: Live) -> None:
    url, token = client_of(past)
    watched = Watched(browser, url)  # it will complain: that is the point
    try:
        watched.page.goto(f"{url}/#token={token}")
        watched.page.wait_for_selector("#link.live")
        past.kill()  # sooner done than an end in good order, and no kinder to the page
        watched.page.wait_for_selector("#link.off")
        past.start()
        wait_until(lambda: watched.page.locator("#link.live").count(), "the page back", 60)
        # An end in good order lets the page go, and says nothing of it.
        assert past.stop() == 0
        assert "ERROR" not in past.log.read_text()
        watched.page.wait_for_selector("#link.off")
    finally:
        watched.context.close()
