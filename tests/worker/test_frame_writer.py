"""Frames from several threads over a real socket whose other end reads slowly or not at all."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import cast

import pytest

from twinfire.worker.frame_writer import FrameWriter

FRAME_BYTES = 3000
MAX_UNREAD_BYTES = 2**21


class Writing(asyncio.Protocol):
    """The loop's side, as the link server has it."""

    writer: FrameWriter

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self.writer = FrameWriter(cast(asyncio.Transport, transport), loop, MAX_UNREAD_BYTES)

    def resume_writing(self) -> None:
        self.writer.flushed()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writer.closed()
        self.gone.set()


async def connected() -> tuple[Writing, asyncio.StreamReader, asyncio.StreamWriter]:
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(Writing, sock=here)
    reader, writer = await asyncio.open_connection(sock=there)
    return protocol, reader, writer


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_frames_of_a_thread_arrive_whole_and_in_order(pause_s: float) -> None:
    num_frames = 200

    async def scenario() -> None:
        protocol, reader, writer = await connected()

        def write_all(name: int) -> None:
            for number in range(num_frames):
                head = bytes([name]) + number.to_bytes(4, "little")
                protocol.writer.write(head.ljust(FRAME_BYTES, b"."))

        threads = [threading.Thread(target=write_all, args=(name,)) for name in range(2)]
        for thread in threads:
            thread.start()
        numbers: dict[int, list[int]] = {0: [], 1: []}
        for count in range(2 * num_frames):
            frame = await asyncio.wait_for(reader.readexactly(FRAME_BYTES), 5)
            numbers[frame[0]].append(int.from_bytes(frame[1:5], "little"))
            if count % 50 == 0:
                await asyncio.sleep(pause_s)
        assert numbers == {name: list(range(num_frames)) for name in range(2)}
        # The way is direct again once the backlog is gone: no turn of the loop is needed.
        protocol.writer.write(b"x" * 10)
        assert protocol.writer.unread_bytes == 0
        assert await asyncio.wait_for(reader.readexactly(10), 5) == b"x" * 10
        writer.close()

    asyncio.run(scenario())


def test_writing_after_the_peer_left_is_harmless() -> None:
    async def scenario() -> None:
        protocol, _, writer = await connected()
        writer.close()
        await writer.wait_closed()
        for _ in range(10):
            protocol.writer.write(b"late")
            await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_what_is_queued_is_sent_before_closing() -> None:
    async def scenario() -> None:
        protocol, reader, peer = await connected()
        for _ in range(20):
            protocol.writer.write(b"." * FRAME_BYTES)
        protocol.writer.close()
        assert len(await asyncio.wait_for(reader.read(-1), 5)) == 20 * FRAME_BYTES
        peer.close()

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_is_dropped() -> None:
    async def scenario() -> None:
        protocol, reader, peer = await connected()
        peer.transport.pause_reading()
        for _ in range(MAX_UNREAD_BYTES // FRAME_BYTES + 100):
            protocol.writer.write(b"." * FRAME_BYTES)
        await asyncio.wait_for(protocol.gone.wait(), 5)
        peer.transport.resume_reading()
        assert len(await asyncio.wait_for(reader.read(-1), 5)) < MAX_UNREAD_BYTES
        peer.close()

    asyncio.run(scenario())
