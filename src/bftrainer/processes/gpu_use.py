"""Reads how busy the GPUs of a node are, for agents to report: through NVML, or else through `nvidia-smi`.

NVML needs the optional package `nvidia-ml-py` (the extra `gpu`). Where neither answers there are no readings. Reading
blocks, so callers do it in a thread.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bftrainer.processes.gpu_queries import ANSWER_S, Ask, ListedGpu, matching, run_command, within
from bftrainer.processes.gpus import GpuDevice

READ_S = ANSWER_S + 2.0
"""Seconds that a reading may take."""
RETRY_S = 300.0
"""Seconds after a failure during which nothing is asked."""

_USE = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_ROW = re.compile(r"([0-9]{1,4}) *, *([^, ]+) *, *(?:([0-9]{1,3})|[^,]*?) *, *([0-9]{1,9})")
"""One line of the answer. The driver may write `[N/A]` instead of the use."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """How much of a GPU is in use at one moment."""

    id: str
    """As in `GpuDevice`."""
    percent: int
    """The share of the last moments in which the GPU computed; 0 also where the driver does not say."""
    memory_mb: int
    """Memory in use, by whatever process."""


def load_nvml() -> Any | None:
    """Return the module of NVML's functions; None: it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except Exception:  # a broken package must not fail an agent
        return None


class GpuUseReader:
    """Reads the use of a node's NVIDIA GPUs."""

    def __init__(
        self,
        gpus: Sequence[GpuDevice],
        ask: Ask = run_command,
        nvml: Callable[[], Any | None] = load_nvml,
        clock: Callable[[], float] = time.monotonic,
        limit_s: float = READ_S,
    ) -> None:
        self._gpus = tuple(gpu for gpu in gpus if gpu.kind == "cuda")
        self._ask = ask
        self._load_nvml = nvml
        self._nvml: Any | None = None
        self._clock = clock
        self._limit_s = limit_s
        self._not_before = -float("inf")
        self._stuck: threading.Thread | None = None

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading for each GPU for which there is one. Takes at most about `READ_S` seconds."""
        if not self._gpus or self._clock() < self._not_before or (self._stuck and self._stuck.is_alive()):
            return ()
        readings, thread = within(self._limit_s, self._measure)
        # A call that hangs in the driver cannot be ended. No other is made until it returns.
        self._stuck = thread if thread.is_alive() else None
        if not readings:
            self._not_before = self._clock() + RETRY_S
        return readings or ()

    def _measure(self) -> tuple[GpuReading, ...]:
        return self._through_nvml() or self._through_nvidia_smi()

    def _through_nvml(self) -> tuple[GpuReading, ...]:
        try:
            if self._nvml is None:
                nvml = self._load_nvml()
                if nvml is None:
                    return ()
                nvml.nvmlInit()
                self._nvml = nvml
            return _nvml_readings(self._gpus, self._nvml)
        except Exception:  # NVML has an exception for each of its errors, and older versions lack functions
            nvml, self._nvml = self._nvml, None
            with suppress(Exception):
                if nvml is not None:
                    nvml.nvmlShutdown()
            return ()

    def _through_nvidia_smi(self) -> tuple[GpuReading, ...]:
        rows: dict[ListedGpu, tuple[int, int]] = {}
        for line in (self._ask(_USE) or "").splitlines():
            if match := _ROW.fullmatch(line.strip()):
                index, uuid, percent, memory_mb = match.groups()
                rows[ListedGpu(index, uuid)] = (int(percent or 0), int(memory_mb))
        readings = []
        for gpu in self._gpus:
            row = matching(gpu.id, tuple(rows))
            if row is not None:
                readings.append(GpuReading(gpu.id, *rows[row]))
        return tuple(readings)


def _nvml_readings(gpus: Sequence[GpuDevice], nvml: Any) -> tuple[GpuReading, ...]:
    handles: dict[ListedGpu, Any] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # the GPU of another job
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            handles[ListedGpu(str(index), _text(nvml.nvmlDeviceGetUUID(handle)))] = handle
    readings = []
    for gpu in gpus:
        row = matching(gpu.id, tuple(handles))
        with suppress(nvml.NVMLError):
            # The list has no parts of GPUs (MIG); NVML finds them by name.
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.id) if row is None else handles[row]
            memory_mb = int(nvml.nvmlDeviceGetMemoryInfo(handle).used) >> 20
            percent = 0
            with suppress(nvml.NVMLError):  # parts have none
                percent = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            readings.append(GpuReading(gpu.id, percent, memory_mb))
    return tuple(readings)


def _text(uuid: Any) -> str:
    """Return a UUID as text; older versions of the package return bytes."""
    return uuid.decode(errors="replace") if isinstance(uuid, bytes) else str(uuid)
