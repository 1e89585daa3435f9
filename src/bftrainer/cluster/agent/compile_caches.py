"""Compile caches: workers of one script share what torch.compile and Triton make, so that a newcomer need not compile.

The controller names a folder per script and interpreter, which all nodes see (`variables.COMPILED`). Each kind of
machine has a folder of its own in it: compilers make code for the processor that they run on.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bftrainer.processes import variables
from bftrainer.processes.gpus import GpuDevice

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""The variables that name caches, and the folder for each."""
_ABOUT_THE_CPU = ("model name", "flags", "Features", "CPU part")


def machine_kind(gpus: Iterable[GpuDevice], cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return a name that machines share if code compiled on one of them runs on the others."""
    facts = {platform.machine(), platform.libc_ver()[1], *(gpu.name for gpu in gpus)}
    with suppress(OSError, UnicodeDecodeError):
        lines = cpu_info.read_text().splitlines()
        facts |= {line for line in lines if line.startswith(_ABOUT_THE_CPU)}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:16]


def add_caches(environment: dict[str, str], kind: str) -> None:
    """Let the caches of a worker be in the folder of its script, unless the user or the site has named others."""
    folder = environment.get(variables.COMPILED)
    if folder:
        for name, cache in CACHES.items():
            environment.setdefault(name, str(Path(folder, kind, cache)))
