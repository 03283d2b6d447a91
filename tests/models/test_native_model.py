"""Whole models on the native kernels: close to the reference, and the same bits in any shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.native_runners import load_native, rounded_weights
from support.step_batches import Fed, Feeder, load, make_batch
from support.tiny_models import TINY_MODEL_NAMES, TinyModel, tiny_model, tokens_of
from support.wire_blocks import exported
from twinfire.kernels.cpu import _native

QUANTIZATIONS = ("none", "int8", "int4")
ALLOWED_ERROR = {"none": 0.03, "int8": 0.1, "int4": 0.1}
"""Root mean square of the logits' error over that of the logits, the weights being equal."""


@pytest.fixture(scope="module", params=TINY_MODEL_NAMES)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


def feeder(model: TinyModel, quantization: str, isa: str | None = None, **shape: object) -> Feeder:
    runner = load_native(model.config, model.weights, quantization, isa=isa, **shape)
    return Feeder(runner)


def expected_logits(model: TinyModel, quantization: str, tokens: list[int]) -> np.ndarray:
    return Feeder(load(model.config, rounded_weights(model.weights, quantization))).whole(tokens)


def error_of(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_close_to_the_reference(model: TinyModel, quantization: str) -> None:
    tokens = tokens_of(1, 150)
    logits = feeder(model, quantization).whole(tokens)
    assert (
        error_of(logits, expected_logits(model, quantization, tokens))
        < (ALLOWED_ERROR[quantization])
    )


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_is_close_to_the_reference(isa: str) -> None:
    model = tiny_model("llama_biased")
    tokens = tokens_of(2, 70)
    for quantization in QUANTIZATIONS:
        logits = feeder(model, quantization, isa).whole(tokens)
        expected = expected_logits(model, quantization, tokens)
        assert error_of(logits, expected) < ALLOWED_ERROR[quantization], quantization


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_alone_batched_chunked_and_mixed_are_the_same_bits(
    model: TinyModel, quantization: str
) -> None:
    sequences = [tokens_of(10 + length, length) for length in (1, 37, 70, 300)]
    alone = feeder(model, quantization)
    expected = [alone.whole(tokens) for tokens in sequences]
    shapes = (
        {"num_threads": 1, "op_by_op": True},
        {"num_threads": 2},
        {"num_threads": 3},
        {"num_threads": 1, "num_borrowed_threads": 2},
    )
    for shape in shapes:
        other = feeder(model, quantization, **shape)
        batched = other.step([(Fed(tokens), len(tokens)) for tokens in sequences])
        for rows, mine in zip(batched, expected, strict=True):
            np.testing.assert_array_equal(rows, mine)
        np.testing.assert_array_equal(other.chunked(sequences[3], [1, 31, 33, 100, 2]), expected[3])
        np.testing.assert_array_equal(other.chunked(sequences[1], [1] * 37), expected[1])


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_mixed_steps_are_the_same_bits_on_every_instruction_set(isa: str) -> None:
    model = tiny_model("qwen2_window")
    prefix = tokens_of(6, 64)
    for quantization in QUANTIZATIONS:
        mixed = feeder(model, quantization, isa, num_threads=2)
        decoding, short = Fed(tokens_of(7, 80)), Fed(tokens_of(8, 4))
        warm = Fed(prefix + tokens_of(9, 8))
        mixed.step([(decoding, 79), (short, 3), (warm, 72)])
        hit = Fed(prefix + tokens_of(10, 70), block_ids=warm.block_ids[:2], num_computed=64)
        fresh = Fed(tokens_of(11, 45))
        pieces = [(fresh, 45), (decoding, 1), (hit, 70), (short, 1)]
        alone = feeder(model, quantization, isa)
        for (fed, count), logits in zip(pieces, mixed.step(pieces), strict=True):
            np.testing.assert_array_equal(logits, alone.whole(fed.tokens)[-count:])


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_blocks_go_over_the_wire(kv_dtype: str) -> None:
    model = tiny_model("llama")
    runners = [
        Feeder(load_native(model.config, model.weights, kv_dtype=kv_dtype)) for _ in range(2)
    ]
    tokens = tokens_of(20, 100)
    expected = runners[0].whole(tokens)
    sent = Fed(tokens)
    runners[0].step([(sent, 64)])
    content = exported(runners[0].runner, sent.block_ids)
    layout = runners[0].runner.kv_layout
    assert len(content) == len(sent.block_ids) * layout.bytes_per_block
    runners[1].runner.import_blocks([9, 8], content)
    received = Fed(tokens, block_ids=[9, 8], num_computed=64)
    runners[1].next_block[0] = 20
    np.testing.assert_array_equal(runners[1].step([(received, 36)])[0], expected[64:])


def test_a_torch_runner_reads_the_same_blocks() -> None:
    model = tiny_model("qwen3")
    native = Feeder(load_native(model.config, model.weights))
    torch_runner = Feeder(load(model.config, model.weights, dtype="bf16"))
    tokens = tokens_of(21, 96)
    expected = native.whole(tokens)
    sent = Fed(tokens)
    native.step([(sent, 64)])
    torch_runner.runner.import_blocks([5, 4], exported(native.runner, sent.block_ids))
    received = Fed(tokens, block_ids=[5, 4], num_computed=64)
    torch_runner.next_block[0] = 20
    assert error_of(torch_runner.step([(received, 32)])[0], expected[64:]) < 0.05


def test_eight_bit_keys_and_values_are_close() -> None:
    model = tiny_model("llama")
    tokens = tokens_of(22, 200)
    logits = Feeder(load_native(model.config, model.weights, kv_dtype="int8")).whole(tokens)
    expected = Feeder(load_native(model.config, model.weights)).whole(tokens)
    assert 0 < error_of(logits, expected) < 0.03


def test_a_copied_tail_block_is_another_sequence() -> None:
    model = tiny_model("llama")
    prompt = tokens_of(12, 40)
    mine = feeder(model, "none", num_threads=2)
    first = Fed([*prompt, 5, 6, 7])
    mine.step([(first, 40)])
    copy = mine.next_block[0]
    mine.next_block[0] += 1
    fork = Fed([*prompt, 9, 8, 7], block_ids=[first.block_ids[0], copy], num_computed=40)
    pieces = [(first, 3), (fork, 3)]
    steps = mine.step(pieces, block_copies=((first.block_ids[1], copy),))
    for (fed, count), logits in zip(pieces, steps, strict=True):
        np.testing.assert_array_equal(logits, feeder(model, "none").whole(fed.tokens)[-count:])


def test_logits_in_pieces_and_out_of_range() -> None:
    runner = load_native(*_small())
    feeding = Feeder(runner)
    with pytest.raises(RuntimeError, match="nothing has been executed"):
        runner.logits(0, 1)
    whole = feeding.whole(tokens_of(30, 10))
    pieces = [runner.logits(first, first + 2).copy() for first in range(0, 10, 2)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert runner.logits(3, 3).shape == (0, 131)
    with pytest.raises(ValueError, match="kept rows"):
        runner.logits(9, 11)


def test_steps_that_make_no_sense_are_refused() -> None:
    runner = load_native(*_small())
    runner.init_kv(8)
    good = make_batch([(Fed(tokens_of(31, 5)), 5)], [0])
    runner.execute(good)
    beyond = np.array([1, 2, 3, 4, 131], np.int32)
    for changed, message in (
        ({"token_ids": beyond}, "token id"),
        ({"token_ids": beyond[:3]}, "differ in number"),
        ({"slots": np.array([0, 1, 2, 3, 8 * 32], np.int32)}, "slot"),
        ({"block_tables": np.array([[8]], np.int32)}, "block id"),
        ({"logit_rows": np.array([5], np.int32)}, "logit row"),
        ({"context_lens": np.array([4], np.int32)}, "do not fit together"),
        ({"context_lens": np.array([33], np.int32)}, "do not fit together"),
        ({"query_starts": np.array([0, 4], np.int32)}, "do not cover"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.execute(replace(good, **changed))


def test_a_profiled_step_is_a_step() -> None:
    model = tiny_model("llama")
    tokens = tokens_of(32, 40)
    profiled = feeder(model, "none", num_threads=2)
    batch = make_batch([(Fed(tokens), 40)], [3])
    phases = profiled.runner.profile(batch)
    np.testing.assert_array_equal(
        profiled.runner.logits(0, 40), feeder(model, "none").whole(tokens)
    )
    labels = [label for label, _ in phases]
    assert labels.count("attention") == 3
    assert labels.count("matrix 176 x 48") == 3
    assert all(seconds >= 0 for _, seconds in phases)


def test_kv_is_mapped_once_before_the_first_step() -> None:
    runner = load_native(*_small())
    with pytest.raises(RuntimeError, match="init_kv"):
        runner.export_blocks([0], bytearray())
    with pytest.raises(ValueError, match="at least 1"):
        runner.init_kv(0)
    runner.init_kv(4)
    with pytest.raises(RuntimeError, match="already"):
        runner.init_kv(4)


def _small() -> tuple[object, object]:
    model = tiny_model("llama")
    return model.config, model.weights
