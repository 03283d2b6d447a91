"""Socket files that are free, abandoned, in use, or no sockets."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from twinfire.protocol.unix_sockets import listen_unix


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def test_a_new_file_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "new.sock"
    with listen_unix(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert connects(str(path))


def test_the_file_of_a_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "abandoned.sock")
    listen_unix(path).close()
    assert not connects(path)
    with listen_unix(path):
        assert connects(path)


def test_whoever_listens_keeps_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "taken.sock")
    with listen_unix(path) as first:
        with pytest.raises(OSError, match="in use"):
            listen_unix(path)
        assert connects(path)
        first.accept()[0].close()


def test_a_listener_that_is_busy_keeps_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "busy.sock")
    clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    with listen_unix(path, backlog=1):
        for client in clients:
            client.setblocking(False)
            client.connect_ex(path)
        with pytest.raises(OSError, match="in use"):
            listen_unix(path)
    for client in clients:
        client.close()


def test_another_kind_of_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen_unix(str(path))
    assert path.read_text() == "mine"
