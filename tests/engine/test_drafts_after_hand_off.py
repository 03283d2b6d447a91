"""A decode worker drafts by its head in the first step after a hand-off, as one worker would."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from support.draft_feeder import DraftFeeder, native_drafter, torch_drafter
from support.engines import Collector
from support.native_runners import load_native
from support.random_heads import random_head
from support.step_batches import Fed, load
from support.tiny_models import TinyModel, tiny_model
from support.two_engines import GATEWAY, CountedRunner, TwoEngines, real_engine
from twinfire.engine.drafters.drafter import Draft, DraftContext
from twinfire.engine.drafters.head_worth import HeadWorth
from twinfire.engine.engine import Engine
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.kernels.torch.sampling import TorchSamplingOps
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

NUM_DRAFTS = 4
EAGLE3 = f"eagle3:adaptive=false,max_drafts={NUM_DRAFTS}"
SUFFIX = "suffix:adaptive=false"
VOCAB = 131
BACKENDS = ("native", "torch")
Chain = tuple[list[int], list[float]]


@cache
def model() -> TinyModel:
    return tiny_model("llama")


def make(backend: str, speculate: str = EAGLE3, head_seed: int = 0, **limits: int) -> Engine:
    return made(backend, speculate, head_seed, **limits)[0]


def made(
    backend: str, speculate: str = EAGLE3, head_seed: int = 0, **limits: int
) -> tuple[Engine, CountedRunner]:
    head = random_head("plain", head_seed) if speculate.startswith("eagle3") else None
    config, weights = model().config, model().weights
    if backend == "native":
        runner, ops = load_native(config, weights, head=head), NativeSamplingOps()
        return real_engine(runner, ops, speculate=speculate, **limits)
    torch_runner = load(config, weights, "f32", head=head)
    return real_engine(torch_runner, TorchSamplingOps(), speculate=speculate, **limits)


def sampling(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": 3, "temperature": 0.8, **fields})  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def observed(engine: Engine) -> dict[tuple[int, ...], Chain]:
    """What the engine's head proposes from now on, by the text before it."""
    chains: dict[tuple[int, ...], Chain] = {}
    assert engine._speculator is not None
    head = engine._speculator._head
    assert head is not None
    propose = head.propose

    def noting(contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = propose(contexts)
        for context, draft in zip(contexts, drafts, strict=True):
            chains[tuple(context.tokens)] = draft.token_ids, draft.confidences
        return drafts

    head.propose = noting  # type: ignore[method-assign]
    return chains


@cache
def feeder(backend: str) -> DraftFeeder:
    maker = native_drafter if backend == "native" else torch_drafter
    return maker(model(), random_head("plain"))


def chain_from_scratch(backend: str, text: list[int]) -> Chain:
    """The chain after a text whose last token was just drawn, all before it being its prompt."""
    one = feeder(backend)
    one.next_block = [3]
    drafted = one.chains([(Fed(text), len(text) - 1)], NUM_DRAFTS)[0]
    return drafted.token_ids.tolist(), drafted.probabilities.tolist()


def assert_begins(got: Chain, expected: Chain) -> None:
    """`got` may end early, where a block's room does or the chain is unlikely to hold."""
    assert got[0], "nothing was drafted"
    count = len(got[0])
    assert got[0] == expected[0][:count]
    np.testing.assert_allclose(got[1], expected[1][:count], rtol=1e-5)


def plain(
    backend: str, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[dict[int, list[int]]]:
    collector = Collector(make(backend, "off"))
    for index, request in enumerate(requests):
        collector.submit(index, *request)
    collector.run()
    return answers(collector, len(requests))


def answers(collector: Collector, count: int) -> list[dict[int, list[int]]]:
    records = [collector.record(GATEWAY, index).answers for index in range(count)]
    return [{choice: one.tokens for choice, one in record.items()} for record in records]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 20, 31, 32, 64, 70])
