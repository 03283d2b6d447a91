"""A head beside its target: what it leaves alone, shares with it and sends over the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.draft_feeder import DraftFeeder, assert_same_drafts, native_drafter, torch_drafter
from support.native_runners import load_native
from support.random_heads import random_head
from support.step_batches import Fed, Feeder, load
from support.tiny_models import TinyModel, tiny_model, tokens_of
from support.wire_blocks import exported
from twinfire.engine.native_runner import load_native_runner
from twinfire.kernels.cpu.weight_cache import WeightCache


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "last_hidden"])
def test_a_head_leaves_the_target_s_bits(model: TinyModel, name: str, quantization: str) -> None:
    tokens = tokens_of(1, 90)
    head = random_head(name)
    for num_threads, op_by_op in ((1, False), (2, False), (2, True)):
        shape = {"quantization": quantization, "num_threads": num_threads, "op_by_op": op_by_op}
        alone = Feeder(load_native(model.config, model.weights, **shape))
        beside = Feeder(load_native(model.config, model.weights, head=head, **shape))
        np.testing.assert_array_equal(alone.whole(tokens), beside.whole(tokens))
        np.testing.assert_array_equal(
            alone.chunked(tokens, [1, 40, 2]), beside.chunked(tokens, [1, 40, 2])
        )


@pytest.mark.parametrize("name", ["plain", "last_hidden"])
def test_a_head_leaves_the_reference_s_bits(model: TinyModel, name: str) -> None:
    tokens = tokens_of(2, 60)
    alone = Feeder(load(model.config, model.weights))
    beside = Feeder(load(model.config, model.weights, head=random_head(name)))
    np.testing.assert_array_equal(alone.whole(tokens), beside.whole(tokens))


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["plain", "two_layers_normed", "last_hidden", "both_fc_norms"])
def test_alone_batched_chunked_and_mixed_are_the_same_bits(
    model: TinyModel, name: str, kv_dtype: str
) -> None:
    head = random_head(name)
    sequences = [tokens_of(10 + length, length + 1) for length in (1, 5, 33, 70)]
    alone = native_drafter(model, head, kv_dtype=kv_dtype)
    expected = [alone.first([(Fed(tokens), len(tokens) - 1)])[0] for tokens in sequences]
    chains = [alone.chains([(Fed(tokens), len(tokens) - 1)], 4)[0] for tokens in sequences]
    for num_threads, op_by_op in ((1, True), (2, False)):
        other = native_drafter(
            model, head, kv_dtype=kv_dtype, num_threads=num_threads, op_by_op=op_by_op
        )
        pieces = [(Fed(tokens), len(tokens) - 1) for tokens in sequences]
        for mine, theirs in zip(other.first(pieces), expected, strict=True):
            assert_same_drafts(mine, theirs)
        pieces = [(Fed(tokens), len(tokens) - 1) for tokens in sequences]
        for mine, theirs in zip(other.chains(pieces, 4), chains, strict=True):
            assert_same_drafts(mine, theirs)
        fed = Fed(sequences[3])
        parts = [other.first([(fed, count)])[0] for count in (1, 40, 4, 25)]
        np.testing.assert_array_equal(
            np.concatenate([part.token_ids for part in parts]), expected[3].token_ids
        )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 2**16))
def test_any_accepted_length_gives_what_a_fresh_start_gives(counts: list[int], seed: int) -> None:
    """Drafts that were written past the end are overwritten by true rows, however many."""
    drafter, tokens = _shared_drafter(), tokens_of(seed, sum(counts) + 1)
    fed = Fed(tokens)
    for count in counts:
        (chain,) = drafter.chains([(fed, count)], 5)
    (fresh,) = drafter.chains([(Fed(tokens), sum(counts))], 5)
    drafter.next_block[0] = 3
    assert_same_drafts(chain, fresh)


_DRAFTERS: list[DraftFeeder] = []


def _shared_drafter() -> DraftFeeder:
    if not _DRAFTERS:
        _DRAFTERS.append(native_drafter(tiny_model("llama"), random_head("plain")))
    return _DRAFTERS[0]


def test_rows_are_drafted_from_the_features_they_name(model: TinyModel) -> None:
    head = random_head("plain")
    one, two = tokens_of(20, 31), tokens_of(21, 26)
    for make in (native_drafter, torch_drafter):
        drafter = make(model, head)
        (expected,) = drafter.chains([(Fed(two), 25)], 1)
        # Of the step's two sequences only the second is drafted for.
        fed = Fed(two)
        batch = drafter.execute([(Fed(one), 30), (fed, 25)])
        second = slice(30, 55)
        picked = replace(
            batch,
            token_ids=batch.token_ids[second],
            positions=batch.positions[second],
            slots=batch.slots[second],
            query_starts=np.array([0, 25], np.int32),
            context_lens=batch.context_lens[1:],
            block_tables=batch.block_tables[1:],
            logit_rows=np.array([24], np.int32),
        )
        assert_same_drafts(drafter.draft.first(picked, np.arange(30, 55, dtype=np.int32)), expected)


@pytest.mark.parametrize("make", [native_drafter, torch_drafter])
def test_rows_that_are_none_are_refused(model: TinyModel, make: object) -> None:
    drafter = make(model, random_head("plain"))
    tokens = tokens_of(22, 9)
    batch = drafter.execute([(Fed(tokens), 8)])
    rows = np.arange(8, dtype=np.int32)
    drafter.draft.first(batch, rows)
    for call in (drafter.draft.first, drafter.draft.further):
        with pytest.raises(ValueError, match="kept row"):
            call(batch, rows + 1)
        with pytest.raises(ValueError, match="kept row"):
            call(batch, rows - 1)
        with pytest.raises(ValueError, match="kept rows"):
            call(batch, rows[:7])
    nothing = replace(batch, logit_rows=np.zeros(0, np.int32))
    assert len(drafter.draft.first(nothing, rows).token_ids) == 0
    with pytest.raises(ValueError, match="kept row"):
        drafter.draft.further(batch, rows)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_blocks_carry_the_draft_group_over_the_wire(model: TinyModel, kv_dtype: str) -> None:
    head, tokens = random_head("plain"), tokens_of(23, 71)
    ends = [native_drafter(model, head, kv_dtype=kv_dtype) for _ in range(2)]
    _check_wire(*ends, tokens)
    plain = load_native(model.config, model.weights, kv_dtype=kv_dtype)
    names = [group.name for group in ends[0].runner.kv_layout.groups]
    scales = kv_dtype == "int8"
    expected = ["target", "target_scales", "draft", "draft_scales"] if scales else None
    assert names == (expected or ["target", "draft"])
    assert ends[0].runner.kv_layout.groups[: len(names) // 2] == plain.kv_layout.groups


def test_torch_blocks_carry_the_draft_group_over_the_wire(model: TinyModel) -> None:
    head, tokens = random_head("two_layers"), tokens_of(24, 71)
    _check_wire(torch_drafter(model, head), torch_drafter(model, head), tokens)


def _check_wire(sender: DraftFeeder, receiver: DraftFeeder, tokens: list[int]) -> None:
    sent = Fed(tokens)
    sender.first([(sent, 64)])
    content = exported(sender.runner, sent.block_ids)
    assert len(content) == 2 * sender.runner.kv_layout.bytes_per_block
    receiver.runner.import_blocks([9, 8], content)
    assert exported(receiver.runner, [9, 8]) == content
    received = Fed(tokens, block_ids=[9, 8], num_computed=64)
    receiver.next_block[0] = 20
    (mine,) = receiver.chains([(received, 6)], 4)
    (theirs,) = sender.chains([(sent, 6)], 4)
    assert_same_drafts(mine, theirs)
    with pytest.raises(ValueError, match="bytes"):
        receiver.runner.import_blocks([9, 8], content[:-1])


def test_a_torch_head_reads_what_a_native_one_wrote(model: TinyModel) -> None:
    head, tokens = random_head("plain"), tokens_of(25, 71)
    native, other = native_drafter(model, head), torch_drafter(model, head, "bf16")
    sent = Fed(tokens)
    native.first([(sent, 64)])
    other.runner.import_blocks([9, 8], exported(native.runner, sent.block_ids))
    other.next_block[0] = 20
    (mine,) = other.first([(Fed(tokens, block_ids=[9, 8], num_computed=64), 6)])
    (theirs,) = native.first([(sent, 6)])
    assert (mine.token_ids == theirs.token_ids).sum() >= 4


@pytest.mark.parametrize("make", [native_drafter, torch_drafter])
def test_a_copied_block_takes_the_draft_group_along(model: TinyModel, make: object) -> None:
    drafter, tokens = make(model, random_head("plain")), tokens_of(26, 44)
    fed = Fed(tokens)
    drafter.first([(fed, 40)])
    copy = drafter.next_block[0]
    drafter.next_block[0] += 1
    fork = Fed(tokens, block_ids=[fed.block_ids[0], copy], num_computed=40)
    batch = drafter.execute([(fork, 3)], block_copies=((fed.block_ids[1], copy),))
    drafted = drafter.draft.first(batch, np.arange(3, dtype=np.int32))
    (expected,) = make(model, random_head("plain")).first([(Fed(tokens), 43)])
    np.testing.assert_array_equal(drafted.token_ids, expected.token_ids[-3:])
    np.testing.assert_allclose(drafted.probabilities, expected.probabilities[-3:], rtol=1e-4)


def test_progress_and_memory_count_the_head(model: TinyModel) -> None:
    seen: list[tuple[str, int, int]] = []
    head = random_head("plain")
    runner = load_native_runner(
        model.config,
        model.weights,
        quantization="auto",
        kv_dtype="bf16",
        num_threads=1,
        progress=lambda stage, done, total: seen.append((stage, done, total)),
        head=head,
    )
    total = model.weights.total_bytes + head.weights.total_bytes
    assert seen[-1] == ("weights", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    alone = load_native(model.config, model.weights).weight_bytes
    assert runner.draft is not None
    assert runner.weight_bytes == alone + runner.draft.weight_bytes
    assert 0 < runner.draft.weight_bytes < head.weights.total_bytes


def test_a_packed_head_is_found_by_the_next_start(model: TinyModel, tmp_path: Path) -> None:
    head, tokens = random_head("plain"), tokens_of(27, 40)

    def drafter() -> DraftFeeder:
        cache = WeightCache(tmp_path, 1 << 30, head.content_key)
        runner = load_native_runner(
            model.config,
            model.weights,
            quantization="auto",
            kv_dtype="bf16",
            num_threads=1,
            progress=lambda stage, done, total: None,
            head=head,
            head_cache=cache,
        )
        runner.save_weights(lambda: None)
        return DraftFeeder(runner)

    (packed,) = drafter().first([(Fed(tokens), 39)])
    assert len(list(tmp_path.glob("*.packed"))) == 1
    (loaded,) = drafter().first([(Fed(tokens), 39)])
    assert len(list(tmp_path.glob("*.packed"))) == 1
    assert_same_drafts(packed, loaded)
