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
from twinfire.gateway.backends.link_request import LinkRequest
from twinfire.gateway.backends.request_context import NO_CONTEXT, RequestContext
from twinfire.protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TwinfireError,
    WorkerLost,
)
from twinfire.protocol.framing import FrameDecoder, FrameError, encode_frame, gateway_side_decoder
from twinfire.protocol.messages import (
    ALL_CHOICES,
    PROTOCOL_VERSION,
    Alive,
    CacheEvents,
    Cancel,
    Failed,
    HandOffFailed,
    Hello,
    Load,
    Loading,
    Ready,
    Refused,
    Rejected,
    Reserve,
    Reserved,
    StepFrame,
    Submit,
    ToGateway,
    ToWorker,
    WorkerInfo,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

State = Loading | Ready | Failed
"""How far the worker is, in its own words."""

REFUSAL_FLUSH_S = 2.0
"""How long a worker that is refused has to read why."""


def _ignore_cache_events(_: CacheEvents) -> None:
    pass


class WorkerLink(asyncio.Protocol):
    """One connected worker. All methods belong to the event loop's thread.

    `on_state` hears each change of the worker's state, `on_load` each step's load after everything
    else of its frame, `on_cache` what its cache gained and lost, `on_closed` once.
    """

    def __init__(
        self,
        gateway_id: str,
        on_state: Callable[[State], None],
        on_load: Callable[[Load], None],
        on_closed: Callable[[], None],
        on_cache: Callable[[CacheEvents], None] = _ignore_cache_events,
    ) -> None:
        self._gateway_id = gateway_id
        self._on_state = on_state
        self._on_load = on_load
        self._on_cache = on_cache
        self._on_closed = on_closed
        self._decoder: FrameDecoder[ToGateway] = gateway_side_decoder()
        self._transport: asyncio.Transport | None = None
        self._request_ids = itertools.count(1)
        self._requests: dict[int, LinkRequest] = {}
        self.worker_info: WorkerInfo | None = None
        self.failure: str | None = None
        """Why the link closed or is about to."""
        self.was_heard = False
        """Whether anything came since somebody set it to False."""
        self.step = 0
        """The engine's counter as last heard."""

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def submit(
        self,
        prompt: array[int],
        sampling: SamplingParams,
        priority: int,
        cache_salt: str,
        context: RequestContext = NO_CONTEXT,
    ) -> LinkGeneration:
        """Send a request of this link alone; WorkerLost when the link is closed."""
        request_id = next(self._request_ids)
        generation = LinkGeneration(
            sampling.n, cancel=lambda choice: self._cancel_unwanted(request_id, choice)
        )
        timeout_s = None
        if context.deadline_s is not None:
            timeout_s = max(context.deadline_s - asyncio.get_running_loop().time(), 0.0)
        message = Submit(
            request_id,
            pack_ids(prompt),
            sampling,
            priority,
            cache_salt,
            timeout_s=timeout_s,
            prediction=context.prediction,
        )
        self.send_request(message, generation)
        if context.deadline_s is not None:
            generation.end_at(context.deadline_s)
        return generation

    def send_request(self, message: Submit | Reserve, request: LinkRequest) -> None:
        """Send one stage of a request and tell `request` what comes of it.

        WorkerLost when the link is closed.
        """
        if not self.is_open:
            raise WorkerLost(self.failure or "no worker is connected")
        submit = message.submit if isinstance(message, Reserve) else message
        self._requests[submit.request_id] = request
        self.send(message)

    def cancel(self, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice, or everything of a request, which then hears nothing more."""
        if request_id not in self._requests:
            return
        self.send(Cancel(request_id, choice))
        if choice == ALL_CHOICES:
            del self._requests[request_id]

    def forget(self, request_id: int) -> None:
        """Tell nobody any more what the worker says of a request."""
        self._requests.pop(request_id, None)

    def send(self, message: ToWorker) -> None:
        """Send a message; nothing happens once the link is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def refuse(self, reason: str) -> None:
        """Tell the worker that nothing is taken from it, and close."""
        self.failure = reason
        self.send(Refused(reason))
        self.close()
        # One that does not read would keep the connection open for as long as it likes.
        asyncio.get_running_loop().call_later(REFUSAL_FLUSH_S, self.cut, reason)

    def cut(self, reason: str) -> None:
        """Close at once, whatever is unsent; every request on it ends with WorkerLost."""
        self.failure = self.failure or reason
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close when all is sent; every request on it ends with WorkerLost."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce this gateway."""
        # A loop's transports need not derive from asyncio's; uvloop's do not.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode_frame(Hello(PROTOCOL_VERSION, self._gateway_id)))

    def data_received(self, data: bytes) -> None:
        """Decode and hand out; a broken frame closes the link."""
        self.was_heard = True
        try:
            messages = self._decoder.feed(data)
        except FrameError as error:
            self.cut(f"broken frame from the worker: {error}")
            return
        for message in messages:
            if type(message) is StepFrame:
                self._handle_step(message)
            else:
                self._handle(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what was in flight."""
        reason = self.failure or "the worker's link closed"
        for request_id in list(self._requests):
            self._end(request_id, WorkerLost(reason))
        self.worker_info = None
        self._on_closed()

    def _handle_step(self, frame: StepFrame) -> None:
        requests = self._requests
        for progress in frame.progress:
            if request := requests.get(progress.request_id):
                request.note(progress)
        for prompt in frame.prompts:
            if request := requests.get(prompt.request_id):
                request.put(prompt)
        for delta in frame.deltas:
            if request := requests.get(delta.request_id):
                request.put(delta)
                if delta.finish_reason is not None and request.all_choices_ended():
                    requests.pop(delta.request_id, None)
        for preempted in frame.preempted:
            if request := requests.get(preempted.request_id):
                request.note(preempted)
        self.step = frame.load.step
        self._on_load(frame.load)

    def _handle(self, message: ToGateway) -> None:
        match message:
            case Alive(step):
                self.step = step
            case CacheEvents():
                self._on_cache(message)
            case Reserved(request_id) | HandOffFailed(request_id):
                if request := self._requests.get(request_id):
                    request.note(message)
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

    def _cancel_unwanted(self, request_id: int, choice: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self.send(Cancel(request_id, choice))
            if request.all_choices_ended():
                del self._requests[request_id]

    def _end(self, request_id: int, error: TwinfireError) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.fail(error)


def _rejection(message: Rejected) -> TwinfireError:
    match message.status:
        case 429:
            return Overloaded(message.message)
        case 503:
            return WorkerLost(message.message)
        case 504:
            return DeadlineExceeded(message.message)
        case _:
            return InvalidRequest(message.message, param=message.param, code=message.code)
