"""Real models: a stream that changes hands or is resumed has the bits of one engine's stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from support.default_model import default_model_path
from support.engines import Collected, Collector
from support.native_runners import load_native
from support.real_prompts import real_prompts
from support.tiny_models import TinyModel, tiny_model
from support.two_engines import GATEWAY, CountedRunner, TwoEngines, real_engine
from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.engine.engine import Engine
from twinfire.engine.runner import Runner
from twinfire.engine.torch_runner import load_torch_runner
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.kernels.torch.sampling import TorchSamplingOps
from twinfire.protocol.messages import Preempted, Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

BLOCK = 32
VOCAB = 131

MakeEngine = Callable[..., tuple[Engine, CountedRunner]]


@cache
def model() -> TinyModel:
    return tiny_model("llama")


def torch_f32() -> tuple[Runner, SamplingOps]:
    runner = load_torch_runner(
        model().config,
        model().weights,
        dtype="f32",
        num_threads=1,
        progress=lambda *_: None,
    )
    return runner, TorchSamplingOps()


def native_bf16() -> tuple[Runner, SamplingOps]:
    return load_native(model().config, model().weights), NativeSamplingOps()


def native_int8() -> tuple[Runner, SamplingOps]:
    runner = load_native(model().config, model().weights, "int8", kv_dtype="int8")
    return runner, NativeSamplingOps()


@pytest.fixture(params=[torch_f32, native_bf16, native_int8], ids=lambda load: load.__name__)
def make(request: pytest.FixtureRequest) -> MakeEngine:
    def make(**limits: int) -> tuple[Engine, CountedRunner]:
        return real_engine(*request.param(), **limits)

    return make


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def sampling(**kw: object) -> SamplingParams:
    defaults = {"max_tokens": 6, "seed": 11, "temperature": 0.9, "logprobs": 3, "top_p": 0.95}
    return SamplingParams(**{**defaults, **kw})  # type: ignore[arg-type]


def alone(
    make: MakeEngine, requests: list[tuple[list[int], SamplingParams]], **limits: int
) -> list[Collected]:
    engine, _ = make(**limits)
    collector = Collector(engine)
    for index, (prompt, params) in enumerate(requests):
        collector.submit(index, prompt, params)
        collector.run()
    return [collector.record("g", index) for index in range(len(requests))]


def warm(engine: Engine, prompt: list[int]) -> None:
    collector = Collector(engine)
    collector.submit(99, prompt, sampling(max_tokens=1))
    collector.run()


def assert_same(got: Collected, expected: Collected) -> None:
    assert got.answers == expected.answers
    assert got.prompt_logprobs == expected.prompt_logprobs


@dataclass(frozen=True)
class Shape:
    length: int
    warm_on_prefill: int = 0
    """Leading tokens that the prefill engine has computed for another request."""
    warm_on_decode: int = 0
    n: int = 1
    prompt_logprobs: int = -1
    temperature: float = 0.9

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self.length, *self.warmth, self.n))

    @property
    def warmth(self) -> tuple[int, int]:
        return self.warm_on_prefill, self.warm_on_decode


SHAPES = [
    Shape(1),
    Shape(BLOCK - 1, n=2),
    Shape(BLOCK, temperature=0.0),
    Shape(BLOCK + 1, n=3),
    Shape(2 * BLOCK),
    Shape(2 * BLOCK + 1, prompt_logprobs=2),
    Shape(100, n=4, temperature=0.0),
    Shape(100, warm_on_prefill=70),
    Shape(100, warm_on_decode=70, n=2),
    Shape(100, warm_on_prefill=40, warm_on_decode=96),
    Shape(3 * BLOCK, warm_on_prefill=3 * BLOCK, warm_on_decode=3 * BLOCK, n=2),
    Shape(3 * BLOCK + 1, warm_on_prefill=96, warm_on_decode=96, prompt_logprobs=0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_side_computes_its_part_and_the_stream_keeps_its_bits(
    make: MakeEngine, shape: Shape
) -> None:
    prompt = tokens_of(shape.length, shape.length)
    params = sampling(
        n=shape.n, prompt_logprobs=shape.prompt_logprobs, temperature=shape.temperature
    )
    pair = TwoEngines(make)
    for engine, length in zip((pair.prefill, pair.decode), shape.warmth, strict=True):
        if length:
            warm(engine, prompt[:length])
    before = pair.prefill_runner.num_tokens_computed, pair.decode_runner.num_tokens_computed
    assert pair.submit(1, prompt, params)
    pair.run()
    got = pair.collector.record(GATEWAY, 1)
    assert_same(got, alone(make, [(prompt, params)])[0])

    reads_cache = shape.prompt_logprobs < 0
    cached = [
        min(length, shape.length - 1) // BLOCK * BLOCK if reads_cache else 0
        for length in shape.warmth
    ]
    assert (got.cached_tokens, got.computed_tokens) == (cached[0], shape.length - cached[0])
    assert pair.prefill_runner.num_tokens_computed - before[0] == shape.length - cached[0]
    num_fed = sum(len(answer.tokens) - 1 for answer in got.answers.values())
    assert pair.decode_runner.num_tokens_computed - before[1] == num_fed
    assert pair.num_blocks_moved == -(-shape.length // BLOCK) - cached[1] // BLOCK


@pytest.mark.parametrize("n", [1, 3])
def test_a_first_token_that_ends_the_request_leaves_nothing(make: MakeEngine, n: int) -> None:
    prompt = tokens_of(5, 40)
    first = alone(make, [(prompt, sampling(n=n, max_tokens=1))])[0]
    ends = tuple(answer.tokens[0] for answer in first.answers.values())
    params = sampling(n=n, stop_token_ids=ends)
    pair = TwoEngines(make)
    assert pair.submit(1, prompt, params)
    pair.run()
    got = pair.collector.record(GATEWAY, 1)
    assert_same(got, alone(make, [(prompt, params)])[0])
    assert {answer.finish_reason for answer in got.answers.values()} == {"stop"}
    assert pair.decode_runner.num_tokens_computed == 0


def test_streams_preempted_on_the_decode_side_keep_their_bits(make: MakeEngine) -> None:
    requests = [
        (tokens_of(seed, 60), sampling(seed=seed, max_tokens=20, frequency_penalty=0.4))
        for seed in range(3)
    ]
    # Room for the three prompts, not for what they grow into.
    limits = {"num_blocks": 7, "max_model_len": 128}
    pair = TwoEngines(lambda: make(**limits))
    preempted: list[Preempted] = []
    heard = pair.collector.heard
    pair.collector.heard = lambda gateway, output: (  # type: ignore[method-assign]
        preempted.extend(output.preempted),
        heard(gateway, output),
    )[1]
    for index, (prompt, params) in enumerate(requests):
        assert pair.submit(index, prompt, params)
    pair.run()
    assert pair.decode.load().preemptions > 0
    assert len(preempted) == pair.decode.load().preemptions
    for index, expected in enumerate(alone(make, requests)):
        assert_same(pair.collector.record(GATEWAY, index), expected)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stream_cut_anywhere_and_resumed_is_the_whole_stream(
    make: MakeEngine, n: int, temperature: float
) -> None:
    prompt = tokens_of(n, 45)
    params = sampling(
        n=n,
        temperature=temperature,
        max_tokens=24,
        min_tokens=9,
        stop_token_ids=tuple(range(0, VOCAB, 9)),
        frequency_penalty=0.7,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        logprobs=-1,
    )
    whole = alone(make, [(prompt, params)])[0]
    engine, _ = make()
    draws = np.random.default_rng(n)
    for request_id in range(4):
        cuts = {
            choice: int(draws.integers(0, len(answer.tokens)))
            for choice, answer in whole.answers.items()
        }
        collector = Collector(engine)
        outputs = tuple(
            pack_ids(whole.answers[choice].tokens[:cut]) for choice, cut in cuts.items()
        )
        collector.submit(request_id, prompt, params, choices=tuple(cuts), outputs=outputs)
        collector.run()
        resumed = collector.record("g", request_id)
        assert resumed.num_prompt_reports == 1
        for choice, cut in cuts.items():
            expected, got = whole.answers[choice], resumed.answers[choice]
            assert got.tokens == expected.tokens[cut:]
            assert (got.finish_reason, got.stop_token_id) == (
                expected.finish_reason,
                expected.stop_token_id,
            )


def default_model_pair(checkpoint: Checkpoint) -> TwoEngines:
    def make() -> tuple[Engine, CountedRunner]:
        runner = load_native(checkpoint.config, checkpoint.weights, num_threads=2)
        return real_engine(
            runner,
            NativeSamplingOps(),
            num_blocks=1024,
            num_batched_tokens=512,
            max_model_len=1024,
        )

    return TwoEngines(make)


def assert_default_model_streams(lengths: list[int], max_tokens: int) -> None:
    """Compare handed-over streams with those of the decode engine serving alone."""
    checkpoint = open_checkpoint(default_model_path())
    pair = default_model_pair(checkpoint)
    prompts = real_prompts(checkpoint.tokenizer(), lengths)
    params = [
        sampling(seed=index, max_tokens=max_tokens, ignore_eos=True, temperature=index % 2 * 0.8)
        for index in range(len(prompts))
    ]
    # As many in flight as have room, so that hand-offs arrive while others decode.
    waiting = list(enumerate(prompts))
    for _ in range(100_000):
        if waiting and pair.submit(waiting[0][0], waiting[0][1].tolist(), params[waiting[0][0]]):
            waiting.pop(0)
        if not (waiting or pair.transfers or pair.decode.has_work):
            break
        pair.step()
    mixed = Collector(pair.decode)
    pair.decode.clear_prefix_cache()
    for index, prompt in enumerate(prompts):
        mixed.engine.submit("m", Submit(index, pack_ids(prompt), params[index]))
    mixed.run(max_steps=100_000)
    for index in range(len(prompts)):
        assert_same(pair.collector.record(GATEWAY, index), mixed.record("m", index))


def test_the_default_model_over_two_engines() -> None:
    assert_default_model_streams([10, 64, 65, 150], max_tokens=8)


@pytest.mark.slow
def test_the_default_model_over_two_engines_on_200_prompts_of_128_tokens() -> None:
    assert_default_model_streams([10 + i * 37 % 590 for i in range(200)], max_tokens=128)
