"""`serve` writes `client.json`, and loses no token of another controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bftrainer.cluster.serve import make_client_file
from bftrainer.cluster.store.store import FILE, Store


def test_a_client_file_of_another_controller_is_moved_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "client.json"
    given = [json.dumps({"url": f"https://head{n}.example:1", "token": f"bft_{n}" + "x" * 40}) for n in (1, 2)]
    with Store.open(tmp_path / FILE) as store:
        for text in given:
            path.write_text(text)
            token = make_client_file(tmp_path, store, "http://127.0.0.1:1", "")
            assert json.loads(path.read_text()) == {"url": "http://127.0.0.1:1", "token": token}
    assert [(tmp_path / f"client.json.{n}").read_text() for n in (1, 2)] == given
    assert f"it is now {path}.2" in capsys.readouterr().err


def test_the_own_client_file_is_renewed_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(tmp_path / FILE) as store:
        first = make_client_file(tmp_path, store, "http://127.0.0.1:1", "")
        assert make_client_file(tmp_path, store, "http://127.0.0.1:2", "") == first
        (row,) = store.tokens.all()
        assert store.tokens.revoke(row.name, 1.0)
        assert make_client_file(tmp_path, store, "http://127.0.0.1:2", "") != first
    assert not list(tmp_path.glob("client.json.*"))
    assert not capsys.readouterr().err
