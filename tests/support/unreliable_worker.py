"""A scripted worker that serves by itself: tokens follow from the context, faults from dice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.scripted_worker import ScriptedWorker, scripted_info
from support.worker_pool import SECRET, PoolWithListener
from twinfire.protocol.messages import (
    ALL_CHOICES,
    Cancel,
    ChoiceDelta,
    HandOffFailed,
    Preempted,
    PrefillProgress,
    PromptDone,
    Rejected,
    Reserve,
    Reserved,
    Role,
    Submit,
)
from twinfire.protocol.tokens import pack_ids, unpack_ids


def next_token(context: Sequence[int], choice: int) -> int:
    """What any worker draws after `context`."""
    return (sum(context[-3:]) * 31 + len(context) * 7 + choice * 101) % 900


def expected_tokens(prompt: Sequence[int], choice: int, max_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, choice))
    return context[len(prompt) :]


@dataclass
class Dice:
    """How often what goes wrong."""

    random: random.Random
    dies: float = 0.0
    """Chance per step."""
    refuses: float = 0.0
    """Chance per request."""
    fails_hand_off: float = 0.0
    preempts: float = 0.0
    """Chance per step and choice."""

    def falls(self, chance: float) -> bool:
        return self.random.random() < chance


@dataclass
class World:
    """Who is there to hand prompts to."""

    pool: PoolWithListener
    dice: Dice
    workers: dict[str, UnreliableWorker] = field(default_factory=dict)
    num_lives: int = 0

    async def spawn(self, role: Role) -> None:
        self.num_lives += 1
        name = f"{role}-{self.num_lives}"
        link = await ScriptedWorker.join(self.pool.address, scripted_info(name, role), SECRET)
        self.workers[name] = UnreliableWorker(self, link, role)

    def close(self) -> None:
        for worker in list(self.workers.values()):
            worker.end()


class UnreliableWorker:
    """One life of a worker. When it dies, another one joins."""

    def __init__(self, world: World, link: ScriptedWorker, role: Role) -> None:
        self.link = link
        self.reserves: dict[int, Reserve] = {}
        self._world = world
        self._role = role
        self._live: dict[int, dict[int, list[int]]] = {}
        """By request and choice: the context so far."""
        self._limits: dict[int, int] = {}
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._decode())]

    def end(self) -> None:
        self.link.die()
        for task in self._tasks:
            task.cancel()
        self._world.workers.pop(self.link.info.instance_id, None)

    async def _die(self) -> None:
        world = self._world
        self.link.die()
        del world.workers[self.link.info.instance_id]
        await asyncio.sleep(0.02)
        await world.spawn(self._role)

    async def _listen(self) -> None:
        while True:
            while not self.link.unread:
                if self.link.closed.is_set():
                    return
                await asyncio.sleep(0.001)
            message = await self.link.next()
            match message:
                case Submit():
                    self._tasks.append(asyncio.create_task(self._submit(message)))
                case Reserve(submit):
                    self.reserves[submit.request_id] = message
                    self.link.say(Reserved(submit.request_id, submit.attempt, 0))
                case Cancel(request_id, choice):
                    self.reserves.pop(request_id, None)
                    live = self._live.get(request_id, {})
                    for one in list(live) if choice == ALL_CHOICES else [choice]:
                        live.pop(one, None)

    async def _submit(self, submit: Submit) -> None:
        dice, request_id = self._world.dice, submit.request_id
        if dice.falls(dice.refuses):
            status = dice.random.choice((429, 503))
            self.link.say(Rejected(request_id, "not now", status=status))
            return
        await asyncio.sleep(0.002 * dice.random.random())
        half = len(submit.prompt) // 8
        self.link.say_step(progress=[PrefillProgress(request_id, half)])
        await asyncio.sleep(0.002 * dice.random.random())
        if submit.hand_off is None:
            self._accept(submit)
            return
        decode = self._world.workers.get(submit.hand_off.decode.instance_id)
        if decode is None or dice.falls(dice.fails_hand_off):
            self.link.say(HandOffFailed(request_id, submit.attempt, "no way to the peer"))
        elif request_id in decode.reserves:
            if dice.falls(dice.fails_hand_off):
                decode.link.say(HandOffFailed(request_id, submit.attempt, "stale blocks"))
            else:
                decode._accept(submit)

    def _accept(self, submit: Submit) -> None:
        prompt = list(unpack_ids(submit.prompt))
        choices = submit.choices or tuple(range(submit.sampling.n))
        outputs = submit.outputs or (b"",) * len(choices)
        self._live[submit.request_id] = {
            choice: prompt + list(unpack_ids(output))
            for choice, output in zip(choices, outputs, strict=True)
        }
        self._limits[submit.request_id] = len(prompt) + submit.sampling.max_tokens
        done = PromptDone(submit.request_id, 0, 0.0, 0.0)
        self.link.say_step(prompts=[done], deltas=self._step(submit.request_id))

    def _step(self, request_id: int) -> list[ChoiceDelta]:
        deltas = []
        for choice, context in list(self._live[request_id].items()):
            token = next_token(context, choice)
            context.append(token)
            ends = len(context) >= self._limits[request_id]
            if ends:
                del self._live[request_id][choice]
            finish = "length" if ends else None
            deltas.append(ChoiceDelta(request_id, choice, pack_ids([token]), finish))
        return deltas

    async def _decode(self) -> None:
        dice = self._world.dice
        while not self.link.closed.is_set():
            await asyncio.sleep(0.001)
            if any(self._live.values()) or self.reserves:
                if dice.falls(dice.dies):
                    await self._die()
                    return
                preempted = [
                    Preempted(request_id, choice, len(context))
                    for request_id, live in self._live.items()
                    for choice, context in live.items()
                    if dice.falls(dice.preempts)
                ]
                deltas = [one for request in list(self._live) for one in self._step(request)]
                self.link.say_step(deltas=deltas, preempted=preempted)
