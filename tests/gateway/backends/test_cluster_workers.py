"""The gateway's flow over real worker processes: any way to serve a request gives one stream."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.checkpoint_files import write_model_folder
from support.scripted_cluster import SECRET, WorkerPrograms
from support.worker_pool import Consumer, until
from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.backends.request_context import RequestContext
from twinfire.gateway.backends.worker_listener import WorkerListener
from twinfire.gateway.routing.route import PdPolicy
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.protocol.addresses import UnixAddress
from twinfire.protocol.messages import Role
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.secret import hash_seed

LONG = [(7 * i) % 300 + 3 for i in range(200)]
START_LIMIT_S = 40.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder)
    return folder


class Cluster:
    """A backend and the worker processes that join it."""

    def __init__(self, backend: ClusterBackend, programs: WorkerPrograms) -> None:
        self.backend = backend
        self.programs = programs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By instance id."""

    async def start(self, *roles: Role, **settings: object) -> list[str]:
        """Return the instance ids, in the order of `roles`."""
        started = [self.programs.start(role, **settings) for role in roles]
        names: list[str] = []
        for process in started:
            await until(lambda process=process: self._name(process.pid), START_LIMIT_S)  # type: ignore[misc]
            names.append(self._name(process.pid))
            self.processes[names[-1]] = process
        return names

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        policy: PdPolicy = "always",
        deadline_s: float = 30,
    ) -> Consumer:
        deadline = asyncio.get_running_loop().time() + deadline_s
        context = RequestContext(pd_policy=policy, deadline_s=deadline)
        return Consumer(self.backend.submit(array("I", prompt), sampling, context=context))

    async def answer(
        self, prompt: list[int], sampling: SamplingParams, policy: PdPolicy = "always"
    ) -> Consumer:
        consumer = self.submit(prompt, sampling, policy)
        await consumer.end()
        assert consumer.error is None, consumer.error
        return consumer

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    async def idle(self, limit_s: float = 5) -> None:
        """Nothing is held on any worker, and nothing is charged."""
        await until(self._is_idle, limit_s)

    def _is_idle(self) -> bool:
        loads = [member.load for member in self.backend.registry]
        charged = [
            ledger.num_entries
            for worker in self.backend.router.workers()
            for ledger in (worker.prefill, worker.decode)
        ]
        return not any(charged) and all(
            load is not None
            and (load.kv_blocks_used, load.hand_offs_open, load.running, load.waiting)
            == (0, 0, 0, 0)
            for load in loads
        )

    def _name(self, pid: int) -> str:
        names = [one.instance_id for one in self.backend.registry if one.info.pid == pid]
        return names[0] if names else ""


def run(folder: Path, model: Path, steps: Callable[[Cluster], Awaitable[None]]) -> None:
    async def scenario() -> None:
        router = Router(time.monotonic, RoutingSettings())
        backend = ClusterBackend("tiny", router, hash_seed(SECRET))
        listener = WorkerListener("gateway", SECRET)
        listener.add_pool(backend.registry)
        address = await listener.listen(UnixAddress(str(folder / "gw")))
        backend.start()
        programs = WorkerPrograms(folder, model, str(address), "unix")
        try:
            async with asyncio.timeout(80):
                await steps(Cluster(backend, programs))
        except BaseException:
            for number in range(len(programs.processes)):
                print(f"--- worker {number}\n{programs.log(number).read_text()[-3000:]}")
            raise
        finally:
            programs.close()
            await listener.close()
            await backend.close()

    asyncio.run(scenario())


def params(max_tokens: int = 12, **changed: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=5, **changed)  # type: ignore[arg-type]


def assert_same(one: Consumer, other: Consumer, n: int = 1) -> None:
    for choice in range(n):
        assert one.tokens(choice) == other.tokens(choice)
        assert one.finish(choice) == other.finish(choice)
        rows = [
            b"".join(d.logprobs.top_logprobs for d in c.deltas if d.choice == choice and d.logprobs)
            for c in (one, other)
        ]
        assert rows[0] == rows[1]
    assert one.prompts[0].prompt_logprobs == other.prompts[0].prompt_logprobs


