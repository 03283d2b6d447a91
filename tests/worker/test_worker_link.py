"""Gateway and worker over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engines import naive_answer
from support.running_worker import INFO, RunningWorker, running_worker
from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.gateway.backends.worker_link import State, WorkerLink
from twinfire.protocol.errors import InvalidRequest, WorkerLost
from twinfire.protocol.framing import encode_frame
from twinfire.protocol.messages import (
    PROTOCOL_VERSION,
    ChoiceDelta,
    Failed,
    Hello,
    Load,
    PromptDone,
    Submit,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.worker.inbox import Drain

ENDLESS = SamplingParams(max_tokens=900, seed=1)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RunningWorker]:
    with running_worker(tmp_path) as running:
        yield running


class Gateway:
    """A link with everything that it has heard."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.load: Load | None = None
        self.closed = asyncio.Event()
        self._heard = asyncio.Event()
        self.link = WorkerLink("", self._on_state, self._on_load, self.closed.set)

    @classmethod
    async def connect(cls, worker: RunningWorker, name: str = "g") -> Gateway:
        gateway = cls()
        gateway.link = WorkerLink(name, gateway._on_state, gateway._on_load, gateway.closed.set)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: gateway.link, worker.socket_path)
        await gateway.until(lambda: gateway.link.worker_info is not None)
        return gateway

    def _on_state(self, state: State) -> None:
        self.states.append(state)
        self._heard.set()

    def _on_load(self, load: Load) -> None:
        self.load = load
        self._heard.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    async def until_idle(self) -> None:
        await self.until(
            lambda: (
                self.load is not None
                and (self.load.running, self.load.waiting, self.load.kv_blocks_used) == (0, 0, 0)
            )
        )

    def submit(self, prompt: list[int], sampling: SamplingParams) -> LinkGeneration:
        return self.link.submit(array("I", prompt), sampling, 0, "")


async def tokens_of(generation: LinkGeneration) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    events = [event async for event in generation]
    assert isinstance(events[0], PromptDone)
    for event in events[1:]:
        assert isinstance(event, ChoiceDelta)
        tokens.setdefault(event.choice, []).extend(unpack_ids(event.tokens))
    return tokens


def test_many_requests_share_a_link(worker: RunningWorker) -> None:
    async def scenario() -> None:
        gateway = await Gateway.connect(worker)
        assert gateway.link.worker_info == INFO
        params = [SamplingParams(max_tokens=9, seed=seed, n=1 + seed % 3) for seed in range(20)]
        prompts = [[seed % 5 + 1] * (seed + 1) for seed in range(20)]
        answers = await asyncio.gather(
            *(tokens_of(gateway.submit(p, s)) for p, s in zip(prompts, params, strict=True))
        )
        for prompt, sampling, answer in zip(prompts, params, answers, strict=True):
            for choice in range(sampling.n):
                assert answer[choice] == naive_answer(prompt, sampling, choice).tokens
        assert gateway.link.num_in_flight == 0
        await gateway.until_idle()

    asyncio.run(scenario())


def test_cancel_frees_blocks_and_ends_the_iteration(worker: RunningWorker) -> None:
    async def scenario() -> None:
        gateway = await Gateway.connect(worker)
        generation = gateway.submit([1, 2, 3], ENDLESS)
        events = aiter(generation)
        for _ in range(3):
            await anext(events)
        generation.cancel()
        generation.cancel()
        assert [event async for event in events] == []
        assert gateway.link.num_in_flight == 0
        await gateway.until_idle()

    asyncio.run(scenario())


def test_a_cancelled_choice_says_nothing_more_and_the_others_go_on(worker: RunningWorker) -> None:
    async def scenario() -> None:
        gateway = await Gateway.connect(worker)
        sampling = SamplingParams(max_tokens=40, seed=1, n=2)
        generation = gateway.submit([1, 2, 3], sampling)
        tokens: list[int] = []
        async for event in generation:
            if isinstance(event, ChoiceDelta):
                assert event.choice == 1 or not tokens
                if event.choice == 0:
                    generation.cancel(0)
                else:
                    tokens += unpack_ids(event.tokens)
        assert tokens == naive_answer([1, 2, 3], sampling, 1).tokens
        await gateway.until_idle()

    asyncio.run(scenario())


