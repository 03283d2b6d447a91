"""A real cluster backend that listens for workers, and a consumer that keeps what it is given."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from support.scripted_worker import MODEL, ScriptedWorker, scripted_info
from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.backends.liveness import LivenessLimits
from twinfire.gateway.backends.pd_generation import PdGeneration
from twinfire.gateway.backends.request_context import RequestContext
from twinfire.gateway.backends.worker_listener import WorkerListener
from twinfire.gateway.routing.route import PdPolicy
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.protocol.addresses import Address, UnixAddress
from twinfire.protocol.messages import ChoiceDelta, Fingerprint, PromptDone, Role
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.secret import hash_seed
from twinfire.protocol.tokens import unpack_ids

SECRET = b"a secret of this test"
QUICK = LivenessLimits(silent_s=0.4, stall_s=0.6, sweep_s=0.05)


async def until(condition: Callable[[], bool], limit_s: float = 5) -> None:
    """Wait for what sockets bring."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


class Consumer:
    """Reads a generation to its end."""

    def __init__(self, generation: PdGeneration) -> None:
        self.generation = generation
        self.prompts: list[PromptDone] = []
        self.deltas: list[ChoiceDelta] = []
        self.error: Exception | None = None
        self.task = asyncio.create_task(self._read())

    def tokens(self, choice: int = 0) -> list[int]:
        return [
            token
            for delta in self.deltas
            if delta.choice == choice
            for token in unpack_ids(delta.tokens)
        ]

    def finish(self, choice: int = 0) -> str | None:
        ends = [d.finish_reason for d in self.deltas if d.choice == choice and d.finish_reason]
        assert len(ends) <= 1
        return ends[0] if ends else None

    async def end(self) -> None:
        async with asyncio.timeout(8):
            await self.task

    async def has(self, count: int, choice: int = 0) -> None:
        await until(lambda: len(self.tokens(choice)) >= count)

    async def _read(self) -> None:
        try:
            async for event in self.generation:
                if isinstance(event, PromptDone):
                    assert not self.deltas
                    self.prompts.append(event)
                else:
                    assert self.prompts
                    self.deltas.append(event)
        except Exception as error:
            self.error = error


class PoolWithListener:
    """A backend, its listener, and the scripted workers that were made to join."""

    def __init__(self, backend: ClusterBackend, listener: WorkerListener, address: Address) -> None:
        self.backend = backend
        self.listener = listener
        self.address = address

    async def join(self, name: str, role: Role = "mixed", **changes: object) -> ScriptedWorker:
        info = scripted_info(name, role, **changes)
        worker = await ScriptedWorker.join(self.address, info, SECRET)
        await until(lambda: self.backend.registry.get(name) is not None)
        return worker

    def submit(
        self,
        prompt: int | list[int] = 100,
        *,
        n: int = 1,
        max_tokens: int = 50,
        policy: PdPolicy | None = None,
        deadline_s: float | None = None,
        reject_if_busy: bool = False,
        **sampling: int,
    ) -> Consumer:
        """Submit a prompt, or that many tokens of one; the deadline is from now."""
        ids = array("I", range(1, prompt + 1) if isinstance(prompt, int) else prompt)
        deadline = None
        if deadline_s is not None:
            deadline = asyncio.get_running_loop().time() + deadline_s
        context = RequestContext(
            pd_policy=policy, deadline_s=deadline, reject_if_busy=reject_if_busy
        )
        params = SamplingParams(max_tokens=max_tokens, seed=1, n=n, **sampling)
        return Consumer(self.backend.submit(ids, params, context=context))

    def assert_idle(self) -> None:
        """Nothing is charged and nothing is in flight."""
        for member in self.backend.registry:
            assert member.link.num_in_flight == 0
        for worker in self.backend.router.workers():
            assert (worker.prefill.num_entries, worker.decode.num_entries) == (0, 0)
            assert (worker.prefill.charged, worker.decode.charged) == (0, 0)
        assert len(self.backend.admission) == 0


@asynccontextmanager
async def worker_pool(
    folder: Path,
    *,
    limits: LivenessLimits = QUICK,
    settings: RoutingSettings | None = None,
    expected: Fingerprint | None = None,
) -> AsyncIterator[PoolWithListener]:
    router = Router(time.monotonic, settings or RoutingSettings(no_worker_wait_s=0.5))
    backend = ClusterBackend(MODEL, router, hash_seed(SECRET), expected=expected, limits=limits)
    listener = WorkerListener("gateway", SECRET)
    listener.add_pool(backend.registry)
    address = await listener.listen(UnixAddress(str(folder / "workers.sock")))
    backend.start()
    try:
        yield PoolWithListener(backend, listener, address)
    finally:
        await listener.close()
        await backend.close()
