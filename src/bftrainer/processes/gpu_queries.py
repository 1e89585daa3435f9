"""Questions to `nvidia-smi` and `rocm-smi`: which GPUs there are, what they are called, which CPU cores are near.

`gpus.py` adds the answers to what a node was granted, `gpu_use.py` matches readings with them. Answers are read
leniently: drivers differ in what they print, and no answer of theirs may fail an agent.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bftrainer.processes.cpu_cores import number_list
from bftrainer.processes.run import CommandError, run

Ask = Callable[[Sequence[str]], str | None]
"""Runs a command and returns its stdout; None if it failed, hung or does not exist."""

ANSWER_S = 10.0
"""Seconds that a command may take. The first `nvidia-smi` after a boot may have to start the driver."""
_GRACE_S = 2.0
"""Seconds that a killed command may take to end."""

_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,pci.bus_id", "--format=csv,noheader,nounits")
_NVIDIA_PARTS = ("nvidia-smi", "-L")
_ROCM_OPTIONS = ("--showid", "--showuniqueid", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json")
_ROCM = ("rocm-smi", *_ROCM_OPTIONS)

_PCI_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_LISTED_GPU = re.compile(r"GPU [0-9]+: .*\(UUID: (GPU-[^)\s]+)\)")
_LISTED_PART = re.compile(r"\s+(MIG \S+) .*\(UUID: (MIG-[^)\s]+)\)")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU as the driver's tool lists it."""

    index: str
    uuid: str
    name: str = ""
    memory_mb: int = 0
    pci_id: str = ""
    """As in `/sys/bus/pci/devices`, such as `0000:3b:00.0`; empty: unknown."""

    def cores(self, sys_root: Path) -> frozenset[int]:
        """Return the CPU cores near the GPU; empty: unknown."""
        if not self.pci_id:
            return frozenset()
        with suppress(OSError, UnicodeDecodeError):
            return frozenset(number_list((sys_root / "bus/pci/devices" / self.pci_id / "local_cpulist").read_text()))
        return frozenset()


def run_command(argv: Sequence[str]) -> str | None:
    """Run a command for at most `ANSWER_S` seconds. See `Ask`.

    A command that hangs in the driver cannot be killed; then this call does not return before the driver recovers.
    """
    try:
        result = run(argv, ANSWER_S)
    except CommandError:
        return None
    return result.out.decode(errors="replace") if result.status == 0 else None


def ask_command(argv: Sequence[str]) -> str | None:
    """Run a command as `run_command` does, and return in any case, even if the command cannot be killed."""
    answer, _ = within(ANSWER_S + _GRACE_S, lambda: run_command(argv))
    return answer


def within(limit_s: float, call: Callable[[], T]) -> tuple[T | None, threading.Thread]:
    """Make a call in another thread. Return its result, None if it fails or takes longer, and the thread.

    The program can end while the thread still runs.
    """
    results: list[T] = []

    def make_call() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=make_call, name="asks for GPUs", daemon=True)
    thread.start()
    thread.join(limit_s)
    return (results[0] if results else None), thread


def nvidia_gpus(ask: Ask) -> tuple[ListedGpu, ...]:
    """Return the GPUs that `nvidia-smi` lists, in the order of their indices."""
    listed = []
    for line in (ask(_NVIDIA) or "").splitlines():
        index, uuid, *rest = [field.strip() for field in line.split(",")] + ["", ""]
        pci = [pci_id for field in rest if (pci_id := normal_pci_id(field))]
        texts = [field for field in rest if field and not normal_pci_id(field)]
        if re.fullmatch("[0-9]{1,4}", index):
            memory_mb = _whole(texts.pop()) if len(texts) > 1 else 0
            listed.append(ListedGpu(str(int(index)), uuid, ", ".join(texts), memory_mb, pci[0] if pci else ""))
    return tuple(listed)


def nvidia_parts(ask: Ask) -> dict[str, tuple[str, str]]:
    """Return the parts into which GPUs are divided (MIG): by its name, a part's GPU (a UUID) and its profile."""
    parts: dict[str, tuple[str, str]] = {}
    whole = ""
    for line in (ask(_NVIDIA_PARTS) or "").splitlines():
        if gpu := _LISTED_GPU.match(line):
            whole = gpu[1]
        elif part := _LISTED_PART.match(line):
            parts[part[2]] = (whole, part[1])
    return parts


def rocm_gpus(ask: Ask) -> tuple[ListedGpu, ...]:
    """Return the GPUs that `rocm-smi` lists, in the order of their indices."""
    text = ask(_ROCM) or ""
    try:
        answer: Any = json.loads(text[text.index("{") : text.rindex("}") + 1])  # warnings may come before and after it
    except (ValueError, RecursionError):
        return ()
    listed = []
    for card, fields in answer.items():
        index = re.fullmatch("card([0-9]{1,4})", card)
        if index and isinstance(fields, dict):
            # The case of the names, and the names, differ between versions.
            by_name = {name.casefold(): str(value).strip() for name, value in fields.items()}
            unique = by_name.get("unique id", "").casefold().removeprefix("0x")
            listed.append(
                ListedGpu(
                    str(int(index[1])),
                    f"GPU-{unique}" if re.fullmatch("[0-9a-f]+", unique) else "",
                    by_name.get("card series") or by_name.get("device name") or "",
                    _whole(by_name.get("vram total memory (b)", "")) >> 20,
                    normal_pci_id(by_name.get("pci bus", "")),
                )
            )
    return tuple(sorted(listed, key=lambda gpu: int(gpu.index)))


def matching(gpu_id: str, listed: Sequence[ListedGpu]) -> ListedGpu | None:
    """Return the listed GPU that has this number or UUID, which may be cut short. None: there is not exactly one."""
    if gpu_id.isdigit():
        found = [gpu for gpu in listed if gpu.index == gpu_id]
    else:
        found = [gpu for gpu in listed if gpu.uuid.casefold().startswith(gpu_id.casefold())]
    return found[0] if len(found) == 1 else None


def normal_pci_id(text: str) -> str:
    """Return a PCI id as the kernel writes it: `00000000:3B:00.0` is `0000:3b:00.0`. Empty: it is none."""
    match = _PCI_ID.fullmatch(text.strip())
    if match is None:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def _whole(text: str) -> int:
    """Return a number that a driver printed; 0 for texts such as `[N/A]`."""
    match = re.fullmatch(r"([0-9]{1,18})(?:\.[0-9]*)?", text.strip())
    return int(match[1]) if match else 0
