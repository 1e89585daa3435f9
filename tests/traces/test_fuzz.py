"""Damaged logs: whatever happens to the bytes of a log, an import ends in a trace or in one clear error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bftrainer.errors import InputError
from bftrainer.traces.readers.importing import FORMATS, import_trace
from bftrainer.traces.readers.jobs import Job, ReaderOptions
from bftrainer.traces.readers.lsf import LsfReader
from bftrainer.traces.readers.pbs import PbsReader
from bftrainer.traces.readers.slurm import JobcompReader, SacctPairsReader, SacctReader
from bftrainer.traces.readers.swf import SwfReader
from support.traces.logs import DIALECTS

READERS = {r.name: r for r in (SacctReader, SacctPairsReader, JobcompReader, SwfReader, LsfReader, PbsReader)}
REAL = {
    "sacct": ("logs/pozidriv.sacct.log.gz", "fixtures/sacct/accounting-logs.log"),
    "sacct-pairs": ("fixtures/sacct/sacctd-output.txt",),
    "jobcomp": ("logs/slurm-jobcomp.filetxt.log",),
    "swf": ("logs/theta_2023.swf.gz", "logs/UniLu-Gaia-2014-1.swf.gz"),
    "lsf": ("fixtures/lsf/lsb.acct.log",),
    "pbs": ("fixtures/pbs/accounting.log",),
}
MUTANTS = 2500
ODD = (
    *(
        "",
        "|",
        "||||",
        "-1",
        "0",
        "99999999999999999999",
        "1e400",
        "nan",
        "Unknown",
        "[",
        "]",
        "{",
        "}",
        '"',
        '""',
        "\0",
    ),
    *("\x1b[31m", "\ufffd", "é", "n[1-99999999]", "2021-02-30T00:00:00", "-", "=", ";", ",", " ", "\t", "9" * 400),
)


def mutate(line: str, rng: random.Random) -> str:
    """One to four injuries: cut, doubled, swapped, replaced or odd pieces."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted((rng.randint(0, len(line)), rng.randint(0, len(line))))
        kind = rng.randrange(6)
        if kind == 0:
            line = line[:a]
        elif kind == 1:
            line = line[:a] + line[b:]
        elif kind == 2:
            line = line[:a] + rng.choice(ODD) + line[b:] if b - a < 30 else line[:a] + rng.choice(ODD) + line[a:]
        elif kind == 3:
            line = line[:b] + line[a:]
        elif kind == 4 and a < len(line):
            line = line[:a] + chr(rng.choice([0, 9, 32, 34, 44, 45, 48, 57, 65, 91, 93, 124, 127, 255])) + line[a + 1 :]
        else:
            words = line.split(" ")
            rng.shuffle(words)
            line = " ".join(words)
    return line.replace("\n", " ")


def source_lines(name: str, shared: Path | None) -> list[str]:
    """Lines of real logs where they are at hand, and of our own."""
    lines = [line for d in DIALECTS.values() if d.format == name for line in d.text().splitlines()]
    if shared is not None:
        from bftrainer.traces.source import opened

        for path in REAL[name]:
            with opened(shared / path) as source:
                lines += [line for number, line in source.lines() if number < 400]
    return lines


def check_mutants(name: str, lines: list[str]) -> None:
    rng = random.Random(name)
    columns = ("jobid", "start", "end", "state", "nodelist") if name == "sacct" else ()
    mutants = [mutate(rng.choice(lines), rng) for _ in range(MUTANTS)]
    for options in (ReaderOptions(), ReaderOptions(columns=columns)):
        for first in (mutants, lines + mutants):
            try:
                outcomes = list(READERS[name](options).read(enumerate(first, 1)))
            except InputError:
                continue
            assert sorted(o.line for o in outcomes) == list(range(1, len(first) + 1))
            for outcome in outcomes:
                if isinstance(outcome, Job):
                    assert outcome.end is None or outcome.end >= outcome.start >= 0
                    assert outcome.nodes or outcome.processors > 0


@pytest.mark.parametrize("name", READERS)
def test_mutated_lines_are_used_or_skipped_and_never_raise(name: str) -> None:
    check_mutants(name, source_lines(name, None))


@pytest.mark.parametrize("name", READERS)
def test_mutated_real_lines_are_used_or_skipped_and_never_raise(name: str, shared_data: Path) -> None:
    check_mutants(name, source_lines(name, shared_data))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_import_of_a_damaged_log_ends_in_a_trace_or_an_error(dialect: str, tmp_path: Path) -> None:
    rng = random.Random(dialect)
    path = tmp_path / "log"
    good = DIALECTS[dialect].text().splitlines()
    ended = {"trace": 0, "error": 0}
    for _ in range(120):
        lines = [mutate(line, rng) if rng.random() < 0.3 else line for line in good]
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        message, result = "", None
        try:
            result = import_trace(path)
        except InputError as problem:
            message = str(problem)
        if result is None:
            ended["error"] += 1
            assert message.startswith(f"{path}: ")
            assert "\n" not in message
        else:
            ended["trace"] += 1
            # A last line that is empty is no line.
            assert result.report.lines == len("\n".join(lines).removesuffix("\n").split("\n"))
    assert ended["trace"] > 0


@pytest.mark.parametrize("format_name", [None, *(f.name for f in FORMATS)])
def test_binary_noise_is_refused_in_every_format(format_name: str | None, tmp_path: Path) -> None:
    rng = random.Random(5)
    for i, prefix in enumerate((b"", b"PAR1", b"\x1f\x8b", b"\x80\x04", b"; MaxNodes: 5\n", b"# bftrainer {}\n")):
        path = tmp_path / f"noise{i}"
        path.write_bytes(prefix + rng.randbytes(5000))
        with pytest.raises(InputError, match=r"noise"):
            import_trace(path, format_name=format_name)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as out:
        out.write(b"JobID|Start|End|State|NodeList\n")
        for _ in range(40):
            out.write(b"x" * (1 << 20))
    with pytest.raises(InputError, match="line 2 is over 32 MiB long"):
        import_trace(path)