def test_the_first_step_has_the_drafts_of_a_mixed_worker(backend: str, length: int) -> None:
    tokens = prompt(length, length)
    pair = TwoEngines(lambda: made(backend))
    chains, mixed_chains = observed(pair.decode), observed(mixed := make(backend))
    assert pair.submit(0, tokens, sampling())
    while not pair.decode.load().step:
        pair.step()
    load = pair.decode.load()
    text = next(iter(chains))
    assert list(text[:-1]) == tokens
    assert sum(load.drafted) == len(chains[text][0]) > 0
    collector = Collector(mixed)
    collector.submit(0, tokens, sampling())
    collector.run()
    assert next(iter(mixed_chains)) == text
    assert chains[text] == mixed_chains[text]
    assert_begins(chains[text], chain_from_scratch(backend, list(text)))
    pair.run()
    assert answers(pair.collector, 1) == plain(backend, [(tokens, sampling())])
    assert chains == mixed_chains


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 45, 64])
@pytest.mark.parametrize("places", [2, 8])
def test_every_choice_drafts_from_its_own_first_token(
    backend: str, length: int, places: int
) -> None:
    """Also where choices wait for a place, and share the block of the prompt's last token."""
    requests = [(prompt(seed, length), sampling(n=3, seed=seed)) for seed in (5, 6)]
    pair = TwoEngines(lambda: made(backend, max_num_seqs=places))
    chains = observed(pair.decode)
    for index, request in enumerate(requests):
        assert pair.submit(index, *request)
    pair.run()
    expected = plain(backend, requests)
    assert answers(pair.collector, len(requests)) == expected
    texts = {
        (*tokens, drawn[0])
        for (tokens, _), choices in zip(requests, expected, strict=True)
        for drawn in choices.values()
    }
    assert len(texts) > len(requests)
    for text in texts:
        assert_begins(chains[text], chain_from_scratch(backend, list(text)))
    if length % 32 == 0:
        return  # The row of the prompt's last token is in a block that all choices share.
    for (tokens, _), choices in zip(requests, expected, strict=True):
        assert_chains_are_those_from_scratch(chains, backend, tokens, choices[0])


def assert_chains_are_those_from_scratch(
    chains: dict[tuple[int, ...], Chain], backend: str, tokens: list[int], drawn: list[int]
) -> None:
    for count in range(1, len(drawn) - 1):
        text = (*tokens, *drawn[:count])
        if text in chains:
            assert_begins(chains[text], chain_from_scratch(backend, list(text)))


def test_a_choice_that_waited_leaves_the_blocks_of_another_alone() -> None:
    tokens, params = prompt(8, 40), sampling(n=3, max_tokens=20)
    pair = TwoEngines(lambda: made("native", max_num_seqs=2))
    chains = observed(pair.decode)
    assert pair.submit(0, tokens, params)
    while pair.decode.load().step < 4:
        pair.step()
    pair.decode.cancel(GATEWAY, 0, 1)
    pair.run()
    (expected,) = plain("native", [(tokens, params)])
    (got,) = answers(pair.collector, 1)
    for choice in (0, 2):
        assert got[choice] == expected[choice]
        assert_chains_are_those_from_scratch(chains, "native", tokens, expected[choice])
    assert (*tokens, expected[2][0]) in chains


@pytest.mark.parametrize("prefill_head", ["", "another"])
def test_the_feature_of_another_head_is_not_used(prefill_head: str) -> None:
    engines = iter(
        [made("native", EAGLE3, 7) if prefill_head else made("native", SUFFIX), made("native")]
    )
    pair = TwoEngines(lambda: next(engines), (prefill_head, "the head"))
    chains = observed(pair.decode)
    tokens = prompt(9, 40)
    assert pair.submit(0, tokens, sampling())
    pair.run()
    assert answers(pair.collector, 1) == plain("native", [(tokens, sampling())])
    assert chains
    assert not any(token_ids for token_ids, _ in chains.values())


def test_a_prompt_handed_to_a_worker_without_a_head() -> None:
    engines = iter([made("native"), made("native", SUFFIX)])
    pair = TwoEngines(lambda: next(engines), ("the head", ""))
    tokens = prompt(9, 40)
    assert pair.submit(0, tokens, sampling())
    pair.run()
    assert answers(pair.collector, 1) == plain("native", [(tokens, sampling())])


