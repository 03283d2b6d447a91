"""Embeddings of the engine over real runners, compared with transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.native_runners import load_native
from support.numpy_sampling_ops import NumpySamplingOps
from support.step_batches import load
from support.tiny_models import ArrayWeights, TinyModel, tiny_model
from twinfire.engine.engine import Engine
from twinfire.engine.runner import Runner
from twinfire.engine.sampler import Sampler
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import PromptDone, Submit
from twinfire.protocol.pooling import Pooling
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig

MODELS: list[tuple[str, Pooling]] = [("qwen3", "last"), ("llama", "mean")]


def embedding_engine(runner: Runner, num_blocks: int = 32, budget: int = 64) -> Engine:
    runner.init_kv(num_blocks)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        hash_seed=b"1",
    )
    return Engine(Scheduler(config), runner, Sampler(NumpySamplingOps()), embeds=True)


def without_head(model: TinyModel) -> ArrayWeights:
    arrays = {name: array for name, array in model.weights.arrays.items() if "lm_head" not in name}
    return ArrayWeights(arrays)


def embed(engine: Engine, prompts: list[list[int]], pooling: Pooling) -> list[PromptDone]:
    sampling = SamplingParams(max_tokens=0, seed=0, pooling=pooling)
    for index, prompt in enumerate(prompts):
        engine.submit("g", Submit(index, pack_ids(prompt), sampling))
    done: dict[int, PromptDone] = {}
    while engine.has_work:
        output = engine.step().get("g")
        for report in output.prompts if output else ():
            done[report.request_id] = report
    engine.check_integrity()
    return [done[index] for index in range(len(prompts))]


def reference(model: TinyModel, prompt: list[int], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        states = model.reference.model(torch.tensor([prompt])).last_hidden_state[0]
    return (states[-1] if pooling == "last" else states.mean(dim=0)).float().numpy()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(0, 131, length).tolist() for length in lengths]


def vector(report: PromptDone) -> np.ndarray:
    return np.frombuffer(report.embedding, "<f4")


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(("name", "pooling"), MODELS)
def test_parity_with_transformers(name: str, pooling: Pooling) -> None:
    model = tiny_model(name)
    config = replace(model.config, pooling=pooling)
    engine = embedding_engine(load(config, without_head(model)))
    # Batched, and longer than a step's budget, so that prompts come in chunks.
    prompts = prompts_of([1, 40, 7, 200, 64, 33])
    for prompt, report in zip(prompts, embed(engine, prompts, pooling), strict=True):
        difference = vector(report) - reference(model, prompt, pooling)
        assert float(np.abs(difference).max()) < 1e-4


@pytest.mark.parametrize(("name", "pooling"), MODELS)
def test_native_runner_is_close(name: str, pooling: Pooling) -> None:
    model = tiny_model(name)
    config = replace(model.config, pooling=pooling)
    runner = load_native(config, without_head(model), "none")
    prompts = prompts_of([1, 40, 200])
    for prompt, report in zip(
        prompts, embed(embedding_engine(runner), prompts, pooling), strict=True
    ):
        assert cosine(vector(report), reference(model, prompt, pooling)) > 0.999


@pytest.mark.parametrize(("name", "pooling"), MODELS)
def test_second_time_is_the_same(name: str, pooling: Pooling) -> None:
    model = tiny_model(name)
    engine = embedding_engine(load(replace(model.config, pooling=pooling), without_head(model)))
    prompts = prompts_of([100])
    (first,) = embed(engine, prompts, pooling)
    (again,) = embed(engine, prompts, pooling)
    assert again.embedding == first.embedding
    assert again.cached_tokens == (96 if pooling == "last" else 0), "a mean needs every state"


@pytest.mark.parametrize(("name", "pooling"), MODELS)
def test_preempted_prompts_are_pooled_once(name: str, pooling: Pooling) -> None:
    model = tiny_model(name)
    config = replace(model.config, pooling=pooling)
    prompts = prompts_of([150, 150, 150])
    engine = embedding_engine(load(config, without_head(model)), num_blocks=7, budget=32)
    for prompt, report in zip(prompts, embed(engine, prompts, pooling), strict=True):
        difference = vector(report) - reference(model, prompt, pooling)
        assert float(np.abs(difference).max()) < 1e-4


def test_tasks_do_not_mix() -> None:
    model = tiny_model("llama")
    engine = embedding_engine(load(replace(model.config, pooling="mean"), without_head(model)))
    with pytest.raises(InvalidRequest, match="embeds texts"):
        engine.submit("g", Submit(0, pack_ids([1]), SamplingParams(max_tokens=4, seed=0)))
    sampling = SamplingParams(max_tokens=4, seed=0, pooling="mean")
    with pytest.raises(InvalidRequest, match="no output"):
        engine.submit("g", Submit(0, pack_ids([1]), sampling))
    runner = load(model.config, model.weights)
    runner.init_kv(8)
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64))
    generating = Engine(scheduler, runner, Sampler(NumpySamplingOps()))
    sampling = SamplingParams(max_tokens=0, seed=0, pooling="mean")
    with pytest.raises(InvalidRequest, match="generates text"):
        generating.submit("g", Submit(0, pack_ids([1]), sampling))
