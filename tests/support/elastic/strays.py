"""A worker that starts something and does not end it."""

from __future__ import annotations

import os
from pathlib import Path

from bftrainer.processes.launch import Command, Process, ProcessLauncher
from support.waiting import until

SCRIPT = """
import os, signal, subprocess, sys, time
folder, how, end = sys.argv[1:]
if how == "session":  # as servers of experiment trackers do
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
elif how == "daemon":  # orphaned before the worker ends
    command = "sleep 600 >/dev/null 2>&1 & echo $!"
    stray = int(subprocess.run(["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE).stdout)
elif how == "fork":  # without another program, so without an environment of its own
    stray = os.fork()
    if stray == 0:
        os.setsid()
        time.sleep(600)
elif how == "bare":  # with an empty environment
    stray = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}).pid
with open(f"{folder}/stray.new", "w") as file:
    file.write(str(stray))
os.rename(f"{folder}/stray.new", f"{folder}/stray")
if end == "raises":
    raise SystemExit(1)
if end == "waits":
    time.sleep(600)
"""


async def begin(launcher: ProcessLauncher, folder: Path, how: str, end: str) -> tuple[Process, int]:
    """A worker that has started something: both."""
    folder.mkdir(exist_ok=True)
    script = folder / "worker.py"
    script.write_text(SCRIPT)
    argv = (str(script), str(folder), how, end)
    process = await launcher.start(Command(argv, os.environ, str(folder), str(folder / "log")))
    await until((folder / "stray").exists, "what it starts")
    return process, int((folder / "stray").read_text())
