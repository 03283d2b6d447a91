"""NIXL as it works between hosts, where the serving end must take part and bytes arrive late."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from support.array_memory import LARGE, ArrayMemory
from support.connector_ends import LOOPBACK, SECRET, End, first_life
from support.serving_connector import ServingProcess, serving_process
from twinfire.protocol.addresses import parse_address
from twinfire.transfer.carrier import CarrierFailed
from twinfire.transfer.data_link import (
    DATA_VERSION,
    LinkHello,
    LinkSecurity,
    layout_text,
    open_link,
)
from twinfire.transfer.data_wire import CONTENT, receive_reply, send_request
from twinfire.transfer.nixl_connector import NixlCarrier
from twinfire.transfer.waker import Waker

pytest.importorskip("nixl_cu12", reason="NIXL is not installed (extra `nixl`)")
FIVE = range(5)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServingProcess]:
    monkeypatch.setenv("UCX_TLS", "tcp")  # Without it, one host copies from process to process.
    with serving_process("nixl", LOOPBACK, num_blocks=24, size="large") as process:
        yield process


def test_blocks_arrive_as_they_are(there: ServingProcess) -> None:
    here = End("nixl", ArrayMemory(24, LARGE))
    assert here.read(there.peer, first_life(range(24))).wait() is None
    assert np.array_equal(here.memory.words, there.expected.words)
    here.connector.close()


def test_memory_that_a_late_read_may_still_write_is_not_used_again(there: ServingProcess) -> None:
    carrier = NixlCarrier(LARGE, "here", timeout_s=0.5)
    waker = Waker()
    greeting = LinkHello(DATA_VERSION, "nixl", "here", "there", layout_text(LARGE))
    stream, answer = open_link(
        parse_address(there.peer.data), LinkSecurity.of(SECRET, None), greeting, waker, 5.0
    )
    receiver = carrier.new_receiver()
    receiver.open(answer.data)
    num_bytes = len(FIVE) * LARGE.bytes_per_block

    send_request(stream, 0, 0, first_life(FIVE))
    assert receive_reply(stream).status == CONTENT
    content = receiver.receive(stream, 0, num_bytes)
    expected = there.expected.words[list(FIVE)].tobytes()
    assert bytes(content) == expected

    send_request(stream, 1, 1, first_life(FIVE))
    assert receive_reply(stream).status == CONTENT
    there.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(CarrierFailed, match=r"brought nothing for 0\.5 s"):
        receiver.receive(stream, 1, num_bytes)
    assert time.monotonic() - started < 3
    receiver.close()
    others = [carrier.new_receiver() for _ in range(3)]
    assert receiver._region not in [other._region for other in others]

    there.send_signal(signal.SIGCONT)
    until = time.monotonic() + 10
    while receiver._region not in carrier._pool._free:
        assert time.monotonic() < until, "the region never came back"
        time.sleep(0.01)
    late = receiver._region.view[len(receiver._region.view) // 2 :][:num_bytes]
    assert bytes(late) == expected, "nothing came late, so nothing was shown"
    for other in others:
        other.close()
    stream.close()
    carrier.close()
    waker.close()
