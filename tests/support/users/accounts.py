"""Unix accounts for a test: made by useradd, with homes of mode 0700, and removed after with all their processes."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bftrainer.cluster.owners.accounts import Account, Accounts, clean_environment

REPOSITORY = Path(__file__).resolve().parents[3]
_CANDIDATES = (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


def why_not() -> str:
    """Why tests with accounts cannot run here; empty if they can."""
    if os.geteuid() != 0:
        return "it makes Unix users, which only root can do"
    missing = [name for name in ("useradd", "userdel") if shutil.which(name) is None]
    return f"it makes Unix users with {missing[0]}, which is not here" if missing else ""


@contextmanager
def unix_users(*prefixes: str) -> Iterator[list[Account]]:
    """Make one account per prefix, with a unique name."""
    if reason := why_not():
        pytest.skip(reason)
    names = [f"{prefix}-{secrets.token_hex(3)}" for prefix in prefixes]
    homes = Path(tempfile.mkdtemp(prefix="bft-homes-"))
    homes.chmod(0o755)
    try:
        for name in names:
            make = ["useradd", "--create-home", "--home-dir", str(homes / name), "--shell", "/bin/sh", "-U", name]
            done = subprocess.run(make, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"useradd cannot make users here: {done.stderr.strip()}")
            (homes / name).chmod(0o700)
        yield [Accounts().of(name) for name in names]
    finally:
        for name in names:
            with suppress(KeyError):
                _end_processes_of(pwd.getpwnam(name).pw_uid)
                subprocess.run(["userdel", "--remove", name], capture_output=True)
        shutil.rmtree(homes, ignore_errors=True)


def processes_of(uid: int) -> list[int]:
    """Return the processes of an account, by their real user id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                lines = (entry / "status").read_text().splitlines()
                ids = next(line for line in lines if line.startswith("Uid:")).split()[1:]
                state = next(line for line in lines if line.startswith("State:"))
                if str(uid) in ids and "Z" not in state:
                    found.append(int(entry.name))
    return found


def _end_processes_of(uid: int) -> None:
    deadline = time.monotonic() + 10
    while (left := processes_of(uid)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def run_as(
    account: Account, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a program as an account, in its home, and return what it printed."""
    return subprocess.run(
        list(argv),
        user=account.uid,
        group=account.gid,
        extra_groups=list(account.groups),
        cwd=account.home,
        env={**clean_environment(account), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@contextmanager
def public_python() -> Iterator[str]:
    """Give an interpreter with all of this environment's packages that every account can run.

    The interpreter of the tests may lie in root's home. Then a virtual environment of the system's is made, of the same
    version, that finds the packages where they are.
    """
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    folder = Path(tempfile.mkdtemp(prefix="bft-python-"))
    folder.chmod(0o755)
    try:
        for base in _CANDIDATES:
            if shutil.which(base) is None or not _all_may_run(Path(base)):
                continue
            subprocess.run([base, "-m", "venv", "--without-pip", "--symlinks", str(folder / "venv")], check=True)
            own = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
            (own / "tests.pth").write_text(f"{packages}\n{REPOSITORY / 'src'}\n")
            python = str(folder / "venv" / "bin" / "python")
            code = "import importlib.util as found, bftrainer.cluster.agent.options; assert found.find_spec('torch')"
            nobody = pwd.getpwnam("nobody")
            tried = subprocess.run(
                [python, "-c", code],
                user=nobody.pw_uid,
                group=nobody.pw_gid,
                extra_groups=[],
                cwd="/",
                env={},
                capture_output=True,
                text=True,
            )
            if tried.returncode == 0:
                yield python
                return
            shutil.rmtree(folder / "venv")
        pytest.skip("no interpreter of this version here can be run by all users with the packages of the tests")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _all_may_run(path: Path) -> bool:
    real = path.resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (real, *real.parents))
