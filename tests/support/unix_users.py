"""Unix users for a test: made by root, with homes of their own, and removed with all that they left running."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class UnixUser:
    """A user, and a Python that every user can run, with this version of BFTrainer."""

    name: str
    uid: int
    home: Path
    python: str

    def argv(self, *argv: str) -> tuple[str, ...]:
        """The words of a command that is run as this user."""
        return ("runuser", "-u", self.name, "--", *argv)

    def environment(self, **more: str) -> dict[str, str]:
        """The environment in which a command of this user begins."""
        ours = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": os.environ["PATH"]}
        return {**ours, **more}

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command as this user."""
        env = self.environment(**environment)
        done = self.argv(*argv)
        return subprocess.run(done, env=env, cwd=self.home, capture_output=True, text=True, timeout=120)

    def start(self, *argv: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command as this user. Its process id is that of the command itself."""
        env = self.environment(**environment)
        with log.open("ab") as out:
            # `setpriv` replaces itself by the command, where `runuser` stays its parent.
            return subprocess.Popen(
                ("setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--init-groups", "--", *argv),
                env=env,
                cwd=self.home,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def processes(self) -> dict[int, str]:
        """The command lines of the processes of this user, by id."""
        return processes_of_uid(self.uid)


@contextmanager
def unix_users(*names: str) -> Iterator[Mapping[str, UnixUser]]:
    """Make users whose names begin with these; skips where that cannot be done."""
    if os.geteuid() != 0 or shutil.which("useradd") is None or shutil.which("setpriv") is None:
        pytest.skip("needs root, useradd and setpriv: the test makes Unix users")
    folder = Path(tempfile.mkdtemp(prefix="bft-users-", dir="/tmp"))
    folder.chmod(0o755)
    python = python_of_users(folder)
    users: dict[str, UnixUser] = {}
    try:
        for name in names:
            full, home = f"bft{name}{secrets.token_hex(3)}", folder / name
            subprocess.run(
                ("useradd", "--create-home", "--home-dir", str(home), "--shell", "/bin/sh", "--user-group", full),
                check=True,
                capture_output=True,
            )
            home.chmod(0o700)
            users[name] = UnixUser(full, pwd.getpwnam(full).pw_uid, home, python)
        yield users
    finally:
        for user in users.values():
            for pid in processes_of_uid(user.uid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(("userdel", user.name), check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def processes_of_uid(uid: int) -> dict[int, str]:
    """The command lines of a user's processes, by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == uid:
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                    )
    return found


def python_of_users(folder: Path) -> str:
    """An executable that is a Python for all users, with this version of BFTrainer and all it needs."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3", f"/usr/bin/python{version}"):
        done = subprocess.run(
            ("runuser", "-u", "nobody", "--", candidate, "-c", probe),
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        if done.stdout.strip() == version:
            break
    else:
        pytest.skip(f"needs a Python {version} that every user can run")
    paths: Sequence[str] = (str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages")))
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH='{os.pathsep.join(paths)}'\nexec {candidate} \"$@\"\n")
    script.chmod(0o755)
    return str(script)
