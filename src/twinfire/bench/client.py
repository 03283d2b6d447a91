"""An asynchronous client for one OpenAI-compatible server.

Owns the HTTP session, the stream of timed events and the classification of faults. Never retries:
a load client that hides a failure measures something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import TracebackType

import aiohttp
import msgspec

from twinfire.bench.request import PATHS, GenerationRequest, JsonValue, request_body
from twinfire.bench.request_record import Recorder, RequestRecord
from twinfire.bench.sse import DONE, SseDecoder, SseError
from twinfire.bench.stream_events import (
    Finished,
    StreamEvent,
    StreamFault,
    TextDelta,
    error_message,
    parse_chunk,
)
from twinfire.bench.target import Target
from twinfire.protocol.errors import TwinfireError

LINGER_S = 2.0
"""How long a server may keep a stream open after it said that it is done."""
Clock = Callable[[], float]


class ServerUnusable(TwinfireError):
    """The server cannot be measured at all; the message says what was tried."""


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None
    """Window in tokens, prompt and output; None where the server does not say."""


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class Client:
    """Use as `async with Client(target) as client`."""

    def __init__(self, target: Target, clock: Clock = time.perf_counter) -> None:
        self.target = target
        self.clock = clock
        self._model: ModelCard | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        headers = {"User-Agent": "twinfire-bench"}
        if self.target.api_key is not None:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout_s),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open HTTP session."""
        assert self._session is not None, "the client is used outside `async with`"
        return self._session

    async def model(self) -> ModelCard:
        """Return the model asked for, with its window if known; ServerUnusable if there is none."""
        if self._model is None:
            self._model = await self._choose_model()
        return self._model

    async def _choose_model(self) -> ModelCard:
        wanted = self.target.model
        try:
            cards = await self._model_cards()
        except ServerUnusable:
            if wanted is None:
                raise
            return ModelCard(wanted)
        if wanted is None:
            if not cards:
                raise ServerUnusable(
                    f"{self.target.root}/v1/models is empty: name a model (--model)"
                )
            return cards[0]
        return next((card for card in cards if card.id == wanted), ModelCard(wanted))

    async def _model_cards(self) -> list[ModelCard]:
        url = f"{self.target.root}/v1/models"
        try:
            async with self.session.get(url) as response:
                body = await response.read()
                if response.status != 200:
                    reason = error_message(body.decode(errors="replace"))
                    raise ServerUnusable(f"{url} answered {response.status}: {reason}")
                return msgspec.json.decode(body, type=_ModelList).data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnusable(f"{url} cannot be reached: {_reason(error)}") from None
        except msgspec.DecodeError as error:
            raise ServerUnusable(f"{url} is no OpenAI model list: {error}") from None

    async def get(self, url: str) -> bytes | None:
        """Return the body of a 200 answer, None for any other outcome."""
        try:
            async with self.session.get(url) as response:
                content = await response.read()
                return content if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def post_json(self, path: str, body: Mapping[str, JsonValue]) -> bytes | None:
        """Return the body of a 200 answer to `body` at `path`, None for any other outcome."""
        try:
            async with self.session.post(self.target.root + path, json=body) as response:
                content = await response.read()
                return content if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def stream(
        self, request: GenerationRequest
    ) -> AsyncGenerator[tuple[float, StreamEvent], None]:
        """Yield (clock reading, event) as the answer arrives; StreamFault when it fails.

        Closing the iterator closes the connection, which tells the server to stop.
        """
        card = await self.model()
        body = request_body(request, card.id, self.target.api, self.target.extra_body)
        headers = {self.target.session_header: request.session} if request.session else {}
        url = self.target.root + PATHS[self.target.api]
        answering = False
        try:
            async with self.session.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    text = (await response.read()).decode(errors="replace")
                    raise StreamFault(f"http_{response.status}", error_message(text))
                answering = True
                async for item in self._events(response):
                    yield item
        except TimeoutError:
            raise StreamFault("timeout", f"no end after {self.target.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise StreamFault("dropped" if answering else "refused", _reason(error)) from None

    async def _events(
        self, response: aiohttp.ClientResponse
    ) -> AsyncIterator[tuple[float, StreamEvent]]:
        if response.content_type != "text/event-stream":
            text = (await response.read()).decode(errors="replace")
            raise StreamFault(
                "malformed", f"{response.content_type}, no event stream: {text[:200]}"
            )
        decoder = SseDecoder()
        complete = False
        async for received in response.content.iter_any():
            at_s = self.clock()
            try:
                payloads = decoder.feed(received)
            except SseError as error:
                raise StreamFault("malformed", str(error)) from None
            for payload in payloads:
                if payload.strip() == DONE:
                    await _read_to_end(response)
                    return
                for event in parse_chunk(payload):
                    complete = complete or isinstance(event, Finished)
                    yield at_s, event
        if not complete or decoder.has_partial_event:
            raise StreamFault("incomplete", "the stream ended without finish_reason and [DONE]")

    async def measure(
        self, request: GenerationRequest, on_text: Callable[[], None] | None = None
    ) -> RequestRecord:
        """Send a request, read its answer to the end and record it; faults are recorded too.

        `on_text` is called after each piece of text.
        """
        await self.model()
        recorder = Recorder(request, self.clock())
        try:
            async for at_s, event in self.stream(request):
                recorder.add(event, at_s)
                if on_text is not None and isinstance(event, TextDelta):
                    on_text()
        except StreamFault as fault:
            return recorder.finish(self.clock(), fault)
        return recorder.finish(self.clock())


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows `[DONE]`, so that the connection is reused and not seen as broken off."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        await asyncio.wait_for(response.content.read(), LINGER_S)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
