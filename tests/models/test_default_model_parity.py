"""The default model against transformers on real prompts: the same greedy tokens."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from support.default_model import default_model_path
from support.real_prompts import real_prompts
from support.reference_model import llama_reference
from support.step_batches import Fed, load, make_batch
from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.engine.torch_runner import TorchRunner

NUM_OUTPUT_TOKENS = 24
CHUNK_TOKENS = 512
PROMPT_LENGTHS = np.geomspace(10, 3000, 20).astype(int).tolist()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(default_model_path())


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[array[int]]:
    return real_prompts(checkpoint.tokenizer(), PROMPT_LENGTHS)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    return llama_reference(checkpoint)


def greedy(runner: TorchRunner, prompt: array[int]) -> list[int]:
    fed, next_block = Fed(list(prompt)), [0]
    while len(fed.tokens) < len(prompt) + NUM_OUTPUT_TOKENS:
        count = min(CHUNK_TOKENS, len(fed.tokens) - fed.num_computed)
        runner.execute(make_batch([(fed, count)], next_block, every_row=False))
        if fed.num_computed == len(fed.tokens):
            fed.tokens.append(int(runner.logits(0, 1).argmax()))
    return fed.tokens[len(prompt) :]


@pytest.mark.timeout(3600)
def test_greedy_tokens_equal_transformers(
    checkpoint: Checkpoint, prompts: list[array[int]], reference: LlamaForCausalLM
) -> None:
    runner = load(checkpoint.config, checkpoint.weights, "f32", torch.get_num_threads())
    runner.init_kv(128)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            generated = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=NUM_OUTPUT_TOKENS,
                max_new_tokens=NUM_OUTPUT_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert greedy(runner, prompt) == generated[0, len(prompt) :].tolist(), len(prompt)


@pytest.mark.timeout(3600)
def test_bf16_leaves_float32_only_at_near_ties(
    checkpoint: Checkpoint, prompts: list[array[int]], reference: LlamaForCausalLM
) -> None:
    """Top tokens over whole prompts: nearly all agree, and where not the two were close."""
    runner = load(checkpoint.config, checkpoint.weights, "bf16", torch.get_num_threads())
    runner.init_kv(128)
    num_rows = num_agreed = 0
    for prompt in prompts[::3]:
        with torch.inference_mode():
            expected = reference(torch.tensor([list(prompt)])).logits[0].numpy()
        fed, next_block, rows = Fed(list(prompt)), [0], []
        while fed.num_computed < len(prompt):
            count = min(CHUNK_TOKENS, len(prompt) - fed.num_computed)
            batch = make_batch([(fed, count)], next_block)
            runner.execute(batch)
            rows.append(runner.logits(0, count).argmax(axis=1))
        drawn = np.concatenate(rows)
        best = expected.argmax(axis=1)
        at = np.arange(len(prompt))
        gaps = (expected[at, best] - expected[at, drawn])[drawn != best]
        assert gaps.max(initial=0.0) < 1.0
        num_rows += len(prompt)
        num_agreed += int((drawn == best).sum())
    assert num_agreed / num_rows > 0.95
