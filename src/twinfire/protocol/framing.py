"""Messages as bytes: a u32 little-endian length, then one msgpack value.

Knows nothing of sockets. A length above the limit is a hostile or broken peer and raises
`FrameError`; the link is then closed and nothing else happens.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from twinfire.protocol.messages import ToGateway, ToWorker
from twinfire.protocol.peer_messages import PeerMessage

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")


class FrameError(Exception):
    """A frame that cannot be from a healthy peer of this version."""


def encode_frame(message: ToWorker | ToGateway | PeerMessage) -> bytes:
    """Return the frame of one message."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[M]):
    """Turns received bytes into messages, whatever way the stream was cut."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], max_bytes: int = MAX_FRAME_BYTES):
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Return the messages completed by `data`; FrameError on a bad length or body."""
        if not self._buffer and len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if len(data) == _LENGTH.size + length <= _LENGTH.size + self._max_bytes:
                # One whole frame, as nearly all come: nothing to keep and nothing to copy.
                return [self._decode(memoryview(data)[_LENGTH.size :])]
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._max_bytes:
                raise FrameError(f"frame of {length} bytes; the limit is {self._max_bytes}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, body: bytes | memoryview) -> M:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FrameError(f"bad message: {error}") from None


def worker_side_decoder() -> FrameDecoder[ToWorker]:
    """Decode what a gateway sends."""
    return FrameDecoder(msgspec.msgpack.Decoder(ToWorker))


def gateway_side_decoder() -> FrameDecoder[ToGateway]:
    """Decode what a worker sends."""
    return FrameDecoder(msgspec.msgpack.Decoder(ToGateway))


def peer_decoder() -> FrameDecoder[PeerMessage]:
    """Decode what another worker sends."""
    return FrameDecoder(msgspec.msgpack.Decoder(PeerMessage))
