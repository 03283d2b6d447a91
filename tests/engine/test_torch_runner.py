"""Loading, errors, other element types and the wire, on tiny models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.step_batches import Fed, Feeder, load, make_batch
from support.tiny_models import ArrayWeights, tiny_model, tokens_of
from support.wire_blocks import exported
from twinfire.engine.torch_runner import load_torch_runner
from twinfire.protocol.errors import ModelError


def test_missing_tensors_are_all_named() -> None:
    model = tiny_model("llama")
    arrays = dict(model.weights.arrays)
    del arrays["model.layers.1.mlp.up_proj.weight"], arrays["lm_head.weight"]
    with pytest.raises(ModelError, match="lacks 2 tensors") as caught:
        load(model.config, ArrayWeights(arrays))
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "lm_head.weight" in str(caught.value)


def test_misshapen_tensors_are_named_with_both_shapes() -> None:
    model = tiny_model("qwen3")
    arrays = dict(model.weights.arrays)
    arrays["model.layers.0.self_attn.k_norm.weight"] = np.ones(8, np.float32)
    with pytest.raises(ModelError, match=r"k_norm\.weight is \[8\], not \[16\]"):
        load(model.config, ArrayWeights(arrays))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "mamba.*llama, mistral, qwen2, qwen3"),
        ({"num_kv_heads": 4}, "num_heads 6 is no multiple of num_kv_heads 4"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, object], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=message):
        load(replace(model.config, **changes), model.weights)


@pytest.mark.parametrize("dtype", ["f16", "q4_1"])
def test_impossible_dtypes_are_refused(dtype: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=dtype):
        load(model.config, model.weights, dtype)


def test_calls_out_of_order_and_out_of_range() -> None:
    model = tiny_model("llama")
    runner = load(model.config, model.weights)
    with pytest.raises(RuntimeError, match="init_kv"):
        runner.execute(make_batch([(Fed([1, 2]), 2)], [0]))
    with pytest.raises(ValueError, match="num_blocks"):
        runner.init_kv(0)
    runner.init_kv(4)
    with pytest.raises(RuntimeError, match="already"):
        runner.init_kv(4)
    with pytest.raises(RuntimeError, match="executed"):
        runner.logits(0, 1)
    runner.execute(make_batch([(Fed([1, 2]), 2)], [0]))
    with pytest.raises(ValueError, match="rows"):
        runner.logits(0, 3)
    assert runner.logits(1, 1).shape == (0, 131)


def test_progress_reaches_the_whole() -> None:
    model = tiny_model("llama")
    seen: list[tuple[str, int, int]] = []
    load_torch_runner(
        model.config,
        model.weights,
        dtype="f32",
        num_threads=1,
        progress=lambda stage, done, total: seen.append((stage, done, total)),
    )
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("weights", model.weights.total_bytes, model.weights.total_bytes)
    assert 0 < seen[0][1] < model.weights.total_bytes


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3"])
def test_bf16_is_close_whole_chunked_and_mixed(name: str) -> None:
    model = tiny_model(name)
    feeder = Feeder(load(model.config, model.weights, "bf16"))
    tokens, other = tokens_of(1, 200), tokens_of(2, 90)
    expected = model.reference_logits(tokens)
    spread = float(expected.std())
    for logits in (feeder.whole(tokens), feeder.chunked(tokens, [1, 1, 60, 7])):
        assert float(np.abs(logits - expected).mean()) < 0.05 * spread
    running = Fed(tokens)
    feeder.step([(running, 199)])
    mixed = feeder.step([(Fed(other), 90), (running, 1)])[1]
    assert float(np.abs(mixed[0] - expected[-1]).mean()) < 0.05 * spread


def test_logits_are_the_callers_to_change() -> None:
    model = tiny_model("llama")
    feeder = Feeder(load(model.config, model.weights))
    logits = feeder.whole(tokens_of(3, 5))
    first = feeder.runner.logits(0, 5)
    first[:] = -1.0
    np.testing.assert_array_equal(feeder.runner.logits(0, 5), logits)


def test_a_step_may_keep_no_rows() -> None:
    model = tiny_model("llama")
    feeder = Feeder(load(model.config, model.weights))
    fed = Fed(tokens_of(4, 50))
    batch = make_batch([(fed, 49)], feeder.next_block, every_row=False)
    feeder.runner.execute(replace(batch, logit_rows=np.zeros(0, np.int32)))
    assert feeder.runner.logits(0, 0).shape == (0, 131)
    expected = model.reference_logits(fed.tokens)[-1:]
    np.testing.assert_allclose(feeder.step([(fed, 1)])[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_blocks_continue_on_another_runner(dtype: str) -> None:
    model = tiny_model("qwen2")
    source = Feeder(load(model.config, model.weights, dtype))
    target = Feeder(load(model.config, model.weights, dtype))
    fed = Fed(tokens_of(5, 70))
    source.step([(fed, 65)])
    content = exported(source.runner, fed.block_ids)
    assert len(content) == 3 * source.runner.kv_layout.bytes_per_block
    moved = Fed(fed.tokens, block_ids=[40, 7, 21], num_computed=65)
    target.runner.import_blocks(moved.block_ids, content)
    np.testing.assert_array_equal(target.step([(moved, 5)])[0], source.step([(fed, 5)])[0])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_nothing_of_a_broken_request_reaches_the_next(dtype: str) -> None:
    """Blocks full of NaN are reused: what lies behind a sequence's end must not be read."""
    model = tiny_model("llama")
    feeder = Feeder(load(model.config, model.weights, dtype))
    tokens = tokens_of(6, 75)
    clean = feeder.chunked(tokens, [33, 1, 1])
    layout = feeder.runner.kv_layout
    not_a_number = b"\xff" * layout.bytes_per_block
    for block in range(256):
        feeder.runner.import_blocks([block], not_a_number)
    np.testing.assert_array_equal(feeder.chunked(tokens, [33, 1, 1]), clean)
