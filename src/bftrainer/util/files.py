"""Files that are written completely or not at all: written beside their place, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w", *, permissions: int = 0o666, durable: bool = False) -> Iterator[IO[Any]]:
    """Open a file that takes its place at `path` once it is complete. After an error the former file stays.

    `mode` is "w" for text in UTF-8 or "wb". `permissions` are subject to the umask. With `durable`, the content is on
    the disk before the file takes its place. Only a regular file is replaced, never a folder, a pipe or a device.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(
            beside,
            mode.replace("w", "x"),
            encoding=encoding,
            opener=lambda name, flags: os.open(name, flags, permissions),
        ) as out:
            yield out
            if durable:
                out.flush()
                os.fsync(out.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def replace_file(path: Path, text: str, permissions: int = 0o600) -> None:
    """Write a durable file; by default one that only its owner can read. A reader finds the old text or the new one."""
    with replacing(path, "wb", permissions=permissions, durable=True) as out:
        out.write(text.encode(errors="surrogateescape"))


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a crash of the host, if the file system can do so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