def test_a_lost_gateway_frees_its_blocks(worker: RunningWorker) -> None:
    async def scenario() -> None:
        watcher = await Gateway.connect(worker, "watcher")
        gateway = await Gateway.connect(worker, "lost")
        generation = gateway.submit([1, 2, 3], ENDLESS)
        await anext(aiter(generation))
        gateway.link.close()
        with pytest.raises(WorkerLost):
            async for _ in generation:
                pass
        await watcher.until_idle()
        with pytest.raises(WorkerLost):
            gateway.submit([1], ENDLESS)

    asyncio.run(scenario())


def test_refusals_name_the_field(worker: RunningWorker) -> None:
    async def scenario() -> None:
        gateway = await Gateway.connect(worker)
        with pytest.raises(InvalidRequest, match="max_model_len") as refusal:
            await tokens_of(gateway.submit([1] * 2000, ENDLESS))
        assert refusal.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await tokens_of(gateway.submit([64], ENDLESS))
        assert gateway.link.num_in_flight == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        encode_frame(Submit(1, pack_ids([1]), ENDLESS)),
        encode_frame(Hello(99, "from the future")),
        encode_frame(Hello(PROTOCOL_VERSION, "liar")) + b"\x05\x00\x00\x00hello",
    ],
    ids=["length", "http", "no hello", "version", "garbage after hello"],
)
def test_hostile_links_are_closed_and_nothing_else(worker: RunningWorker, garbage: bytes) -> None:
    async def scenario() -> None:
        gateway = await Gateway.connect(worker)
        reader, writer = await asyncio.open_unix_connection(worker.socket_path)
        writer.write(garbage)
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
        sampling = SamplingParams(max_tokens=3, seed=1)
        answer = await tokens_of(gateway.submit([1, 2], sampling))
        assert answer[0] == naive_answer([1, 2], sampling, 0).tokens

    asyncio.run(scenario())


def test_another_protocol_version_is_told_why(worker: RunningWorker) -> None:
    async def scenario() -> None:
        gateway = Gateway()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: gateway.link, worker.socket_path)
        transport.write(encode_frame(Hello(99, "from the future")))
        async with asyncio.timeout(10):
            await gateway.closed.wait()
        assert isinstance(gateway.states[-1], Failed)
        assert "protocol" in gateway.states[-1].message

    asyncio.run(scenario())


def test_a_gateway_that_does_not_read_is_dropped(worker: RunningWorker) -> None:
    async def scenario() -> None:
        watcher = await Gateway.connect(worker, "watcher")
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(worker.socket_path)
        deaf.sendall(encode_frame(Hello(PROTOCOL_VERSION, "deaf")))
        # Log-probabilities of long prompts fill the buffer quickly.
        big = SamplingParams(max_tokens=0, seed=1, prompt_logprobs=64)
        num_requests = 8
        for request_id in range(num_requests):
            deaf.sendall(encode_frame(Submit(request_id, pack_ids([1] * 500), big)))
        sampling = SamplingParams(max_tokens=3, seed=1)
        answer = await tokens_of(watcher.submit([1, 2], sampling))
        assert answer[0] == naive_answer([1, 2], sampling, 0).tokens
        await watcher.until_idle()
        await asyncio.to_thread(_wait_until_dropped, deaf)
        assert _bytes_left(deaf) < num_requests * 500 * 64 * 8
        deaf.close()

    asyncio.run(scenario())


def _wait_until_dropped(link: socket.socket) -> None:
    """Wait for the other end to close, without reading, which would make room for more."""
    poller = select.poll()
    poller.register(link, 0)  # A hang-up is reported whatever is asked for.
    assert poller.poll(10_000), "the worker has not dropped a gateway that does not read"


def _bytes_left(link: socket.socket) -> int:
    total = 0
    with contextlib.suppress(ConnectionResetError):
        while received := link.recv(1 << 16):
            total += len(received)
    return total


def test_draining_finishes_what_runs_and_refuses_the_rest(worker: RunningWorker) -> None:
    async def scenario() -> None:
        gateway = await Gateway.connect(worker)
        sampling = SamplingParams(max_tokens=300, seed=1)
        running = gateway.submit([1, 2], sampling)
        events = aiter(running)
        await anext(events)
        worker.inbox.put(Drain())
        late = gateway.submit([1], sampling)
        with pytest.raises(WorkerLost, match="draining"):
            await tokens_of(late)
        tokens = [
            token
            async for event in events
            if isinstance(event, ChoiceDelta)
            for token in unpack_ids(event.tokens)
        ]
        assert tokens == naive_answer([1, 2], sampling, 0).tokens
        await asyncio.to_thread(worker.thread.join, 10)
        assert not worker.thread.is_alive()

    asyncio.run(scenario())
