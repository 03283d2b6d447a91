import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from twinfire.protocol.addresses import parse_address
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.secret import (
    check_exposed,
    ensure_secret,
    hash_seed,
    load_secret,
)
from twinfire.protocol.worker_config import TlsFiles

SECRET = b"0123456789abcdef"


def secret_file(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_white_space_around_a_secret_does_not_count(tmp_path: Path) -> None:
    assert load_secret(secret_file(tmp_path, b"\n" + SECRET + b" \r\n")) == SECRET


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_modes_that_keep_others_out_are_fine(tmp_path: Path, mode: int) -> None:
    assert load_secret(secret_file(tmp_path, mode=mode)) == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644])
def test_a_secret_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_secret(secret_file(tmp_path, mode=mode))


@pytest.mark.parametrize("content", [b"", b"short", b"  \n", b"x" * 5000])
def test_a_secret_of_a_wrong_length_is_refused_without_showing_it(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(InvalidRequest, match="must have 16 to 4096 bytes") as caught:
        load_secret(secret_file(tmp_path, content))
    assert "short" not in str(caught.value)


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"missing: No such file"):
        load_secret(tmp_path / "missing")


def test_a_new_secret_is_private_random_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "secret"
    first = ensure_secret(path)
    assert len(first) == 64
    assert ensure_secret(path) == first == load_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_secret(tmp_path / "other") != first
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    program = (
        "import sys; from twinfire.protocol.secret import ensure_secret; input();"
        "print(ensure_secret(sys.argv[1]).decode())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "secret")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {process.communicate("go\n", timeout=30)[0] for process in processes}
    assert len(answers) == 1
    assert len(os.listdir(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot make the cluster's secret"):
        ensure_secret(tmp_path / "file" / "secret")


def test_seeds_differ_with_the_secret_and_do_not_hold_it() -> None:
    assert hash_seed(SECRET) == hash_seed(SECRET)
    assert hash_seed(SECRET) != hash_seed(SECRET + b"x")
    assert len(hash_seed(SECRET)) == 32
    assert SECRET not in hash_seed(SECRET)


@pytest.mark.parametrize("address", ["unix:/tmp/x", "tcp:127.0.0.1:0", "tcp:[::1]:5"])
def test_addresses_of_this_host_need_nothing(address: str) -> None:
    check_exposed(parse_address(address), None, None)


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:worker-3:1"])
def test_addresses_that_others_reach_need_a_secret_or_certificates(address: str) -> None:
    with pytest.raises(InvalidRequest, match="give a cluster secret or certificates"):
        check_exposed(parse_address(address), None, None)
    check_exposed(parse_address(address), SECRET, None)
    check_exposed(parse_address(address), None, TlsFiles(certificate="c", key="k", authority="a"))