def test_a_stream_that_goes_on_over_a_hand_off_is_drafted_for_at_once() -> None:
    """As after a lost decode worker: what is handed over is the prompt and the output so far."""
    tokens, params = prompt(2, 40), sampling(max_tokens=30)
    ((drawn,),) = (one.values() for one in plain("native", [(tokens, params)]))
    pair = TwoEngines(lambda: made("native"))
    chains = observed(pair.decode)
    assert pair.submit(0, tokens, params, choices=(0,), outputs=(pack_ids(drawn[:9]),))
    pair.run()
    assert answers(pair.collector, 1) == [{0: drawn[9:]}]
    text = (*tokens, *drawn[:10])
    assert next(iter(chains)) == text
    assert_begins(chains[text], chain_from_scratch("native", list(text)))


class NeverWorthIt(HeadWorth):
    def pays(self, num_streams: int) -> bool:
        return False


def test_a_head_that_rests_drafts_for_nothing_that_comes() -> None:
    tokens = prompt(9, 40)
    pair = TwoEngines(lambda: made("native"))
    chains = observed(pair.decode)
    assert pair.decode._speculator is not None
    pair.decode._speculator._worth = NeverWorthIt()
    assert pair.submit(0, tokens, sampling())
    pair.run()
    assert answers(pair.collector, 1) == plain("native", [(tokens, sampling())])
    assert chains
    assert not any(token_ids for token_ids, _ in chains.values())


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("arrives", "why"),
    [
        (lambda sent: b"", ""),
        (lambda sent: sent[:-4], "188 bytes"),
        (lambda sent: sent + bytes(4), "196 bytes"),
        (lambda sent: b"x", "1 bytes"),
        (lambda sent: floats(np.nan) + sent[4:], "not finite"),
        (lambda sent: sent[4:] + floats(np.inf), "not finite"),
    ],
    ids=["none", "short", "long", "a byte", "nan", "inf"],
)
def test_without_a_good_feature_drafts_begin_with_the_second_step(
    arrives: Callable[[bytes], bytes], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(3, 40)
    pair = TwoEngines(lambda: made("native"))
    chains = observed(pair.decode)
    pair.carry = arrives  # type: ignore[method-assign]
    assert pair.submit(0, tokens, sampling())
    with caplog.at_level(logging.WARNING):
        pair.run()
    assert answers(pair.collector, 1) == plain("native", [(tokens, sampling())])
    assert why in caplog.text
    assert bool(caplog.text) == bool(why)
    first, second, *_ = chains.values()
    assert not first[0]
    assert second[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [3e38, -3e38, 1e-44, 0.0])
def test_a_senseless_feature_costs_drafts_at_most(backend: str, value: float) -> None:
    requests = [(prompt(3, 40), sampling(n=2)), (prompt(4, 32), sampling(temperature=0.0))]
    pair = TwoEngines(lambda: made(backend))
    pair.carry = lambda sent: floats(*[value] * (len(sent) // 4))  # type: ignore[method-assign]
    for index, request in enumerate(requests):
        assert pair.submit(index, *request)
    pair.run()
    assert answers(pair.collector, len(requests)) == plain(backend, requests)
    assert sum(pair.decode.load().drafted) > 0


def test_a_stream_that_was_cancelled_or_preempted_is_not_drafted_for_as_it_came() -> None:
    """Three prompts fill the blocks, so that what came last is computed anew."""
    requests = [(prompt(seed, 60), sampling(max_tokens=40)) for seed in range(3)]
    pair = TwoEngines(lambda: made("native", num_blocks=7, max_model_len=128))
    for index, request in enumerate(requests):
        while not pair.submit(index, *request):
            pair.step()
    pair.run()
    assert answers(pair.collector, len(requests)) == plain("native", requests)
    assert pair.decode.load().preemptions > 0
    assert pair.submit(3, *requests[0])
    while pair.transfers:
        pair.prefill.step()
        pair.move()
    pair.decode.cancel(GATEWAY, 3)
    pair.run()
    head = pair.decode._speculator._head  # type: ignore[union-attr]
    assert pair.submit(4, *requests[1])
    pair.run()
    assert head is not None
    assert not head._arrivals._arrivals
