"""Who installs BFTrainer to simulate needs neither PyTorch nor numba, and never waits for them."""

from __future__ import annotations

import subprocess
import sys

import pytest


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.waits
def test_the_command_line_loads_neither_torch_nor_numba() -> None:
    loaded = modules_after(
        "from bftrainer.cli.main import run\n"
        "run(['simulate', '--help'])\n"
        "import bftrainer.simulate.study, bftrainer.paper.registry\n"
        "import bftrainer.allocate.exact, bftrainer.traces.readers.importing"
    )
    assert "bftrainer.simulate.study" in loaded
    assert not loaded & {"torch", "numba", "highspy"}


@pytest.mark.waits
def test_help_and_a_controller_do_not_wait_for_what_only_traces_and_figures_need() -> None:
    loaded = modules_after("from bftrainer.cli.main import run\nrun(['--help'])\nimport bftrainer.cluster.serve")
    assert not loaded & {"torch", "numba", "highspy", "polars", "matplotlib", "plotly"}


@pytest.mark.waits
def test_a_trainer_that_is_not_pytorch_needs_nothing_but_python() -> None:
    loaded = modules_after("import bftrainer.elastic.membership, bftrainer.elastic.run, bftrainer.elastic.control")
    assert not loaded & {"torch", "numpy", "numba", "polars"}


@pytest.mark.waits
def test_an_agent_starts_without_what_it_rarely_needs() -> None:
    loaded = modules_after("import bftrainer.cluster.agent.agent")
    assert "bftrainer.cluster.agent.workers" in loaded
    assert not loaded & {"torch", "numpy", "bftrainer.cluster.agent.own_starts"}


@pytest.mark.waits
def test_what_a_script_imports_is_light_until_it_begins() -> None:
    assert not modules_after("from bftrainer import elastic") & {"torch", "numpy"}


def test_documented_names_that_moved_are_found_in_their_former_places() -> None:
    from bftrainer.client import api
    from bftrainer.cluster import client
    from bftrainer.cluster.pools import base
    from bftrainer.elastic import membership

    assert client.ApiClient is api.ApiClient
    assert client.find_controller is api.find_controller
    assert base.Office is base.PoolHost
    assert membership.Place is membership.Assignment
