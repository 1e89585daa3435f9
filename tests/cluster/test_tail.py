"""What workers print arrives once, in order, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bftrainer.cluster.agent.log_tails import LogTails
from bftrainer.processes.log_tail import INCOMPLETE_S, MOST_LINE_BYTES, MOST_MESSAGE_BYTES, LogTail, Piece


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def pieces(tail: LogTail, ended: bool = True) -> list[Piece]:
    found = []
    while piece := tail.next(0.0, ended):
        found.append(piece)
        assert piece.offset == tail.offset
        assert piece.size > 0
        tail.seek(piece.offset + piece.size)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_a_line_waits_for_its_end_but_not_for_long(path: Path) -> None:
    tail = LogTail(path)
    assert tail.next(0.0, False) is None
    append(path, b"one\ntw")
    assert tail.next(0.0, False) == Piece(0, "one\n", 4)
    tail.seek(4)
    assert tail.next(1.0, False) is None
    assert tail.next(1.0 + INCOMPLETE_S / 2, False) is None
    assert tail.next(1.0 + INCOMPLETE_S, False) == Piece(4, "tw", 2)
    append(path, b"o\n")
    assert tail.next(1.0, False) == Piece(4, "two\n", 4)
    tail.seek(8)
    append(path, b"end")
    assert tail.next(9.0, False) is None
    assert tail.next(9.0, True) == Piece(8, "end", 3)


def test_a_piece_is_the_same_until_it_is_acknowledged(path: Path) -> None:
    tail = LogTail(path)
    append(path, b"a\n")
    assert tail.next(0.0, False) == tail.next(0.0, False) == Piece(0, "a\n", 2)
    assert not tail.finished
    tail.seek(2)
    assert tail.finished
    tail.seek(10**9)
    assert tail.offset == 2


def test_long_lines_come_in_pieces_and_messages_are_bounded(path: Path) -> None:
    tail = LogTail(path)
    long = b"x" * (3 * MOST_LINE_BYTES + 5) + b"\n"
    data = b"a\n" + long + b"b\n" * MOST_MESSAGE_BYTES
    append(path, data)
    found = pieces(tail)
    assert "".join(piece.text for piece in found).encode() == data
    assert max(piece.size for piece in found) <= MOST_MESSAGE_BYTES
    assert max(len(line) for piece in found for line in piece.text.splitlines()) <= MOST_LINE_BYTES


def test_bytes_that_are_no_text_are_replaced_and_counted(path: Path) -> None:
    tail = LogTail(path)
    append(path, b"\xff\xfe caf\xc3\xa9\n\xe2\x82")
    assert tail.next(0.0, False) == Piece(0, "�� café\n", 9)
    tail.seek(9)
    assert tail.next(0.0, True) == Piece(9, "�", 2)


def test_a_character_is_not_torn_by_the_length_of_a_line(path: Path) -> None:
    tail = LogTail(path)
    text = "x" + "é" * MOST_LINE_BYTES
    append(path, text.encode())
    assert "".join(piece.text for piece in pieces(tail)) == text


@given(st.lists(st.binary(max_size=30), max_size=20), st.booleans())
def test_every_byte_counts_once(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], ended: bool) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    tail, size = LogTail(path), 0
    for part in parts:
        append(path, part)
        size += sum(piece.size for piece in pieces(tail, ended=False))
        assert size == tail.offset
    size += sum(piece.size for piece in pieces(tail))
    assert size == len(b"".join(parts))


def test_a_file_that_grows_too_long_is_emptied_and_what_was_not_sent_is_noted(path: Path) -> None:
    tail = LogTail(path, most_bytes=100)
    append(path, b"first\n")
    assert [piece.text for piece in pieces(tail, ended=False)] == ["first\n"]
    append(path, b"x" * 200 + b"\n")
    tail.cut()
    assert path.stat().st_size == 0
    assert tail.end(5) == "xxxx\n"
    append(path, b"last\n")
    found = pieces(tail)
    assert found[0] == Piece(6, "[bftrainer: 201 bytes of output are left out here]\n", 201)
    assert found[1] == Piece(207, "last\n", 5)
    assert tail.end(7) == "x\nlast\n"
    assert tail.finished


def test_nothing_is_noted_when_all_was_sent_before_the_file_was_emptied(path: Path) -> None:
    tail = LogTail(path, most_bytes=10)
    append(path, b"0123456789\n")
    pieces(tail)
    tail.cut()
    append(path, b"more\n")
    assert pieces(tail) == [Piece(11, "more\n", 5)]


def test_the_end_is_of_so_many_characters_not_bytes(path: Path) -> None:
    append(path, ("é" * 50).encode())
    assert LogTail(path).end(10) == "é" * 10
    assert LogTail(path.with_name("none")).end(10) == ""


def test_one_message_a_worker_is_under_way_and_a_new_connection_starts_where_the_controller_is(path: Path) -> None:
    logs = LogTails()
    logs.follow("t1-1", path)
    append(path, b"one\n")
    (log,) = logs.due(0.0)
    assert (log.worker, log.offset, log.text, log.size) == ("t1-1", 0, "one\n", 4)
    append(path, b"two\n")
    assert logs.due(0.0) == []
    logs.connected({})  # the message was lost
    assert [log.text for log in logs.due(0.0)] == ["one\ntwo\n"]
    logs.connected({"t1-1": 4})  # a part was stored after all
    assert [log.text for log in logs.due(0.0)] == ["two\n"]
    logs.logged("t1-1", 8)
    assert logs.due(0.0) == []


def test_a_file_goes_when_its_worker_is_forgotten_and_all_of_it_is_stored(path: Path) -> None:
    logs = LogTails()
    logs.follow("t1-1", path)
    append(path, b"last words")
    assert logs.ended("t1-1", 100) == "last words"
    logs.forget("t1-1")
    assert path.exists()
    (log,) = logs.due(0.0)
    logs.logged("t1-1", log.offset + log.size)
    assert not path.exists()
    assert logs.due(0.0) == []
    logs.logged("t1-1", 5)  # an echo
