"""Readings of how busy a node's GPUs are: by NVML, by `nvidia-smi`, or none."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from bftrainer.processes.gpu_use import RETRY_S, GpuReading, GpuUseReader
from bftrainer.processes.gpus import GpuDevice

A, B, MIG = "GPU-8932f937-aaaa", "GPU-1a2b3c4d-bbbb", "MIG-53b7d1a4-cccc"
USE = f"0, {A}, 97, 81234\n1, {B}, [N/A], 12\n"


class Tool:
    """An `nvidia-smi` with a settable answer, and the number of times it was asked."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.asked = 0

    def __call__(self, argv: Sequence[str]) -> str | None:
        assert argv[0] == "nvidia-smi"
        self.asked += 1
        return self.answer


class NvmlError(Exception):
    pass


class Nvml:
    """The part of the module `pynvml` that is used, for two GPUs of which the first is divided."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.works = True
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.works:
            raise NvmlError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if not self.works:
            raise NvmlError("GPU is lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return (A, B)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != MIG:
            raise NvmlError("Not Found")
        return MIG

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return handle.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=(100 + len(handle)) << 20)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        if handle == MIG:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=55)


def gpus(*ids: str, kind: str = "cuda") -> list[GpuDevice]:
    return [GpuDevice(gpu_id, kind) for gpu_id in ids]


def test_nvidia_smi_is_read_where_nvml_is_not_installed() -> None:
    reader = GpuUseReader(gpus("1", "0"), Tool(USE), nvml=lambda: None)
    assert reader.read() == (GpuReading("1", 0, 12), GpuReading("0", 97, 81234))


def test_only_the_nodes_own_devices_are_returned_under_their_own_ids() -> None:
    assert GpuUseReader(gpus("GPU-1a2b"), Tool(USE), nvml=lambda: None).read() == (GpuReading("GPU-1a2b", 0, 12),)
    assert GpuUseReader(gpus("7", "0"), Tool(USE), nvml=lambda: None).read() == (GpuReading("0", 97, 81234),)


def test_nvml_is_opened_once_and_knows_parts_of_gpus() -> None:
    nvml, tool = Nvml(), Tool(USE)
    reader = GpuUseReader(gpus("1", A, MIG, "7"), tool, nvml=lambda: nvml)
    expected = (GpuReading("1", 55, 117), GpuReading(A, 55, 117), GpuReading(MIG, 0, 117))
    assert reader.read() == reader.read() == expected
    assert (nvml.opened, tool.asked) == (1, 0)


def test_nvidia_smi_is_read_while_nvml_fails() -> None:
    nvml, tool = Nvml(), Tool(USE)
    reader = GpuUseReader(gpus("0"), tool, nvml=lambda: nvml)
    assert reader.read() == (GpuReading("0", 55, 117),)
    nvml.works = False
    assert reader.read() == reader.read() == (GpuReading("0", 97, 81234),)
    assert nvml.opened == 0
    nvml.works = True
    assert reader.read() == (GpuReading("0", 55, 117),)


@pytest.mark.parametrize(
    "answer", [None, "", "No devices were found", "0, x", ", , , ", "0, GPU-x, 1, [N/A]", "²,²,²,²"]
)
def test_after_a_failure_nothing_is_asked_for_a_while(answer: str | None) -> None:
    now, tool = [0.0], Tool(answer)
    reader = GpuUseReader(gpus("0"), tool, nvml=lambda: None, clock=lambda: now[0])
    assert reader.read() == reader.read() == ()
    assert tool.asked == 1
    now[0] += RETRY_S
    tool.answer = USE
    assert reader.read() == reader.read() == (GpuReading("0", 97, 81234),)


@pytest.mark.parametrize("devices", [[], gpus("0", kind="rocm")])
def test_nobody_is_asked_without_an_nvidia_gpu(devices: list[GpuDevice]) -> None:
    tool = Tool(USE)
    assert GpuUseReader(devices, tool, nvml=Nvml).read() == ()
    assert tool.asked == 0


@pytest.fixture
def recovered() -> Iterator[threading.Event]:
    """Set at the latest when the test ends, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


def test_while_a_question_hangs_in_the_driver_no_other_is_asked(recovered: threading.Event) -> None:
    now, asked = [0.0], []

    def hangs(argv: Sequence[str]) -> str | None:
        asked.append(threading.current_thread())
        recovered.wait()
        return USE

    reader = GpuUseReader(gpus("0"), hangs, nvml=lambda: None, clock=lambda: now[0], limit_s=0.01)
    assert reader.read() == ()
    now[0] += RETRY_S
    assert reader.read() == ()
    assert len(asked) == 1
    recovered.set()
    asked[0].join()
    reader = GpuUseReader(gpus("0"), hangs, nvml=lambda: None)
    assert reader.read() == (GpuReading("0", 97, 81234),)


@pytest.mark.waits
def test_the_real_tool_on_the_path_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=index,uuid,utilization.gpu,memory.used ] && printf "{USE}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert GpuUseReader(gpus("0"), nvml=lambda: None).read() == (GpuReading("0", 97, 81234),)
