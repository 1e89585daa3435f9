"""Source file of an import: opened once, unpacked if packed, hashed and counted while it is read.

Every problem with the file itself becomes one `InputError` here, so readers see only lines or bytes.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from bftrainer.errors import InputError

Progress = Callable[[int, int], None]
"""Called now and then with the bytes read and the total bytes (0: unknown)."""

_BLOCK = 1 << 20
_HEAD = 1 << 16
_LONGEST_LINE = 1 << 25
_BOM = b"\xef\xbb\xbf"
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
"""How packed files begin, and what unpacks them."""
_REFUSED = {
    b"\x28\xb5\x2f\xfd": "is packed with zstd: unpack it first, with zstd -d",
    b"PK\x03\x04": "is a zip archive: unpack it first, with unzip",
    b"\xff\xfe": "is UTF-16 text: convert it first, with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is UTF-16 text: convert it first, with iconv -f UTF-16 -t UTF-8",
}


class _Counted(io.RawIOBase):
    """Passes bytes through, hashing and counting them."""

    def __init__(self, raw: io.FileIO, total: int, progress: Progress) -> None:
        self._raw, self._total, self._progress = raw, total, progress
        self.hash = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._raw.readinto(buffer) or 0
        self.hash.update(buffer[:count])
        self.count += count
        self._progress(self.count, self._total)
        return count


class Source:
    """The bytes of one input file. Created by `opened`."""

    def __init__(self, path: Path, raw: io.FileIO, progress: Progress) -> None:
        self.path = path
        self._counted = _Counted(raw, raw.seek(0, io.SEEK_END) if raw.seekable() else 0, progress)
        if raw.seekable():
            raw.seek(0)
        self._stream = io.BufferedReader(cast(io.RawIOBase, self._counted), _BLOCK)
        for magic, unpack in _PACKED.items():
            if self._stream.peek(8).startswith(magic):
                self._stream = io.BufferedReader(cast(io.RawIOBase, unpack(self._stream)), _BLOCK)
                break
        begin = self._stream.peek(8)
        for magic, problem in _REFUSED.items():
            if begin.startswith(magic):
                raise InputError(problem)
        if begin.startswith(_BOM):
            self._stream.read(len(_BOM))

    @property
    def stream(self) -> io.BufferedReader[io.RawIOBase]:
        """The unpacked bytes."""
        return self._stream

    def head(self) -> bytes:
        """The first bytes, without consuming them."""
        return self._stream.peek(_HEAD)[:_HEAD]

    def lines(self) -> Iterator[tuple[int, str]]:
        """The lines with their numbers from 1, without line ends; bytes that are not UTF-8 are marked."""
        number = 0
        rest = b""
        while block := self._stream.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                number += 1
                yield number, _text(line)
            if len(rest) > _LONGEST_LINE:
                raise InputError(f"line {number + 1} is over {_LONGEST_LINE >> 20} MiB long: this is not a text log")
        if rest:
            yield number + 1, _text(rest)

    def sha256(self) -> str:
        """The hash of the file on disk, after reading the rest of it."""
        while self._counted.read(_BLOCK):
            pass
        return self._counted.hash.hexdigest()


@contextmanager
def opened(path: Path, progress: Progress = lambda done, total: None) -> Iterator[Source]:
    """Open a file for import. Every InputError that leaves this block names the file."""
    try:
        if path.is_dir():
            raise InputError("is a directory, not a file")
        with path.open("rb", buffering=0) as raw:
            yield Source(path, raw, progress)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as problem:
        raise InputError(f"{path}: truncated or damaged gzip, bzip2 or xz data ({problem})") from None
    except OSError as problem:
        raise InputError(f"{path}: {problem.strerror or problem}") from None


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")
