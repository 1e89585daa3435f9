"""GPUs of a node: what was granted counts, and the drivers' tools add what they know about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.processes.gpu_queries import ask_command, normal_pci_id
from bftrainer.processes.gpus import GpuDevice, find_gpus

A, B = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1a2b3c4d-0000-4106-c12f-20bd9faed9f6"
TWO = f"0, {A}, NVIDIA H200, 143771, 00000000:3B:00.0\n1, {B}, NVIDIA H200, 143771, 00000000:AF:00.0\n"
MIG = "MIG-53b7d1a4-5f8a-5b7c-9e3d-1c2b3a4d5e6f"
PARTS = f"GPU 0: NVIDIA H200 (UUID: {A})\n  MIG 1g.18gb     Device  0: (UUID: {MIG})\n"
ROCM = {
    "card1": {"Card Series": "AMD Instinct MI250X", "VRAM Total Memory (B)": "68702699520", "PCI Bus": "0000:C6:00.0"},
    "card0": {
        "Card series": "AMD Instinct MI250X",
        "VRAM Total Memory (B)": "68702699520",
        "Unique ID": "0x1f9de0957d137942",
        "PCI Bus": "0000:C1:00.0",
    },
    "system": {"Driver version": "6.3.6"},
}


class Tools:
    """Answers of `nvidia-smi` and `rocm-smi`, and which of them was asked how often."""

    def __init__(self, nvidia: str | None = None, rocm: str | None = None, parts: str | None = None) -> None:
        self._answers = {"nvidia-smi": nvidia, "rocm-smi": rocm, "nvidia-smi -L": parts}
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> str | None:
        name = "nvidia-smi -L" if list(argv) == ["nvidia-smi", "-L"] else argv[0]
        self.asked.append(name)
        return self._answers[name]


def ids(environment: Mapping[str, str], tools: Tools | None = None) -> list[str]:
    return [gpu.id for gpu in find_gpus(environment, tools or Tools(), Path("/nowhere"))]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", ["0"]),
        ("2,3", ["2", "3"]),
        (" 3 , 1 ", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("void", []),
        ("0,1,-1,2", ["0", "1"]),
        ("0,what,1", ["0"]),
        ("0,,1", ["0"]),
        ("1,1,0", ["1", "0"]),
        ("01", ["1"]),
        ("²", []),
        ("9" * 5000, []),
        (f"{A},{B}", [A, B]),
        ("GPU-8932", ["GPU-8932"]),
        ("GPU-", []),
        (MIG, [MIG]),
        (f"MIG-{A}/1/0,MIG-{A}/2/0", [f"MIG-{A}/1/0", f"MIG-{A}/2/0"]),
    ],
)
def test_a_visibility_variable_names_the_devices_up_to_its_first_invalid_entry(
    variable: str, text: str, expected: list[str]
) -> None:
    assert ids({variable: text}) == expected
    assert ids({variable: text, "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "5", "SLURM_GPUS_ON_NODE": "9"}) == expected


def test_granted_devices_count_where_no_driver_is_installed() -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, Tools()) == (GpuDevice("1", "cuda"), GpuDevice("2", "cuda"))
    assert find_gpus({"ROCR_VISIBLE_DEVICES": "1"}, Tools()) == (GpuDevice("1", "rocm"),)
    assert find_gpus({"SLURM_GPUS_ON_NODE": "2"}, Tools()) == (GpuDevice("0", "cuda"), GpuDevice("1", "cuda"))


def test_nobody_is_asked_when_no_gpu_was_granted() -> None:
    tools = Tools(TWO)
    assert ids({"CUDA_VISIBLE_DEVICES": ""}, tools) == []
    assert ids({"SLURM_JOB_ID": "7"}, tools) == []
    assert tools.asked == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_JOB_GPUS": "0,1,3"}, ["0", "1", "3"]),
        ({"SLURM_JOB_GPUS": "0-3"}, ["0", "1", "2", "3"]),
        ({"SLURM_JOB_GPUS": "0-1,6-7"}, ["0", "1", "6", "7"]),
        ({"SLURM_JOB_GPUS": "0-3", "SLURM_STEP_GPUS": "2"}, ["2"]),
        ({"SLURM_JOB_GPUS": "", "SLURM_GPUS_ON_NODE": "2"}, ["0", "1"]),
        ({"SLURM_JOB_GPUS": "garbage", "SLURM_GPUS_ON_NODE": "a100:1,v100:1"}, ["0", "1"]),
        ({"SLURM_JOB_GPUS": "0-99999999"}, []),
        ({"SLURM_JOB_GPUS": "5-2"}, []),
        ({"SLURM_GPUS_ON_NODE": "0"}, []),
        ({"SLURM_GPUS_ON_NODE": "9999"}, []),
        ({"SLURM_GPUS_ON_NODE": "many"}, []),
        ({}, []),
    ],
)
def test_in_a_job_of_slurm_its_variables_say_what_was_granted(environment: dict[str, str], expected: list[str]) -> None:
    assert ids({"SLURM_JOB_ID": "7", **environment}) == expected


def test_slurms_numbers_are_those_of_the_node_unless_the_job_sees_only_its_own_devices() -> None:
    four = "".join(f"{index}, GPU-{index}, NVIDIA H200, 143771\n" for index in range(4))
    assert ids({"SLURM_JOB_GPUS": "2,3"}, Tools(four)) == ["2", "3"]
    assert ids({"SLURM_JOB_GPUS": "2,3"}, Tools(TWO)) == ["0", "1"]


def test_outside_of_slurm_all_devices_that_the_driver_lists_count(tmp_path: Path) -> None:
    assert find_gpus({}, Tools(TWO), tmp_path) == (
        GpuDevice("0", "cuda", "NVIDIA H200", 143771),
        GpuDevice("1", "cuda", "NVIDIA H200", 143771),
    )
    assert find_gpus({}, Tools(None, "WARNING: a card sleeps\n" + json.dumps(ROCM)), tmp_path) == (
        GpuDevice("0", "rocm", "AMD Instinct MI250X", 65520),
        GpuDevice("1", "rocm", "AMD Instinct MI250X", 65520),
    )
    assert ids({}) == []


def test_names_and_memory_are_found_by_number_and_by_uuid() -> None:
    h200 = ("cuda", "NVIDIA H200", 143771)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, Tools(TWO)) == (GpuDevice("1", *h200),)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": B}, Tools(TWO)) == (GpuDevice(B, *h200),)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1A2B"}, Tools(TWO)) == (GpuDevice("GPU-1A2B", *h200),)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "7"}, Tools(TWO)) == (GpuDevice("7", "cuda"),)
    amd = find_gpus({"ROCR_VISIBLE_DEVICES": "GPU-1f9de0957d137942"}, Tools(rocm=json.dumps(ROCM)))
    assert amd == (GpuDevice("GPU-1f9de0957d137942", "rocm", "AMD Instinct MI250X", 65520),)


def test_a_part_of_a_gpu_has_the_name_of_its_gpu_and_its_own_profile(tmp_path: Path) -> None:
    near(tmp_path, "0000:3b:00.0", "0-1")
    tools = Tools(TWO, parts=PARTS)
    cores = frozenset({0, 1})
    assert find_gpus({"CUDA_VISIBLE_DEVICES": MIG}, tools, tmp_path) == (
        GpuDevice(MIG, "cuda", "NVIDIA H200 MIG 1g.18gb", 0, cores),
    )
    old = f"MIG-{A}/1/0"
    assert find_gpus({"CUDA_VISIBLE_DEVICES": old}, tools, tmp_path) == (
        GpuDevice(old, "cuda", "NVIDIA H200", 0, cores),
    )


def test_where_slurm_sets_the_variables_of_all_makers_the_driver_tells_which_gpus_they_are() -> None:
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1", "GPU_DEVICE_ORDINAL": "0,1"}
    assert {gpu.kind for gpu in find_gpus(both, Tools(TWO))} == {"cuda"}
    assert {gpu.kind for gpu in find_gpus(both, Tools(None, json.dumps(ROCM)))} == {"rocm"}
    assert {gpu.kind for gpu in find_gpus(both, Tools())} == {"cuda"}
    assert {gpu.kind for gpu in find_gpus({**both, "CUDA_VISIBLE_DEVICES": ""}, Tools())} == {"rocm"}


@pytest.mark.parametrize(
    ("rocr", "hip", "expected"),
    [("2,3", "1", ["3"]), ("2,3", "0,1", ["2", "3"]), ("2,3", "2,3", ["2", "3"]), ("2,3", "-1", []), ("", "0", [])],
)
def test_hip_counts_the_devices_that_rocr_leaves_visible(rocr: str, hip: str, expected: list[str]) -> None:
    assert ids({"ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip}) == expected


def near(sys_root: Path, pci_id: str, cores: str) -> None:
    folder = sys_root / "bus/pci/devices" / pci_id
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(cores + "\n")


def test_the_kernel_says_which_cores_are_near_a_gpu(tmp_path: Path) -> None:
    near(tmp_path, "0000:3b:00.0", "0-1,4-5")
    near(tmp_path, "0000:c1:00.0", "2-3")
    assert [gpu.cores for gpu in find_gpus({}, Tools(TWO), tmp_path)] == [{0, 1, 4, 5}, set()]
    assert [gpu.cores for gpu in find_gpus({}, Tools(None, json.dumps(ROCM)), tmp_path)] == [{2, 3}, set()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.1", "0000:3b:00.1"),
        ("3B:00.0", "0000:3b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("[N/A]", ""),
        ("../../etc", ""),
    ],
)
def test_pci_ids_are_written_as_the_kernel_writes_them(text: str, expected: str) -> None:
    assert normal_pci_id(text) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "\n\n",
        "No devices were found",
        "0",
        ",,,,",
        "0,",
        "x, y, z, 5",
        "{",
        "{}",
        '{"card0": 3}',
        "[1]",
        "\0\ufffd",
    ],
)
def test_odd_answers_of_the_tools_fail_nothing(answer: str) -> None:
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": f"0,{MIG}"}, {"ROCR_VISIBLE_DEVICES": "0"}):
        for gpu in find_gpus(environment, Tools(answer, answer, answer)):
            assert gpu.memory_mb == 0


def test_memory_that_the_driver_does_not_tell_is_unknown() -> None:
    assert find_gpus({}, Tools(f"0, {A}, NVIDIA GB10, [N/A], 0000000F:01:00.0")) == (
        GpuDevice("0", "cuda", "NVIDIA GB10"),
    )


odd_texts = st.text(st.sampled_from('0123456789,-GPUMIG/:.[]{}"x \n\0²ß\ufffd'), max_size=24)


@given(
    st.dictionaries(
        st.sampled_from(["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_JOB_GPUS"]),
        odd_texts,
    ),
    odd_texts,
    odd_texts,
)
def test_no_text_in_variables_or_answers_is_an_error(environment: dict[str, str], nvidia: str, rocm: str) -> None:
    found = ids(environment, Tools(nvidia, rocm, nvidia))
    assert len(found) == len(set(found))


@pytest.mark.waits
def test_the_real_tool_on_the_path_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu=index,uuid,name,memory.total*) printf "{TWO}";; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [gpu.name for gpu in find_gpus({"CUDA_VISIBLE_DEVICES": A})] == ["NVIDIA H200"]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": A}) == (GpuDevice(A, "cuda"),)
    assert ask_command(["there-is-no-such-tool"]) is None
