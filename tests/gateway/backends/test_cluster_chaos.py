"""Many requests over workers that fail at random: right streams or honest errors."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from support.unreliable_worker import Dice, World, expected_tokens
from support.worker_pool import Consumer, until, worker_pool
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.protocol.errors import DeadlineExceeded, Overloaded, WorkerLost

NUM_REQUESTS = 150
SETTINGS = RoutingSettings(no_worker_wait_s=2.0, max_prefill_queue_s=60.0)


@pytest.mark.parametrize("seed", range(4))
def test_no_token_is_wrong_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)
        dice = Dice(chance, dies=0.015, refuses=0.03, fails_hand_off=0.1, preempts=0.01)
        async with worker_pool(tmp_path, settings=SETTINGS) as pool:
            world = World(pool, dice)
            for role in ("prefill", "prefill", "decode", "decode", "mixed"):
                await world.spawn(role)  # type: ignore[arg-type]
            await until(lambda: len(pool.backend.registry) == 5)
            asked: list[tuple[Consumer, list[int], int, int]] = []
            for number in range(NUM_REQUESTS):
                length = chance.choice((3, 40, 700))
                prompt = [(number * 17 + i) % 900 for i in range(length)]
                n, max_tokens = chance.randint(1, 3), chance.randint(1, 60)
                policy = chance.choice(("always", "never", None))
                consumer = pool.submit(
                    prompt, n=n, max_tokens=max_tokens, policy=policy, deadline_s=20
                )
                asked.append((consumer, prompt, n, max_tokens))
                if chance.random() < 0.1:
                    loop = asyncio.get_running_loop()
                    loop.call_later(0.03 * chance.random(), consumer.generation.cancel)
                await asyncio.sleep(0.004 * chance.random())
            num_whole = 0
            for consumer, prompt, n, max_tokens in asked:
                async with asyncio.timeout(25):
                    await consumer.task
                for choice in range(n):
                    tokens = consumer.tokens(choice)
                    assert tokens == expected_tokens(prompt, choice, max_tokens)[: len(tokens)]
                if consumer.error is not None:
                    assert isinstance(consumer.error, WorkerLost | Overloaded)
                    assert not isinstance(consumer.error, DeadlineExceeded)
                elif all(consumer.finish(choice) for choice in range(n)):
                    assert len(consumer.prompts) == 1
                    assert all(len(consumer.tokens(i)) == max_tokens for i in range(n))
                    num_whole += 1
            assert num_whole >= NUM_REQUESTS // 2
            pool.assert_idle()
            tallies = pool.backend.tallies
            assert min(tallies.num_resumes, tallies.num_hand_overs) > 0
            assert min(tallies.failures["worker_lost"], tallies.failures["hand_off"]) > 0
            world.close()

    asyncio.run(scenario())