def test_a_stream_is_the_same_however_it_is_served(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        await cluster.start("prefill", "decode")
        cases = [(1, 1), (31, 2), (32, 1), (33, 3), (64, 1), (150, 2)]
        for length, n in cases:
            prompt = [3 + length, *LONG[: length - 1]]
            sampling = params(n=n, logprobs=2)
            handed_over = await cluster.answer(prompt, sampling)
            record = handed_over.generation.record
            assert record.prefill is not None
            assert record.hand_off is not None
            assert handed_over.prompts[0].cached_tokens == 0
            alone = await cluster.answer(prompt, sampling, "never")
            assert alone.generation.record.prefill is None
            assert_same(handed_over, alone, n)
        scored = params(max_tokens=3, prompt_logprobs=1)
        assert_same(
            await cluster.answer(LONG[:70], scored),
            await cluster.answer(LONG[:70], scored, "never"),
        )
        one_token = await cluster.answer(LONG[:40], params(max_tokens=1))
        assert (len(one_token.tokens()), one_token.finish()) == (1, "length")
        parts = one_token.generation.record.first_token
        assert parts is not None
        assert all(getattr(parts, name) >= 0 for name in parts.__slots__)
        await cluster.idle()

    run(tmp_path, model, steps)


def test_streams_survive_whoever_is_lost(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        prefill, decode, spare = await cluster.start("prefill", "decode", "decode")
        sampling = params(max_tokens=300, n=2, logprobs=1)
        expected = await cluster.answer(LONG[:100], sampling, "never")
        await cluster.idle()

        consumer = cluster.submit(LONG[:100], sampling)
        await consumer.has(20, choice=1)
        serving = consumer.generation.record.decode
        cluster.signal(serving, signal.SIGKILL)
        await consumer.end()
        assert consumer.error is None, consumer.error
        assert_same(consumer, expected, 2)
        record = consumer.generation.record
        assert (record.num_resumes, len(consumer.prompts)) == (2, 1)
        await cluster.idle()

        left = spare if serving == decode else decode
        consumer = cluster.submit(LONG[:100], sampling)
        await consumer.has(20, choice=1)
        cluster.signal(left, signal.SIGSTOP)
        await consumer.end()
        assert consumer.error is None, consumer.error
        assert_same(consumer, expected, 2)
        cluster.signal(left, signal.SIGCONT)
        await until(lambda: cluster.backend.registry.get(left) is not None, 10)
        await cluster.idle()

        cluster.signal(prefill, signal.SIGSTOP)
        consumer = cluster.submit(LONG[:90], sampling)
        await consumer.end()
        assert consumer.error is None, consumer.error
        cluster.signal(prefill, signal.SIGCONT)
        await until(lambda: cluster.backend.registry.get(prefill) is not None, 10)
        assert_same(consumer, await cluster.answer(LONG[:90], sampling, "never"), 2)
        await cluster.idle()

    run(tmp_path, model, steps)


def test_what_one_worker_holds_another_need_not_compute(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        prefill, _ = await cluster.start("prefill", "decode", kv_cache_bytes=1 << 22)
        history = LONG[:150]
        for _ in range(3):
            consumer = await cluster.answer(history, params(max_tokens=60))
            num_known = len(history) + len(consumer.tokens())
            history = history + consumer.tokens() + LONG[:10]
        index = cluster.backend.router.index
        assert index.num_blocks > 0
        consumer = await cluster.answer(history, params(max_tokens=4))
        cached = consumer.prompts[0].cached_tokens
        assert num_known - 64 <= cached <= num_known
        assert consumer.generation.record.prefill == prefill
        await cluster.idle()

    run(tmp_path, model, steps)


def test_a_client_that_leaves_frees_both_workers(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        await cluster.start("prefill", "decode")
        for number in range(12):
            consumer = cluster.submit([number + 3, *LONG[:180]], params(max_tokens=300, n=2))
            await asyncio.sleep(0.004 * number)
            consumer.generation.cancel()
            await consumer.end()
            assert consumer.error is None
        await cluster.idle()

    run(tmp_path, model, steps)
