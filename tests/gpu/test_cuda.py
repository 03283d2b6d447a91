"""What only a GPU can show: the torch path there against the reference on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.default_head import random_default_head
from support.default_model import default_model_path
from support.real_prompts import real_prompts
from support.token_streams import params, streams
from support.two_engines import real_engine
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.engine.torch_runner import load_torch_runner
from twinfire.kernels.torch.sampling import TorchSamplingOps
from twinfire.protocol.messages import Submit
from twinfire.protocol.speculation import parse_speculation
from twinfire.protocol.tokens import pack_ids
from twinfire.worker.speculation import wants_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
MAX_TOKENS = 48


def answers(device: str, dtype: str, speculate: str = "off") -> list[list[int]]:
    checkpoint = open_checkpoint(default_model_path())
    drafts = wants_head(parse_speculation(speculate))
    head = random_default_head(checkpoint) if drafts else None
    runner = load_torch_runner(
        checkpoint.config,
        checkpoint.weights,
        dtype=dtype,
        num_threads=1,
        progress=lambda *_: None,
        device=device,
        head=head,
    )
    engine, _ = real_engine(
        runner,
        TorchSamplingOps(),
        num_blocks=60,
        num_batched_tokens=96,
        max_model_len=512,
        speculate=speculate,
    )
    prompts = real_prompts(checkpoint.tokenizer(), [28, 130, 63, 200, 31])
    for index, prompt in enumerate(prompts):
        engine.submit("g", Submit(index, pack_ids(prompt), params(index, MAX_TOKENS)))
    return streams(engine, len(prompts))


def agreement(first: list[list[int]], second: list[list[int]]) -> float:
    """The mean share of tokens up to where two streams part."""
    return float(
        np.mean(
            [
                next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
                / len(a)
                for a, b in zip(first, second, strict=True)
            ]
        )
    )


def test_float32_on_the_gpu_says_what_the_cpu_reference_says() -> None:
    assert agreement(answers("cuda", "f32"), answers("cpu", "f32")) > 0.9


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_stays_near_the_reference(dtype: str) -> None:
    assert agreement(answers("cuda", dtype), answers("cpu", "f32")) > 0.3


@pytest.mark.parametrize("method", ["suffix", "eagle3", "hybrid"])
def test_drafts_hardly_change_a_token_in_float32(method: str) -> None:
    """Batches of other sizes may differ in the last bit there: near ties fall otherwise."""
    drafted = answers("cuda", "f32", f"{method}:adaptive=false")
    assert agreement(drafted, answers("cuda", "f32")) > 0.9
