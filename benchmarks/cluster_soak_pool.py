"""The requests of the cluster's soak: a pool that is asked again and again, with known answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import aiohttp

from support.completion_client import Answer, complete

FIRST_TEXT_ID = 3
NUM_TEXT_IDS = 256
LONGEST_PREFIX = 300


def request_pool(size: int, seed: int) -> list[dict[str, Any]]:
    """Return requests of every kind: lengths around a block's, choices, streams, seeds, limits."""
    choose = random.Random(seed)
    prefixes = [_ids(choose, choose.randint(40, LONGEST_PREFIX)) for _ in range(8)]
    pool = []
    for number in range(size):
        prompt = _ids(choose, choose.choice((1, 31, 32, 33, 64, 100, 200, 450)))
        if choose.random() < 0.4:
            prompt = choose.choice(prefixes) + prompt
        pool.append(
            {
                "prompt": prompt,
                "max_tokens": choose.choice((1, 2, 8, 32, 100)),
                "n": choose.choice((1, 1, 1, 2, 3)),
                "seed": number,
                "temperature": choose.choice((0.0, 0.7, 1.0)),
                "logprobs": choose.choice((None, None, 1)),
                "ignore_eos": choose.random() < 0.5,
                "stream": choose.random() < 0.6,
            }
        )
    return pool


async def reference_answers(
    session: aiohttp.ClientSession, url: str, pool: Sequence[dict[str, Any]]
) -> list[Answer]:
    """Return what one worker answers; AssertionError when it fails at one."""
    answers = []
    for body in pool:
        answer = await complete(session, url, body)
        assert answer.is_good, answer.error
        answers.append(answer)
    return answers


def _ids(choose: random.Random, count: int) -> list[int]:
    return [choose.randrange(FIRST_TEXT_ID, FIRST_TEXT_ID + NUM_TEXT_IDS) for _ in range(count)]
