"""The gateway's end of a link to one worker.

Multiplexes every request over one socket. Owns the requests in flight on that link: when it closes,
each of them ends with WorkerLost, so that no client waits for a worker that is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable
from typing import cast

from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.protocol.errors import InvalidRequest, Overloaded, TwinfireError, WorkerLost
from twinfire.protocol.framing import FrameDecoder, FrameError, encode_frame, gateway_side_decoder
from twinfire.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Failed,
    Hello,
    Load,
    Loading,
    Ready,
    Rejected,
    StepFrame,
    Submit,
    ToGateway,
    WorkerInfo,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

State = Loading | Ready | Failed
"""How far the worker is, in its own words."""


class WorkerLink(asyncio.Protocol):
    """One connected worker. All methods belong to the event loop's thread.

    `on_state` hears each change of the worker's state, `on_load` each step's load, `on_closed`
    once.
    """

    def __init__(
        self,
        gateway_id: str,
        on_state: Callable[[State], None],
        on_load: Callable[[Load], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._gateway_id = gateway_id
        self._on_state = on_state
        self._on_load = on_load
        self._on_closed = on_closed
        self._decoder: FrameDecoder[ToGateway] = gateway_side_decoder()
        self._transport: asyncio.Transport | None = None
        self._request_ids = itertools.count(1)
        self._generations: dict[int, LinkGeneration] = {}
        self.worker_info: WorkerInfo | None = None
        self.failure: str | None = None
        """Why the worker says it cannot go on."""

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    def submit(
        self, prompt: array[int], sampling: SamplingParams, priority: int, cache_salt: str
    ) -> LinkGeneration:
        """Send a request; WorkerLost when the link is closed."""
        if self._transport is None or self._transport.is_closing():
            raise WorkerLost("no worker is connected")
        request_id = next(self._request_ids)
        generation = LinkGeneration(
            sampling.n, cancel=lambda choice: self._cancel(request_id, choice)
        )
        self._generations[request_id] = generation
        message = Submit(request_id, pack_ids(prompt), sampling, priority, cache_salt)
        self._transport.write(encode_frame(message))
        return generation

    def close(self) -> None:
        """Close the link; every request on it ends with WorkerLost."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce this gateway."""
        # A loop's transports need not derive from asyncio's; uvloop's do not.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode_frame(Hello(PROTOCOL_VERSION, self._gateway_id)))

    def data_received(self, data: bytes) -> None:
        """Decode and hand out; a broken frame closes the link."""
        try:
            messages = self._decoder.feed(data)
        except FrameError as error:
            self.failure = f"broken frame from the worker: {error}"
            self.close()
            return
        for message in messages:
            self._handle(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what was in flight."""
        reason = self.failure or "the worker's link closed"
        for request_id in list(self._generations):
            self._end(request_id, WorkerLost(reason))
        self.worker_info = None
        self._on_closed()

    def _handle(self, message: ToGateway) -> None:
        match message:
            case StepFrame(load, prompts, deltas):
                self._on_load(load)
                for prompt in prompts:
                    if generation := self._generations.get(prompt.request_id):
                        generation.put(prompt)
                for delta in deltas:
                    if generation := self._generations.get(delta.request_id):
                        generation.put(delta)
                        if delta.finish_reason is not None and generation.all_choices_ended:
                            self._generations.pop(delta.request_id, None)
            case Rejected(request_id):
                self._end(request_id, _rejection(message))
            case Ready(info):
                self.worker_info = info
                self._on_state(message)
            case Loading():
                self._on_state(message)
            case Failed(reason):
                self.failure = reason
                self._on_state(message)

    def _cancel(self, request_id: int, choice: int) -> None:
        generation = self._generations.get(request_id)
        if generation is None:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(Cancel(request_id, choice)))
        if generation.all_choices_ended:
            self._generations.pop(request_id, None)

    def _end(self, request_id: int, error: TwinfireError) -> None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            generation.fail(error)


def _rejection(message: Rejected) -> TwinfireError:
    if message.status == 429:
        return Overloaded(message.message)
    if message.status == 503:
        return WorkerLost(message.message)
    return InvalidRequest(message.message, param=message.param, code=message.code)
