"""One cell of the chaos matrix: who is lost, how, and in which state; and what must hold after.

Workers: one that is armed with a fault point, and a steady one that does the other stage. Requests
before, beside and after the loss are compared with what one undisturbed worker answers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
from collections.abc import Awaitable
from typing import Any, Literal

import aiohttp

from support.chaos_site import DEADLINE_S, LEASE_S, MODEL, Gateway, Program, Site
from support.completion_client import Answer, complete
from twinfire.protocol.messages import Role
from twinfire.transfer.fault_points import FAULT_POINTS

Loss = Literal["kill", "stop", "cut"]
LOSSES: tuple[Loss, ...] = ("kill", "stop", "cut")
STOPPED_S = LEASE_S + 1.0
HELD_UP_S = 0.8
"""How long a worker stays at a fault point, for others to be lost meanwhile."""
FULL_AT_ONCE = {"kv_cache_bytes": 20 * 8192, "max_model_len": 512}
"""Settings of a worker that has room for one of two prompts."""
VICTIM_PROMPT = 420
PULLED_PROMPT = 800
"""So long that reading its blocks pays."""
OTHER_STAGE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


def armed_role(point: str) -> Role:
    """Return the role of the worker that passes a fault point."""
    return "decode" if point.startswith(("receiver.", "holder.", "decode.")) else "prefill"


def workers_points() -> list[str]:
    """Return every fault point of workers."""
    return list(FAULT_POINTS)


class ChaosCell:
    """Runs cells one after the other on one site."""

    def __init__(self, site: Site, reference_url: str) -> None:
        self.site = site
        self._reference_url = reference_url
        self._numbers = itertools.count()
        self._steady: Program | None = None

    async def lose_worker(self, point: str, loss: Loss) -> None:
        """Kill, freeze for longer than a lease, or cut off a worker at a fault point."""
        site = self.site
        a, b = site.gateways
        armed, steady = await self._workers(point, f"{point}={loss}")
        answers = [asyncio.create_task(ask) for ask in self._asks(point, a, b)]
        await armed.until_fault(point, loss)
        if loss == "kill":
            await asyncio.to_thread(armed.process.wait, 10)
        elif loss == "stop":
            await asyncio.sleep(STOPPED_S)
            armed.signal(signal.SIGCONT)
        for problem in await asyncio.wait_for(asyncio.gather(*answers), DEADLINE_S):
            assert problem is None, problem
        await self._all_is_well([steady] if loss == "kill" else [armed, steady])

    async def lose_gateway(self, point: str, loss: Loss) -> None:
        """The same of a gateway, while a worker of its request is at a fault point."""
        site = self.site
        a, b = site.gateways
        armed, steady = await self._workers(point, f"{point}=delay:{HELD_UP_S}@1")
        asks = self._asks(point, a, b, victim_only=loss != "stop")
        first = [asyncio.create_task(ask) for ask in asks]
        await armed.until_fault(point, "delay")
        others = [asyncio.create_task(self._compare(b, self._body(60), DEADLINE_S))]
        if loss == "kill":
            a.program.kill()
        elif loss == "stop":
            a.program.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            a.program.signal(signal.SIGCONT)
        else:
            site.relay.cut()
        for problem in await asyncio.wait_for(asyncio.gather(*first, *others), DEADLINE_S):
            assert problem is None, problem
        if loss == "kill":
            a.start()
        await self._all_is_well([armed, steady])

    async def lose_client(self, point: str) -> None:
        """A client leaves while a worker of its request is at a fault point."""
        site = self.site
        a, b = site.gateways
        armed, steady = await self._workers(point, f"{point}=delay:0.3@1")
        leaving = [asyncio.create_task(ask) for ask in self._asks(point, a, b, victim_only=True)]
        await armed.until_fault(point, "delay")
        for task in leaving:
            task.cancel()
        other = await self._compare(b, self._body(60), DEADLINE_S)
        assert other is None, other
        await self._all_is_well([armed, steady])

    async def slow_worker(self, point: str, delay_s: float) -> None:
        """A worker that takes its time whenever it passes a fault point."""
        a, b = self.site.gateways
        armed, steady = await self._workers(point, f"{point}=delay:{delay_s}")
        asks = [ask for _ in range(3) for ask in self._asks(point, a, b)]
        for problem in await asyncio.wait_for(asyncio.gather(*asks), DEADLINE_S):
            assert problem is None, problem
        await armed.until_fault(point, "delay", 0)
        await self._all_is_well([armed, steady])

    async def full_worker(self) -> None:
        """Many more prompts at once than a decode worker has room for."""
        a, b = self.site.gateways
        armed, steady = await self._workers("receiver.waiting", "receiver.waiting=delay:0")
        asks = [
            self._compare(gateway, self._body(300, max_tokens=60), DEADLINE_S)
            for _ in range(6)
            for gateway in (a, b)
        ]
        for problem in await asyncio.wait_for(asyncio.gather(*asks), DEADLINE_S):
            assert problem is None, problem
        await armed.until_fault("receiver.waiting", "delay", 0)
        await self._all_is_well([armed, steady])

    async def too_long_prompt(self) -> None:
        """One that fits no worker is refused; one that fits the prefill worker alone is served."""
        a, _ = self.site.gateways
        armed, steady = await self._workers("receiver.waiting", "")
        answer = await self.site.complete(a, self._body(3000))
        assert (answer.status, answer.is_whole) == (400, True), answer
        problem = await self._compare(a, self._body(1200), DEADLINE_S)
        assert problem is None, problem
        await self._all_is_well([armed, steady])

    async def session_on_new_workers(self) -> None:
        """Each turn of a session is served by a worker that has never seen it, from others' KV."""
        site, cached = self.site, [-1]
        gateway = site.gateways[0]
        first, steady = await self._workers("sender.queued", "")
        prompt = self._body(700)["prompt"]

        async def turn() -> None:
            nonlocal prompt
            body = self._body(40, max_tokens=40)
            body["prompt"] = prompt = [*prompt, *body["prompt"]]
            headers = {"x-session-affinity": "the-session"}
            answer = await site.complete(gateway, body, headers=headers)
            assert answer.difference(await self._reference(body)) is None
            assert answer.cached_tokens > cached[-1], (cached, answer.cached_tokens)
            cached.append(answer.cached_tokens)
            prompt = [*prompt, *answer.tokens[0]]

        await turn()
        await turn()
        pulled = await site.counter(gateway, "pulled_tokens")
        await self._remove(first)
        second = site.worker("prefill", place=1)
        await site.joined(second, steady)
        await turn()
        assert await site.counter(gateway, "pulled_tokens") > pulled
        third = site.worker("decode", place=2)
        await site.joined(second, steady, third)
        # What the session knows computes prompts now, so that another one has to decode.
        await site.set_role(steady, "prefill")
        await turn()
        await site.nothing_is_held()
        await asyncio.to_thread(third.kill)
        await self._remove(second)

    async def _workers(self, point: str, faults: str) -> tuple[Program, Program]:
        """Return the armed worker and the steady one, both joined, in the state that is needed."""
        site, role = self.site, armed_role(point)
        settings = FULL_AT_ONCE if point == "receiver.waiting" else {}
        if point.startswith("holder."):
            # The armed worker has computed what another one, that is new, will pull.
            await self._remove(self._steady)
            armed = site.worker(role, place=1, faults=faults, **settings)
            await site.joined(armed)
            await self._warm_up()
            self._steady = site.worker(OTHER_STAGE[role], place=0)
        else:
            if self._steady is None or not self._steady.is_running:
                self._steady = site.worker(OTHER_STAGE[role], place=0)
            await site.joined(self._steady)
            await site.set_role(self._steady, OTHER_STAGE[role])
            if point.startswith("pull."):
                await self._warm_up()
            armed = site.worker(role, place=1, faults=faults, **settings)
        await site.joined(armed, self._steady)
        return armed, self._steady

    async def _warm_up(self) -> None:
        """Have the only worker compute the victim's prompt."""
        self._warm = self._body(PULLED_PROMPT)
        problem = await self._compare(self.site.gateways[0], self._warm, DEADLINE_S)
        assert problem is None, problem

    def _asks(
        self, point: str, a: Gateway, b: Gateway, *, victim_only: bool = False
    ) -> list[Awaitable[str | None]]:
        """Return the requests of a cell, the one that the fault is for first."""
        victim = self._body(VICTIM_PROMPT, max_tokens=40, stream=True)
        if point.startswith(("pull.", "holder.")):
            victim["prompt"] = [*self._warm["prompt"], *victim["prompt"][:20]]
        bound = self._begin if victim_only else self._compare
        asks = [bound(a, victim, DEADLINE_S)]
        if point == "receiver.waiting":
            # Two gateways, since one of them would keep its second request in its own queue.
            asks.append(self._compare(b, self._body(VICTIM_PROMPT), DEADLINE_S))
        elif not victim_only:
            asks.append(self._compare(b, self._body(200, n=2, stream=True), DEADLINE_S))
            asks.append(self._compare(a, self._body(40), DEADLINE_S))
        return asks

    async def _compare(self, gateway: Gateway, body: dict[str, Any], limit_s: float) -> str | None:
        """Return how an answer differs from the reference, None when in nothing."""
        answer, expected = await self._ask(gateway, body, limit_s)
        return answer.difference(expected)

    async def _begin(self, gateway: Gateway, body: dict[str, Any], limit_s: float) -> str | None:
        """The same of an answer whose gateway may be lost: it may end early, but not wrongly."""
        answer, expected = await self._ask(gateway, body, limit_s)
        if answer.is_good:
            return answer.difference(expected)
        if answer.error is None and answer.status == 200:
            return f"an answer without an error that is not whole: {answer}"
        if answer.is_whole and answer.status not in (200, 503, 504):
            return f"status {answer.status}: {answer.error}"
        return answer.wrong_token(expected)

    async def _ask(
        self, gateway: Gateway, body: dict[str, Any], limit_s: float
    ) -> tuple[Answer, Answer]:
        answer, expected = await asyncio.gather(
            asyncio.wait_for(self.site.complete(gateway, body), limit_s),
            self._reference(body),
        )
        return answer, expected

    async def _reference(self, body: dict[str, Any]) -> Answer:
        session: aiohttp.ClientSession = self.site.session
        answer = await complete(session, self._reference_url, {"model": MODEL, **body})
        assert answer.is_good, answer
        return answer

    async def _all_is_well(self, workers: list[Program]) -> None:
        """Nothing is held, and requests are served: by those that are left, then by one."""
        site = self.site
        await site.joined(*workers)
        await site.nothing_is_held()
        for gateway in site.gateways:
            problem = await self._compare(gateway, self._body(100), DEADLINE_S)
            assert problem is None, problem
        await site.nothing_is_held()
        for worker in workers:
            if worker is not self._steady:
                await self._remove(worker)

    async def _remove(self, worker: Program | None) -> None:
        if worker is not None:
            await asyncio.to_thread(worker.kill)
            left = [self._steady] if self._steady not in (None, worker) else []
            await self.site.joined(*[one for one in left if one is not None])

    def _body(self, num_tokens: int, **options: Any) -> dict[str, Any]:
        """Return a request that nobody has seen before."""
        number = next(self._numbers)
        choose = random.Random(number)
        prompt = [choose.randrange(3, 259) for _ in range(num_tokens)]
        return {
            "prompt": prompt,
            "max_tokens": 20,
            "seed": number,
            "ignore_eos": True,
            **options,
        }
