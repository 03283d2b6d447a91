"""Two real workers and a scripted gateway: prompts cross, and every part may be lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from support.checkpoint_files import write_model_folder
from support.scripted_cluster import (
    Answer,
    JoinedWorker,
    ScriptedGateway,
    WorkerPrograms,
    peer_of,
)
from twinfire.protocol.messages import DrainWorker, PrefixPull, ResyncCache, SetRole
from twinfire.protocol.sampling import SamplingParams
from twinfire.transfer.fault_points import FAULT_POINTS

PROMPT_LENGTHS = (1, 31, 32, 33, 64, 150)
BYTES_PER_BLOCK = 8192
LONG = [(7 * i) % 300 + 3 for i in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder)
    return folder


class Cluster:
    """A gateway and the programs that join it."""

    def __init__(self, gateway: ScriptedGateway, programs: WorkerPrograms) -> None:
        self.gateway = gateway
        self.programs = programs

    async def start(self, role: str, **settings: object) -> JoinedWorker:
        process = self.programs.start(role, **settings)  # type: ignore[arg-type]
        return await self.gateway.ready(role, process.pid)  # type: ignore[arg-type]

    async def pair(self, **settings: object) -> tuple[JoinedWorker, JoinedWorker]:
        programs = [self.programs.start("prefill", **settings)]
        programs.append(self.programs.start("decode", **settings))
        prefill = await self.gateway.ready("prefill", programs[0].pid)
        return prefill, await self.gateway.ready("decode", programs[1].pid)

    async def alone(
        self, worker: JoinedWorker, prompt: list[int], params: SamplingParams
    ) -> Answer:
        return await self.gateway.finished(
            self.gateway.submit(worker, prompt, params), max(1, params.n)
        )


def run(
    tmp_path: Path, model: Path, transport: str, steps: Callable[[Cluster], Awaitable[None]]
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed (extra `nixl`)")

    async def scenario() -> None:
        address = f"unix:{tmp_path}/gw" if transport == "unix" else "tcp:127.0.0.1:0"
        gateway = ScriptedGateway(address)
        await gateway.listen()
        programs = WorkerPrograms(tmp_path, model, gateway.address, transport)
        try:
            async with asyncio.timeout(80):
                await steps(Cluster(gateway, programs))
        except BaseException:
            for number in range(len(programs.processes)):
                print(f"--- worker {number}\n{programs.log(number).read_text()[-3000:]}")
            raise
        finally:
            programs.close()
            gateway.close()

    asyncio.run(scenario())


def params(max_tokens: int = 12, **changed: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=5, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_stream_is_the_same_over_two_workers(tmp_path: Path, model: Path, transport: str) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        prefill, decode = await cluster.pair(kv_checksums=True)
        mixed = await cluster.start("mixed")
        for length in PROMPT_LENGTHS:
            prompt, n = LONG[:length], 1 + length % 3
            sampling = params(n=n, logprobs=2)
            expected = await cluster.alone(mixed, prompt, sampling)
            request = gateway.submit(prefill, prompt, sampling, decode=decode)
            answer = await gateway.finished(request, n)
            assert answer.tokens == expected.tokens
            assert answer.finish == expected.finish
            assert answer.reserved is not None
            assert answer.prompt is not None
            moved = answer.prompt.hand_off
            assert moved is not None
            num_blocks = -(-length // 32)
            assert moved.num_blocks == num_blocks - answer.reserved.cached_tokens // 32
        await gateway.idle(prefill, decode, mixed)
        await asyncio.sleep(0.2)
        assert decode.cache >= prefill.cache != set()
        decode.cache_sequence, known = -1, set(decode.cache)
        decode.cache.clear()
        decode.send(ResyncCache())
        await gateway.until(lambda: decode.cache_sequence >= 0)
        assert decode.cache == known
        assert decode.alive_steps

    run(tmp_path, model, transport, steps)


def test_a_first_token_may_end_the_request(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        prefill, decode = await cluster.pair()
        request = gateway.submit(prefill, LONG[:70], params(1), decode=decode)
        answer = await gateway.finished(request)
        assert answer.finish == {0: "length"}
        assert len(answer.tokens[0]) == 1
        await gateway.idle(prefill, decode)

    run(tmp_path, model, "unix", steps)


def test_a_prefix_is_pulled_instead_of_computed(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        prefill, decode = await cluster.pair()
        first = await cluster.alone(decode, LONG, params())
        pull = PrefixPull(peer_of(decode), 6)
        request = gateway.submit(prefill, LONG, params(), pull=pull)
        answer = await gateway.finished(request)
        assert answer.tokens == first.tokens
        assert answer.prompt is not None
        assert answer.prompt.pulled_tokens == 6 * 32
        assert answer.prompt.computed_tokens == len(LONG) - 6 * 32
        await gateway.idle(prefill, decode)

    run(tmp_path, model, "unix", steps)


def test_roles_change_and_a_drained_worker_ends(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        prefill, decode = await cluster.pair()
        prefill.send(SetRole("mixed"))
        await gateway.until(lambda: prefill.info and prefill.info.role == "mixed")
        running = gateway.submit(decode, LONG[:40], params(150))
        await gateway.until(lambda: gateway.answers[running].tokens)
        decode.send(DrainWorker())
        await gateway.until(lambda: decode.info and decode.info.draining)
        late = gateway.submit(decode, LONG[:40], params())
        handed = gateway.submit(prefill, LONG[:40], params(), decode=decode)
        await gateway.until(lambda: gateway.answers[late].rejected)
        assert gateway.answers[late].rejected.status == 503  # type: ignore[union-attr]
        await gateway.until(lambda: gateway.answers[handed].failed)
        answer = await gateway.finished(running)
        assert len(answer.tokens[0]) == 150
        assert await asyncio.to_thread(cluster.programs.processes[1].wait, 10) == 0
        cluster.programs.processes[0].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(cluster.programs.processes[0].wait, 10) == 0

    run(tmp_path, model, "unix", steps)


def test_a_worker_started_by_hand_outlives_its_input(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        worker = await cluster.start("mixed", supervised=False, peer_address="")
        supervised = await cluster.start("decode", peer_address="")
        for process in cluster.programs.processes:
            assert process.stdin is not None
            process.stdin.close()
        assert await asyncio.to_thread(cluster.programs.processes[1].wait, 10) == 0
        await cluster.gateway.until(lambda: not supervised.is_open)
        assert (await cluster.alone(worker, LONG[:9], params())).finish == {0: "length"}

    run(tmp_path, model, "unix", steps)


def test_cancelling_frees_both_sides_whenever_it_comes(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        prefill, decode = await cluster.pair()
        for attempt in range(14):
            request = gateway.submit(prefill, LONG, params(100), decode=decode)
            await asyncio.sleep(0.002 * attempt)
            gateway.cancel(request, prefill, decode)
        await gateway.idle(prefill, decode)
        request = gateway.submit(prefill, LONG, params(), decode=decode)
        await gateway.finished(request)

    run(tmp_path, model, "unix", steps)


def test_a_request_that_fits_nowhere_is_refused(tmp_path: Path, model: Path) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        prefill, decode = await cluster.pair()
        request = gateway.submit(prefill, LONG * 3, params(), decode=decode)
        await gateway.until(lambda: gateway.answers[request].rejected)
        await gateway.idle(prefill, decode)

    run(tmp_path, model, "unix", steps)


async def after_the_fault(cluster: Cluster, survivors: list[JoinedWorker], request: int) -> None:
    """The request ends, nothing is held, and the next request is served."""
    gateway = cluster.gateway
    answer = gateway.answers[request]
    await gateway.until(
        lambda: answer.failed or answer.is_done() or not all(link.is_open for link in gateway.links)
    )
    # As a gateway does when it gives an attempt up.
    gateway.cancel(request, *survivors)
    await gateway.idle(*survivors)
    for worker in survivors:
        assert (await cluster.alone(worker, LONG[:50], params())).finish == {0: "length"}


FAULT_CASES = [
    ("sender", "kill", "sender.before_commit"),
    ("sender", "stop", "sender.chunk_ready"),
    ("sender", "cut", "sender.after_ticket"),
    ("receiver", "kill", "receiver.reading"),
    ("receiver", "stop", "receiver.before_adopt"),
    ("receiver", "cut", "receiver.commit"),
]
"""Of the default tests; the slow ones have all points and actions."""


def fault_scenario(side: str, action: str, point: str) -> Callable[[Cluster], Awaitable[None]]:
    async def steps(cluster: Cluster) -> None:
        gateway = cluster.gateway
        fault = f"{point}={action}"
        roles = {"sender": "prefill", "receiver": "decode"}
        workers = {}
        for name, role in roles.items():
            settings: dict[str, object] = {"faults": fault} if name == side else {}
            if name == side and point == "receiver.waiting":
                settings |= {"kv_cache_bytes": 9 * BYTES_PER_BLOCK, "max_model_len": 288}
            cluster.programs.start(role, **settings)  # type: ignore[arg-type]
        for process, (name, role) in zip(cluster.programs.processes, roles.items(), strict=True):
            workers[name] = await gateway.ready(role, process.pid)  # type: ignore[arg-type]
        number = list(roles).index(side)
        process = cluster.programs.processes[number]
        request = gateway.submit(workers["sender"], LONG, params(60), decode=workers["receiver"])
        if point == "receiver.waiting":
            # The first one has taken most of the room.
            first, other = request, LONG[::-1]
            request = gateway.submit(
                workers["sender"], other, params(60), decode=workers["receiver"]
            )
        await asyncio.to_thread(_until_hit, cluster.programs, number)
        if point == "receiver.waiting":
            gateway.cancel(first, *workers.values())
        survivors = [worker for name, worker in workers.items() if name != side]
        if action == "cut":
            survivors = list(workers.values())
        elif action == "stop":
            await after_stop(cluster, workers[side], survivors, request)
            os.kill(process.pid, signal.SIGCONT)
            survivors = list(workers.values())
        await after_the_fault(cluster, survivors, request)
        if action != "kill":
            again = gateway.submit(workers["sender"], LONG, params(20), decode=workers["receiver"])
            await gateway.finished(again)
            await gateway.idle(*survivors)

    return steps


async def after_stop(
    cluster: Cluster, frozen: JoinedWorker, survivors: list[JoinedWorker], request: int
) -> None:
    """A frozen worker is given up after its lease; what was held for it is free."""
    gateway, answer = cluster.gateway, cluster.gateway.answers[request]
    with suppress(TimeoutError):
        await gateway.until(lambda: answer.failed or answer.is_done(), 4)
    if not answer.failed and not answer.is_done():
        # No other worker waits for it yet; the gateway sees that its counter stands still.
        num_signs = len(frozen.alive_steps)
        await asyncio.sleep(1.5)
        assert len(frozen.alive_steps) == num_signs
        gateway.cancel(request, *survivors)
    await gateway.idle(*survivors)
    await asyncio.sleep(1.0)


def _until_hit(programs: WorkerPrograms, number: int) -> None:
    deadline_s = time.monotonic() + 15
    while not programs.fault_hits(number):
        assert time.monotonic() < deadline_s, "the fault point was not reached"
        time.sleep(0.01)


@pytest.mark.parametrize(("side", "action", "point"), FAULT_CASES, ids=lambda case: case)
def test_a_lost_part_leaves_nothing_behind(
    tmp_path: Path, model: Path, side: str, action: str, point: str
) -> None:
    run(tmp_path, model, "unix", fault_scenario(side, action, point))


ALL_CASES = [
    (point.partition(".")[0], action, point)
    for point in FAULT_POINTS
    for action in ("kill", "stop", "cut")
    if point.startswith(("sender.", "receiver."))
]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp", "nixl"])
@pytest.mark.parametrize(("side", "action", "point"), ALL_CASES, ids=lambda case: case)
def test_every_fault_at_every_point_leaves_nothing_behind(
    tmp_path: Path, model: Path, transport: str, side: str, action: str, point: str
) -> None:
    run(tmp_path, model, transport, fault_scenario(side, action, point))


PULL_CASES = [
    (point, action)
    for point in FAULT_POINTS
    for action in ("kill", "stop", "cut")
    if point.startswith(("pull.", "holder."))
]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp", "nixl"])
@pytest.mark.parametrize(("point", "action"), PULL_CASES, ids=lambda case: case)
def test_a_pull_that_fails_costs_time_and_nothing_else(
    tmp_path: Path, model: Path, transport: str, point: str, action: str
) -> None:
    async def steps(cluster: Cluster) -> None:
        gateway, fault = cluster.gateway, f"{point}={action}"
        holder_fails = point.startswith("holder.")
        puller = await cluster.start("prefill", faults="" if holder_fails else fault)
        holder = await cluster.start("decode", faults=fault if holder_fails else "")
        expected = await cluster.alone(holder, LONG, params())
        pull = PrefixPull(peer_of(holder), 6)
        request = gateway.submit(puller, LONG, params(), pull=pull)
        number = 1 if holder_fails else 0
        await asyncio.to_thread(_until_hit, cluster.programs, number)
        if holder_fails or action == "cut":
            answer = await gateway.finished(request)
            assert answer.tokens == expected.tokens
            survivors = [puller] if action != "cut" else [puller, holder]
        else:
            survivors = [holder]
        await gateway.idle(*survivors)

    run(tmp_path, model, transport, steps)
