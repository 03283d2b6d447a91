"""Serves reads of this worker's blocks: one thread accepts readers, one serves each.

A reader that proves nothing, sends garbage or asks for blocks that do not exist loses its link and
nothing else happens. Content leaves only if every block had the asked generation before and after
it was packed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from twinfire.protocol.addresses import Address, TcpAddress, UnixAddress
from twinfire.protocol.link_auth import AuthError
from twinfire.protocol.unix_sockets import listen_unix
from twinfire.transfer.carrier import Carrier, CarrierFailed, ContentSender
from twinfire.transfer.connector import KvMemory, RemoteBlock
from twinfire.transfer.data_link import LinkHello, LinkRefused, LinkSecurity, accept_link, tune_tcp
from twinfire.transfer.data_stream import DataStream, StreamEnded
from twinfire.transfer.data_wire import (
    CONFIRMED,
    FAULT,
    STALE,
    ReadRequest,
    WireError,
    receive_request,
    requested_blocks,
    send_reason,
    send_reply,
)
from twinfire.transfer.shared_blocks import SharedBlocks
from twinfire.transfer.waker import Waker

MAX_LINKS = 512
"""Readers at once, those that have not introduced themselves included."""
READER_TIMEOUT_S = 30.0
"""A reader unpacks between its engine's steps, so it may take nothing for as long as one lasts."""

log = logging.getLogger(__name__)

_HOSTILE = (WireError, AuthError, LinkRefused, CarrierFailed)


class BlockServer:
    """Listens from its making on, at `address`; OSError when it cannot."""

    def __init__(
        self,
        memory: KvMemory,
        listen: Address,
        hello: LinkHello,
        *,
        security: LinkSecurity,
        carrier: Carrier,
    ) -> None:
        self._memory = memory
        self._hello = hello
        self._security = security
        self._carrier = carrier
        self._listener = _listen(listen)
        self.address = _bound_address(listen, self._listener)
        self._waker = Waker()
        self._lock = threading.Lock()
        self._links: dict[Waker, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop listening and end every link."""
        deadline = time.monotonic() + timeout_s
        self._waker.stop()
        self._thread.join(timeout_s)
        with self._lock:
            links = list(self._links.items())
        for waker, _ in links:
            waker.stop()
        for _, thread in links:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while not self._waker.stopped:
                selector.select()
                try:
                    connected, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    # Out of descriptors, most likely: those that are served will end some time.
                    log.warning("cannot accept a reader of blocks: %s", error)
                    time.sleep(0.1)
                    continue
                self._start(connected)
            if isinstance(self.address, UnixAddress):
                with contextlib.suppress(OSError):
                    os.unlink(self.address.path)
        self._waker.close()

    def _start(self, connected: socket.socket) -> None:
        waker = Waker()
        thread = threading.Thread(
            target=self._serve, args=(connected, waker), name="kv-serve", daemon=True
        )
        with self._lock:
            full = len(self._links) >= MAX_LINKS
            if not full:
                self._links[waker] = thread
        if full:
            log.warning("too many readers of blocks; one more was turned away")
            connected.close()
            waker.close()
        else:
            thread.start()

    def _serve(self, connected: socket.socket, waker: Waker) -> None:
        is_tcp = isinstance(self.address, TcpAddress)
        if is_tcp:
            with contextlib.suppress(OSError):
                tune_tcp(connected)
        stream = DataStream(connected, waker, READER_TIMEOUT_S)
        try:
            self._serve_reader(stream, tls=is_tcp)
        except StreamEnded as error:
            log.debug("a reader of blocks is gone: %s", error)
        except _HOSTILE as error:
            log.warning("a reader of blocks was cut off: %s", error)
        except Exception:
            log.exception("serving a reader of blocks failed")
        finally:
            stream.close()
            with self._lock:
                del self._links[waker]
            waker.close()

    def _serve_reader(self, stream: DataStream, *, tls: bool) -> None:
        with ExitStack() as stack:
            senders: list[ContentSender] = []

            def answer() -> LinkHello:
                sender = self._carrier.new_sender()
                stack.callback(sender.close)
                senders.append(sender)
                return msgspec.structs.replace(self._hello, data=sender.offer_data)

            reader = accept_link(stream, self._security, answer, tls=tls)
            blocks = SharedBlocks(self._memory, reader.draft)
            [sender] = senders
            while True:
                stream.wait_readable()
                request = receive_request(stream, blocks.layout)
                if isinstance(request, ReadRequest):
                    self._answer(stream, request, blocks, sender)
                else:
                    sender.confirmed(request.slot)
                    send_reply(stream, request.request_id, CONFIRMED, 0)

    def _answer(
        self,
        stream: DataStream,
        request: ReadRequest,
        memory: SharedBlocks,
        sender: ContentSender,
    ) -> None:
        blocks = requested_blocks(request, memory.layout, self._memory.num_blocks)
        if self._refuse_stale(stream, request, blocks):
            return
        num_bytes = len(blocks) * memory.bytes_per_block
        try:
            place = sender.place(request.slot, num_bytes)
            memory.export_blocks([block.block_id for block in blocks], place)
        except Exception as error:
            log.exception("blocks could not be packed")
            send_reason(stream, request.request_id, FAULT, f"cannot pack blocks: {error!r}")
            return
        if not self._refuse_stale(stream, request, blocks):
            sender.send(stream, request.request_id, request.slot, num_bytes)

    def _refuse_stale(
        self, stream: DataStream, request: ReadRequest, blocks: Sequence[RemoteBlock]
    ) -> bool:
        for block in blocks:
            generation = self._memory.block_generation(block.block_id)
            if generation != block.generation:
                reason = (
                    f"block {block.block_id} was given away: it has generation {generation}, "
                    f"not {block.generation}"
                )
                send_reason(stream, request.request_id, STALE, reason)
                return True
        return False


def _listen(address: Address) -> socket.socket:
    if isinstance(address, TcpAddress):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family, backlog=128)
    else:
        listener = listen_unix(address.path)
    listener.setblocking(False)
    return listener


def _bound_address(listen: Address, listener: socket.socket) -> Address:
    if isinstance(listen, UnixAddress):
        return listen
    host = listen.host
    if host in ("0.0.0.0", "::"):
        host = _own_host(listener.family)
    return TcpAddress(host, listener.getsockname()[1])


def _own_host(family: int) -> str:
    """Return the address that other hosts see this one at, by what it would send to them from."""
    elsewhere = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))  # Sends nothing: it only chooses a route.
        return str(probe.getsockname()[0])
    return socket.gethostname()
