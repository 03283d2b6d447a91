import socket
import ssl
import threading
from pathlib import Path

import msgspec
import pytest

from support.tls_files import GATEWAY, IMPOSTOR, STRANGER, WORKER
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.tls import client_context, server_context
from twinfire.protocol.worker_config import TlsFiles


def say_hello(client_files: TlsFiles | None, server_files: TlsFiles) -> tuple[bytes, bytes]:
    """Connect, exchange a word both ways; ssl.SSLError when either end refuses the other."""
    client, server = socket.socketpair()
    client.settimeout(10)
    server.settimeout(10)
    results: list[bytes | OSError] = []

    def serve() -> None:
        try:
            with server_context(server_files).wrap_socket(server, server_side=True) as link:
                results.append(link.recv(10))
                link.sendall(b"server")
        except OSError as error:
            results.append(error)
            server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        if client_files is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            context = client_context(client_files)
        with context.wrap_socket(client) as link:
            link.sendall(b"client")
            heard = link.recv(10)
    finally:
        client.close()
        thread.join(10)
    [result] = results
    if isinstance(result, OSError):
        raise result
    return result, heard


def test_ends_of_one_authority_talk() -> None:
    assert say_hello(GATEWAY, WORKER) == (b"client", b"server")
    assert say_hello(WORKER, GATEWAY) == (b"client", b"server")


@pytest.mark.parametrize("files", [None, STRANGER, IMPOSTOR], ids=["none", "stranger", "impostor"])
def test_a_client_without_the_authoritys_signature_is_refused(files: TlsFiles | None) -> None:
    with pytest.raises(OSError, match=r"(?i)certificate|unknown ca|reset|eof"):
        say_hello(files, WORKER)


@pytest.mark.parametrize("files", [STRANGER, IMPOSTOR], ids=["stranger", "impostor"])
def test_a_server_without_the_authoritys_signature_is_refused(files: TlsFiles) -> None:
    with pytest.raises(OSError, match=r"(?i)certificate"):
        say_hello(GATEWAY, files)


def test_only_the_newest_tls_is_spoken() -> None:
    assert client_context(GATEWAY).minimum_version == ssl.TLSVersion.TLSv1_3
    assert server_context(GATEWAY).minimum_version == ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
def test_a_file_that_is_no_good_is_named(tmp_path: Path, field: str) -> None:
    bad = tmp_path / "bad.pem"
    files = msgspec.structs.replace(GATEWAY, **{field: str(bad)})
    with pytest.raises(InvalidRequest, match=r"cannot read .*bad\.pem: No such file"):
        server_context(files)
    bad.write_text("nothing")
    with pytest.raises(InvalidRequest, match=r"bad\.pem"):
        client_context(files)


def test_a_key_of_another_certificate_is_refused() -> None:
    files = msgspec.structs.replace(GATEWAY, key=WORKER.key)
    with pytest.raises(InvalidRequest, match="no certificate with its key"):
        server_context(files)
