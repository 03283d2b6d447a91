"""The default model with drafts and without: the same tokens, over chunks, preemption and forks."""

from __future__ import annotations

from array import array

import pytest

from support.default_head import random_default_head
from support.default_model import default_model_path
from support.native_runners import load_native
from support.real_prompts import real_prompts
from support.token_streams import params, streams
from support.two_engines import real_engine
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.shipped_heads import find_shipped_head, resolve_draft_head
from twinfire.engine.engine import Engine
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.protocol.messages import Submit
from twinfire.protocol.speculation import parse_speculation
from twinfire.protocol.tokens import pack_ids
from twinfire.worker.speculation import wants_head

METHODS = [
    "ngram:adaptive=false",
    "suffix:adaptive=false",
    "eagle3:adaptive=false",
    "hybrid:adaptive=false",
    "hybrid",
]


def engine(
    speculate: str, quantization: str, *, num_blocks: int, num_threads: int, max_model_len: int
) -> Engine:
    """An engine of little memory and small steps: prompts are cut, streams preempted."""
    checkpoint = open_checkpoint(default_model_path())
    options = parse_speculation(speculate)
    head = None
    if wants_head(options):
        shipped = find_shipped_head(checkpoint) is not None
        head = resolve_draft_head(None, checkpoint) if shipped else random_default_head(checkpoint)
    runner = load_native(
        checkpoint.config,
        checkpoint.weights,
        quantization,  # type: ignore[arg-type]
        num_threads=num_threads,
        head=head,
    )
    served, _ = real_engine(
        runner,
        NativeSamplingOps(),
        num_blocks=num_blocks,
        num_batched_tokens=96,
        max_model_len=max_model_len,
        speculate=speculate,
    )
    return served


def answers(served: Engine, prompts: list[array[int]], max_tokens: int) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        served.submit("g", Submit(index, pack_ids(prompt), params(index, max_tokens)))
    return streams(served, len(prompts))


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_drafts_change_no_token(quantization: str) -> None:
    tokenizer = open_checkpoint(default_model_path()).tokenizer()
    prompts = real_prompts(tokenizer, [28, 130, 63, 200, 31])
    limits = {"num_blocks": 14, "num_threads": 1, "max_model_len": 256}
    plain = answers(engine("off", quantization, **limits), prompts, 20)
    for method in METHODS:
        drafted = engine(method, quantization, **limits)
        assert answers(drafted, prompts, 20) == plain, method
        assert sum(drafted.load().drafted) > 0 or method == "hybrid"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_drafts_change_no_token_of_200_prompts_of_128_tokens(quantization: str) -> None:
    tokenizer = open_checkpoint(default_model_path()).tokenizer()
    prompts = real_prompts(tokenizer, [10 + i * 37 % 590 for i in range(200)])
    limits = {"num_blocks": 60, "num_threads": 1, "max_model_len": 1024}
    plain = answers(engine("off", quantization, **limits), prompts, 128)
    for method in METHODS:
        drafted = engine(method, quantization, **limits)
        assert answers(drafted, prompts, 128) == plain, method
        assert drafted.load().preemptions > 0, "nothing was preempted"
        assert sum(drafted.load().accepted) > 0, "nothing was accepted"
