"""What connectors say to each other once a link is open: requests one way, replies the other.

Requests are small and bounded. A reply is a fixed header; behind one that has content come the
blocks themselves, if the carrier sends them over the link. Anything else on a link ends it.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from twinfire.cache.kv_group import KvLayout
from twinfire.transfer.connector import RemoteBlock
from twinfire.transfer.data_stream import DataStream

CHUNK_BYTES = 4 << 20
"""What a request asks for at most, unless a single block is larger."""
WINDOW = 2
"""Requests under way at once, so that one end packs a chunk while the other unpacks one."""
MAX_REASON_BYTES = 1000

CONTENT, STALE, FAULT, CONFIRMED = range(4)
"""What a reply says: here it is, somebody else has the block, it cannot be read, it was held."""

_LENGTH = struct.Struct("<I")
_REPLY = struct.Struct("<QII")
_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")


class WireError(Exception):
    """Something that no healthy peer of this version sends."""


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Asks for blocks in their order; replies come in the order of the requests."""

    request_id: int
    slot: int
    """Which of the reader's `WINDOW` places the content is for."""
    block_ids: bytes
    """u32."""
    generations: bytes
    """i64, one per block."""


class ConfirmRequest(msgspec.Struct, frozen=True, array_like=True, tag="confirm"):
    """Says that the content for `slot` has been received; a reply means that it was still held."""

    request_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """What a reply begins with; `num_bytes` of blocks or of a reason follow."""

    request_id: int
    status: int
    num_bytes: int


_REQUEST_DECODER = msgspec.msgpack.Decoder(ReadRequest | ConfirmRequest)
_ID_BYTES, _GENERATION_BYTES = 4, 8


def max_blocks_per_request(layout: KvLayout) -> int:
    """Return how many blocks a request may ask for."""
    return max(1, CHUNK_BYTES // layout.bytes_per_block)


def slot_bytes(layout: KvLayout) -> int:
    """Return the most that a reply to a request brings."""
    return max(CHUNK_BYTES, layout.bytes_per_block)


def send_message(stream: DataStream, message: msgspec.Struct) -> None:
    """Send one message with its length."""
    body = _ENCODER.encode(message)
    stream.send(_LENGTH.pack(len(body)) + body)


def receive_message(stream: DataStream, decoder: msgspec.msgpack.Decoder[M], max_bytes: int) -> M:
    """Return the next message; WireError when it is too long or no such message."""
    (length,) = _LENGTH.unpack(stream.receive(_LENGTH.size))
    if length > max_bytes:
        raise WireError(f"a message of {length} bytes; the limit is {max_bytes}")
    try:
        return decoder.decode(stream.receive(length))
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"no message: {error}") from None


def send_request(stream: DataStream, request_id: int, slot: int, blocks: list[RemoteBlock]) -> None:
    """Ask for blocks."""
    ids = array("I", (block.block_id for block in blocks))
    generations = array("q", (block.generation for block in blocks))
    request = ReadRequest(request_id, slot, ids.tobytes(), generations.tobytes())
    send_message(stream, request)


def receive_request(stream: DataStream, layout: KvLayout) -> ReadRequest | ConfirmRequest:
    """Return the next request; WireError when it is none."""
    max_bytes = 64 + max_blocks_per_request(layout) * (_ID_BYTES + _GENERATION_BYTES)
    request = receive_message(stream, _REQUEST_DECODER, max_bytes)
    if not 0 <= request.slot < WINDOW or not 0 <= request.request_id < 2**63:
        raise WireError("a request that cannot be named or placed")
    return request


def requested_blocks(request: ReadRequest, layout: KvLayout, num_blocks: int) -> list[RemoteBlock]:
    """Return what a request asks for; WireError when it is not among `num_blocks` blocks."""
    limit = max_blocks_per_request(layout)
    count, odd = divmod(len(request.block_ids), _ID_BYTES)
    if odd or not 1 <= count <= limit or len(request.generations) != count * _GENERATION_BYTES:
        raise WireError(f"a request for {count} blocks; 1 to {limit} can be asked for")
    ids, generations = array("I", request.block_ids), array("q", request.generations)
    for block_id in ids:
        if block_id >= num_blocks:
            raise WireError(f"a request for block {block_id} of {num_blocks}")
    return [RemoteBlock(*pair) for pair in zip(ids, generations, strict=True)]


def send_confirmation(stream: DataStream, request_id: int, slot: int) -> None:
    """Ask whether the content of a request was held until now."""
    send_message(stream, ConfirmRequest(request_id, slot))


def send_reply(stream: DataStream, request_id: int, status: int, num_bytes: int) -> None:
    """Begin a reply."""
    stream.send(_REPLY.pack(request_id, status, num_bytes))


def send_reason(stream: DataStream, request_id: int, status: int, reason: str) -> None:
    """Reply that there is no content, and why."""
    body = reason.encode()[:MAX_REASON_BYTES]
    stream.send(_REPLY.pack(request_id, status, len(body)) + body)


def receive_reply(stream: DataStream) -> ReplyHeader:
    """Return the beginning of the next reply."""
    return ReplyHeader(*_REPLY.unpack(stream.receive(_REPLY.size)))


def receive_reason(stream: DataStream, header: ReplyHeader) -> str:
    """Return why a reply has no content."""
    if header.num_bytes > MAX_REASON_BYTES:
        raise WireError(f"a reason of {header.num_bytes} bytes")
    return stream.receive(header.num_bytes).decode(errors="replace")
