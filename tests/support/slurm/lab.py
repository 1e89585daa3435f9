"""A real Slurm of a few nodes on this machine, for tests: `cluster.sh` in a folder and a port range of its own."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.waiting import wait_until

CLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "cluster.sh"
PATIENCE_S = 60.0
_CLONE_NEWNET = 0x40000000


class Lab:
    """A cluster that is up."""

    def __init__(self, folder: Path, environment: Mapping[str, str], count: int) -> None:
        self.folder = folder
        self.environment = dict(environment)
        self.count = count

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def at(self, host: str) -> tuple[str, ...]:
        """The words before a command that make it run on a host: `head` or a node. None if all is one machine."""
        return (str(self.folder / "at"), host) if self.environment.get("LAB_NAMESPACES") == "1" else ()

    @contextmanager
    def network(self, host: str) -> Iterator[Executor]:
        """One thread of this process whose connections are made on a host."""

        def enter() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/run/netns/bft{self.environment['LAB_PORT']}-{host}").open() as namespace:
                assert libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

        with ThreadPoolExecutor(1, initializer=enter) as thread:
            yield thread

    def script(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `cluster.sh`."""
        return subprocess.run(
            ["bash", str(CLUSTER), *words], env=self.environment, capture_output=True, text=True, timeout=300
        )

    def run(self, *argv: str) -> str:
        """What a command of Slurm prints."""
        env = {**self.environment, "SLURM_CONF": str(self.conf)}
        done = subprocess.run([*self.at("head"), *argv], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def submit(self, *options: str, script: str = "sleep 600") -> str:
        """Submit a job to partition main unless said otherwise; its id."""
        quiet = ("--output=/dev/null", f"--chdir={self.folder}")
        return self.run("sbatch", "--parsable", "-p", "main", *quiet, *options, f"--wrap={script}").strip()

    def jobs(self, *options: str) -> dict[str, str]:
        """The state of each job that has not ended, by its id."""
        lines = self.run("squeue", "-h", "-o", "%i %T", *options).split("\n")
        return dict(line.split(maxsplit=1) for line in lines if line)

    def states(self) -> dict[str, str]:
        """The state of each node."""
        return dict(line.split() for line in self.run("sinfo", "-N", "-h", "-p", "main", "-o", "%N %T").splitlines())

    def pid(self, daemon: str) -> int:
        """The process of `slurmctld` or `slurmd.NODE`."""
        return int((self.folder / "run" / f"{daemon}.pid").read_text())

    @contextmanager
    def stopped(self, daemon: str) -> Iterator[None]:
        """A daemon that hangs meanwhile."""
        pid = self.pid(daemon)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def restart(self) -> None:
        """End slurmctld, which stores what it knows, and start it again."""
        pid = self.pid("slurmctld")
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of slurmctld", PATIENCE_S)
        self._start(*self.at("head"), "slurmctld", "-f", str(self.conf))

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node again."""
        self._start(*self.at(node), "slurmd", "-c", "-N", node, "-f", str(self.conf))

    def _start(self, *argv: str) -> None:
        env = {**self.environment, "PATH": f"{self.environment['PATH']}:/usr/sbin:/sbin"}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(argv, env=env, check=True, timeout=60, **quiet)

    def open_to_users(self) -> None:
        """Let all users of this machine use the cluster: they may read its configuration and reach munge."""
        for folder in (self.folder, self.folder / "run"):
            folder.chmod(0o755)
        self.conf.chmod(0o644)

    def clear(self) -> None:
        """End all jobs, and wait until all nodes are idle."""
        if jobs := list(self.jobs()):
            self.run("scancel", *jobs)
        wait_until(
            lambda: set(self.states().values()) == {"idle"} and not self.jobs(),
            lambda: f"an empty cluster ({self.states()}, {self.jobs()})",
            PATIENCE_S,
        )


@contextmanager
def cluster(count: int, **settings: str) -> Iterator[Lab]:
    """A cluster of `count` nodes, with settings of `cluster.sh` such as `LAB_GRACE`.

    Where there can be none, it skips; where Slurm cannot be installed although `$CI` is set, it fails.

    With `LAB_NAMESPACES="1"` every node is a host of its own: see `cluster.sh`.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root: slurmd starts jobs as their users")
    folder = Path(tempfile.mkdtemp(prefix="bft-lab-", dir="/tmp"))  # a short path: sockets are in it
    lab = Lab(folder, {**_plain(), "LAB_DIR": str(folder), "LAB_PORT": str(_ports(count)), **settings}, count)
    try:
        installed = lab.script("install")
        if installed.returncode != 0:
            refuse = pytest.fail if os.environ.get("CI") else pytest.skip
            refuse(f"needs Slurm: {installed.stderr.strip() or installed.stdout.strip()}")
        started = lab.script("up", str(count))
        assert started.returncode == 0, started.stderr
        yield lab
    finally:
        lab.script("down")
        shutil.rmtree(folder, ignore_errors=True)


def _plain() -> dict[str, str]:
    """This environment without what would change Slurm's commands or the cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "LAB_"))}


def _ports(count: int) -> int:
    """The first of enough ports that nobody listens on, below those that the kernel hands out."""
    chance = random.Random(os.getpid() ^ time.time_ns())
    for _ in range(100):
        first = chance.randrange(12_000, 30_000)
        if all(_free(first + i) for i in (*range(count + 1), 901, 902)):
            return first
    raise AssertionError("there are no free ports")


def _free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
