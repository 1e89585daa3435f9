"""A reader at a terminal: types the commands of a page, in order, in a folder of its own, and reads the answers."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import TracebackType

from bftrainer.cli.main import run
from support.cluster.live import Live
from support.docs.pages import Step


class Terminal:
    """Its folder is the current one; what it starts ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controller: Live | None = None
        self._open = ExitStack()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def type(self, step: Step) -> None:
        """Carry out a command and compare what it prints with what the page says."""
        if step.not_run:
            known(step.command)
            return
        said = self._said(step.command)
        rest = _plain(said)
        for line in step.shows:
            pattern = re.escape(_plain(line)).replace("…", ".*?")
            match = re.search(pattern, rest)
            assert match, f"{step.command}: the page says {line!r}, and it printed:\n{said}"
            rest = rest[match.end() :]

    def _said(self, command: str) -> str:
        words = shlex.split(command)
        if words[0] == "make":
            return self._made(command)
        if words[0] == "export":
            assert words[1:] == [f"PATH=$PWD/{Path('.venv/bin')}:$PATH"], command
            return ""
        if words[:2] == ["bftrainer", "serve"]:
            self.controller = self._open.enter_context(Live(self.folder / "state", *words[2:]))
            return ""
        if words == ["bftrainer", "watch"]:
            return watched()
        if words[0] == "bftrainer" and not re.search(r"[|>&;]", command):
            if words[1:3] == ["trace", "record"]:
                words += ["--interval", "0.1"]
            with redirect_stdout(io.StringIO()) as output:
                status = run(words[1:])
            assert status == 0, f"{command}: exit status {status}\n{output.getvalue()}"
            return output.getvalue()
        if words[0] == "python":
            command = shlex.join([sys.executable, *words[1:]])
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _made(self, command: str) -> str:
        """What `make` does in a clone, with less to do.

        `make test` finds the tests of one folder, but runs none: that is what runs this one. The demo is cut off before
        its trainers are done, so it fails, but with its summary.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST_"))}
        env |= {
            "PYTEST_ADDOPTS": "--collect-only -q -p no:cacheprovider tests/util",
            "CHECK": "true",
            "DEMO": "--seconds 10",
        }
        done = subprocess.run(
            shlex.split(command), cwd=self.folder, env=env, capture_output=True, text=True, timeout=900, check=False
        )
        cut_off = command == "make demo" and re.search(r"digits.*images.*chars", done.stdout, re.DOTALL)
        assert done.returncode == 0 or cut_off, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        assert "building .venv" not in done.stderr, "clone.py and scripts/setup.sh differ in their stamp"
        return done.stdout


def watched() -> str:
    """What `bftrainer watch` prints at first; then Ctrl-C."""
    argv = [sys.executable, "-m", "bftrainer", "watch"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"}) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert first.strip()
    assert process.returncode == 0
    return first + rest


def known(command: str) -> None:
    """Whether a command that needs what is not here exists, with the options that it is shown with."""
    words = shlex.split(command)
    assert words[0] == "bftrainer", f"{command}: only commands of ours can be checked without being run"
    script = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh"))), len(words))
    if words[1].startswith("-"):
        said = _help()
    else:
        said = _help(words[1])
        if "\nCommands:" in said and not words[2].startswith("-"):
            said = _help(*words[1:3])
    options = [word.partition("=")[0] for word in words[:script] if word.startswith("-")]
    assert [option for option in options if not re.search(rf"(?<![\w-]){option}\b", said)] == [], command


def _help(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as output:
        assert run([*words, "--help"]) == 0, words
    return output.getvalue()


def _plain(text: str) -> str:
    return " ".join(text.split())
