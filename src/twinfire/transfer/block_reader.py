"""Reads blocks of one peer, in order, on a thread of its own.

Owns the link to the peer: makes it when there is something to read, keeps it while the peer does,
and makes another after it broke. Whatever breaks it fails every read that was asked for by then.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

from twinfire.protocol.addresses import Address
from twinfire.protocol.link_auth import AuthError
from twinfire.transfer.block_read import BlockRead, ReadChunk
from twinfire.transfer.carrier import Carrier, CarrierFailed, ContentReceiver
from twinfire.transfer.connector import KvMemory, ReadFailed
from twinfire.transfer.data_link import LinkHello, LinkRefused, LinkSecurity, open_link
from twinfire.transfer.data_stream import DataStream, StreamEnded
from twinfire.transfer.data_wire import (
    CONFIRMED,
    CONTENT,
    STALE,
    WINDOW,
    WireError,
    max_blocks_per_request,
    receive_reason,
    receive_reply,
    send_confirmation,
    send_request,
)
from twinfire.transfer.shared_blocks import SharedBlocks
from twinfire.transfer.waker import Waker

log = logging.getLogger(__name__)

_LINK_FAULTS = (StreamEnded, WireError, AuthError, LinkRefused, CarrierFailed)


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A reply that is to come: replies come in the order of the requests."""

    request_id: int
    chunk: ReadChunk
    is_confirmation: bool = False


class BlockReader:
    """`hello` names this worker and the peer that is meant; `address` is where that one listens."""

    def __init__(
        self,
        memory: KvMemory,
        address: Address,
        hello: LinkHello,
        *,
        security: LinkSecurity,
        carrier: Carrier,
        timeout_s: float,
    ) -> None:
        self._memory = memory
        self.address = address
        self._hello = hello
        self._security = security
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._max_blocks = max_blocks_per_request(memory.kv_layout)
        self._waker = Waker()
        self._lock = threading.Lock()
        self._inbox: deque[BlockRead] = deque()
        self._stop_reason: str | None = None
        # The thread's own.
        self._blocks = SharedBlocks(memory, memory.draft)
        self._reads: deque[BlockRead] = deque()
        self._to_request: deque[ReadChunk] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._num_requests = 0
        self._thread = threading.Thread(
            target=self._run, name=f"read-{hello.meant_id[:8]}", daemon=True
        )
        self._thread.start()

    def submit(self, read: BlockRead) -> bool:
        """Take a read on; False when this reader has been stopped. Never blocks."""
        with self._lock:
            if self._stop_reason is not None:
                return False
            self._inbox.append(read)
        self._waker.notify()
        return True

    def stop(self, reason: str) -> None:
        """Fail what is open, soon, and end the thread. Never blocks."""
        with self._lock:
            self._stop_reason = self._stop_reason or reason
        self._waker.stop()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after a stop."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._waker.stopped:
            if not self._take_inbox():
                self._waker.wait()
                continue
            try:
                self._read_over_one_link()
            except _LINK_FAULTS as error:
                self._fail_all(self._stop_reason or f"{self.address}: {error}")
            except Exception as error:
                log.exception("reading from %s failed", self.address)
                self._fail_all(f"{self.address}: {error!r}")
        assert self._stop_reason is not None
        self._take_inbox()
        self._fail_all(self._stop_reason)
        self._waker.close()

    def _read_over_one_link(self) -> None:
        """Serve reads until the peer closes a link that nothing is asked for over."""
        with ExitStack() as stack:
            receiver = self._carrier.new_receiver()
            stack.callback(receiver.close)
            stream, answer = open_link(
                self.address, self._security, self._hello, self._waker, self._timeout_s
            )
            stack.callback(stream.close)
            receiver.open(answer.data)
            self._blocks = SharedBlocks(self._memory, answer.draft)
            while True:
                self._take_inbox()
                self._fill_window(stream)
                if self._awaited:
                    self._take_reply(stream, receiver)
                elif not stream.wait_while_idle() or self._waker.stopped:
                    return

    def _take_inbox(self) -> bool:
        """Plan the reads that have come; return whether there is anything to do."""
        with self._lock:
            new, self._inbox = self._inbox, deque()
        for read in new:
            self._reads.append(read)
            self._to_request.extend(read.chunks(self._max_blocks))
            read.imported(0)  # Ends one of no blocks.
        while self._reads and self._reads[0].ended:
            self._reads.popleft()
        return bool(self._to_request or self._awaited)

    def _fill_window(self, stream: DataStream) -> None:
        num_requested = sum(not awaited.is_confirmation for awaited in self._awaited)
        while self._to_request and num_requested < WINDOW:
            chunk = self._to_request.popleft()
            if chunk.read.ended:
                continue
            request_id = self._num_requests
            self._num_requests += 1
            num_requested += 1
            self._awaited.append(_Awaited(request_id, chunk))
            send_request(stream, request_id, request_id % WINDOW, chunk.remote)

    def _take_reply(self, stream: DataStream, receiver: ContentReceiver) -> None:
        awaited = self._awaited.popleft()
        request_id, chunk = awaited.request_id, awaited.chunk
        reply = receive_reply(stream)
        if reply.request_id != request_id:
            raise WireError(f"the peer answered {reply.request_id} instead of {request_id}")
        if awaited.is_confirmation:
            if reply.status != CONFIRMED or reply.num_bytes:
                raise WireError("the peer does not confirm what it sent")
            chunk.read.imported(len(chunk.local_ids))
        elif reply.status == CONTENT:
            expected = len(chunk.remote) * self._blocks.bytes_per_block
            if reply.num_bytes != expected:
                raise WireError(f"{reply.num_bytes} bytes of blocks that have {expected}")
            slot = request_id % WINDOW
            content = receiver.receive(stream, slot, expected)
            if receiver.needs_confirmation:
                self._awaited.append(_Awaited(request_id, chunk, is_confirmation=True))
                send_confirmation(stream, request_id, slot)
                self._import(chunk, content)
            elif self._import(chunk, content):
                chunk.read.imported(len(chunk.local_ids))
        else:
            reason = receive_reason(stream, reply)
            chunk.read.end(ReadFailed(f"{self.address}: {reason}", stale=reply.status == STALE))

    def _import(self, chunk: ReadChunk, content: memoryview) -> bool:
        # What a failed read had asked for already still comes, and must not be written.
        if chunk.read.ended or self._waker.stopped:
            return False
        try:
            self._blocks.import_blocks(chunk.local_ids, content)
        except Exception as error:
            log.exception("blocks could not be filled")
            chunk.read.end(ReadFailed(f"blocks could not be filled: {error!r}"))
            return False
        return True

    def _fail_all(self, reason: str) -> None:
        self._take_inbox()
        failed, self._reads = self._reads, deque()
        self._to_request.clear()
        self._awaited.clear()
        for read in failed:
            read.end(ReadFailed(reason))
