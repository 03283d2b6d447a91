"""The native attention against its torch twin, and against its own bits in every other step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.attention_layers import (
    LAYER,
    NUM_LAYERS,
    FedSequence,
    NativeLayer,
    TorchLayer,
    Turn,
    again,
    batch_of,
    feed,
    make_sequences,
    whole_output,
)
from support.wire_blocks import exported
from twinfire.kernels.cpu import _native
from twinfire.kernels.ops import HeadLayout, RopeTable

ISAS = _native.supported_isas()
FORMATS = ["bf16", "int8"]
# Weights and operands are rounded to 8 bits of mantissa; int8 keys and values to 1 / 254 of a row's
# largest.
TOLERANCE = {"bf16": 0.025, "int8": 0.06}

# Query heads per KV head of 1, 3, 4 and 8, widths with and without a remainder of every kind.
SHAPES = [
    HeadLayout(9, 3, 64),
    HeadLayout(4, 4, 128),
    HeadLayout(8, 2, 96),
    HeadLayout(8, 1, 16),
    HeadLayout(2, 2, 80),
]


def rope_of(head_dim: int) -> RopeTable:
    half = np.arange(head_dim // 2, dtype=np.float32)
    return RopeTable((10_000.0 ** (-2 * half / head_dim)).astype(np.float32), 1.1)


def full_turn(rng: np.random.Generator, head_dim: int) -> Turn:
    query, key = (rng.uniform(0.5, 1.5, head_dim).astype(np.float32) for _ in range(2))
    return Turn(query, key, 1e-5, rope_of(head_dim))


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_attends_as_torch_does(
    isa: str, kv_format: str, heads: HeadLayout, window: int | None
) -> None:
    rng = np.random.default_rng(heads.head_dim)
    sequences, num_blocks = make_sequences(rng, heads, [1, 37, 300, 601])
    # A prompt, chunks of prompts, single tokens, and all of them beside each other.
    counts = [[1, 5, 299, 32], [0, 31, 1, 300], [0, 1, 0, 100], [0, 0, 0, 169]]

    def steps(of: list[FedSequence]) -> list[list[tuple[FedSequence, int]]]:
        return [
            [(sequence, count) for sequence, count in zip(of, step, strict=True) if count]
            for step in counts
        ]

    twins = again(sequences)
    turn = full_turn(rng, heads.head_dim)
    options = {"turn": turn, "window": window}
    native = NativeLayer(heads, num_blocks, isa=isa, kv_format=kv_format, **options)
    feed(native, steps(sequences))
    feed(TorchLayer(heads, num_blocks, **options), steps(twins))
    for sequence, twin in zip(sequences, twins, strict=True):
        error = np.abs(whole_output(sequence) - whole_output(twin)).max()
        assert error < TOLERANCE[kv_format]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_every_step(
    isa: str, kv_format: str, data: st.DataObject
) -> None:
    heads = data.draw(st.sampled_from(SHAPES))
    window = data.draw(st.sampled_from([None, 1, 40, 300]))
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sequences, num_blocks = make_sequences(rng, heads, lengths)
    options = {"isa": isa, "kv_format": kv_format, "window": window}
    options["turn"] = full_turn(rng, heads.head_dim)

    alone = again(sequences)
    for sequence in alone:
        feed(NativeLayer(heads, num_blocks, **options), [[(sequence, len(sequence.rows))]])

    num_threads = data.draw(st.sampled_from([1, 2, 4]))
    together = NativeLayer(heads, num_blocks, num_threads=num_threads, **options)
    while left := [s for s in sequences if s.num_computed < len(s.rows)]:
        pieces = []
        for sequence in left:
            most = len(sequence.rows) - sequence.num_computed
            pieces.append((sequence, min(most, data.draw(st.sampled_from([1, 2, 7, 32, 90, 400])))))
        if sum(count for _, count in pieces) > 60 or data.draw(st.booleans()):
            feed(together, [pieces])
        else:
            # Small steps make long tests: finish the rest at once.
            feed(together, [[(s, len(s.rows) - s.num_computed) for s in left]])
    for sequence, twin in zip(sequences, alone, strict=True):
        assert same_bits(whole_output(sequence), whole_output(twin))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("num_queries", [1, 3, 40])
def test_long_contexts_shared_by_threads_give_the_same_bits(
    isa: str, kv_format: str, num_queries: int
) -> None:
    heads = HeadLayout(3, 1, 32)
    sequences, num_blocks = make_sequences(np.random.default_rng(3), heads, [2_600])
    outputs = []
    for num_threads in (1, 2, 4):
        (sequence,) = again(sequences)
        layer = NativeLayer(
            heads, num_blocks, isa=isa, kv_format=kv_format, num_threads=num_threads
        )
        # Queries about a chunk's border, so that a step's own keys lie in two of them.
        feed(layer, [[(sequence, 2_560 - num_queries // 2)]])
        batch, rows = batch_of([(sequence, num_queries)])
        outputs.append(layer.step(batch, rows))
        # After another layer, whose keys are others, over the same plan.
        outputs.append(layer.step(batch, rows, layers=[0, LAYER]))
    assert all(same_bits(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("counts", [[33], [5, 28], [1, 1, 31]])
def test_what_another_sequence_left_in_a_block_is_never_seen(
    isa: str, kv_format: str, counts: list[int]
) -> None:
    heads = HeadLayout(4, 2, 32)
    sequences, num_blocks = make_sequences(np.random.default_rng(4), heads, [33])
    clean, dirty = (NativeLayer(heads, num_blocks, isa=isa, kv_format=kv_format) for _ in range(2))
    # All bits set: not a number in bf16 elements and in float32 scales.
    content = b"\xff" * dirty.cache.bytes_per_block * num_blocks
    dirty.cache.import_blocks(range(num_blocks), content)
    outputs = []
    for layer in (clean, dirty):
        (sequence,) = again(sequences)
        feed(layer, [[(sequence, count)] for count in counts])
        outputs.append(whole_output(sequence))
    assert np.isfinite(outputs[1]).all()
    assert same_bits(*outputs)


@pytest.mark.parametrize("isa", ISAS)
def test_a_key_that_is_hidden_has_no_influence_at_all(isa: str) -> None:
    heads = HeadLayout(3, 1, 32)
    sequences, num_blocks = make_sequences(np.random.default_rng(5), heads, [90])
    changed = again(sequences)
    changed[0].rows = changed[0].rows.copy()
    changed[0].rows[60:] = 1e30
    outputs = []
    for (sequence,) in (sequences, changed):
        feed(NativeLayer(heads, num_blocks, isa=isa), [[(sequence, 90)]])
        outputs.append(whole_output(sequence)[:60])
    assert same_bits(*outputs)


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_rows_are_the_rounded_float_rows_with_finite_padding(isa: str) -> None:
    heads = HeadLayout(3, 3, 16)
    sequences, num_blocks = make_sequences(np.random.default_rng(6), heads, [40])
    batch, rows = batch_of([(sequences[0], 40)])
    wide = NativeLayer(heads, num_blocks, isa=isa).step(batch, rows)
    narrow = NativeLayer(heads, num_blocks, isa=isa).step(batch, rows, as_bf16=True)
    assert narrow.shape == (40, 64)
    assert not narrow[:, 48:].any()
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    np.testing.assert_array_equal(narrow[:, :48], rounded)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
def test_blocks_leave_in_the_layout_that_torch_writes(isa: str, head_dim: int) -> None:
    heads = HeadLayout(6, 2, head_dim)
    sequences, num_blocks = make_sequences(np.random.default_rng(7), heads, [75])
    twins = again(sequences)
    native = NativeLayer(heads, num_blocks, isa=isa)
    reference = TorchLayer(heads, num_blocks, dtype="bf16")
    reference.kv.import_blocks(range(num_blocks), bytes(num_blocks * native.cache.bytes_per_block))
    feed(native, [[(sequences[0], 50)], [(sequences[0], 25)]])
    feed(reference, [[(twins[0], 50)], [(twins[0], 25)]])
    ids = sequences[0].block_ids.tolist()
    assert exported(native.cache, ids) == exported(reference.kv, ids)


@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_blocks_survive_the_wire_and_copies(kv_format: str, data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from([16, 48, 64]))
    num_heads = data.draw(st.integers(1, 3))
    cache = _native.KvCache(NUM_LAYERS, num_heads, head_dim, kv_format, 5)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ids = data.draw(st.permutations(range(5)))[:3]
    content = rng.bytes(3 * cache.bytes_per_block)
    offset = data.draw(st.integers(0, 17))
    shifted = bytearray(offset) + content + b"end"
    place = memoryview(shifted)[offset : offset + len(content)]
    cache.import_blocks(ids, place)
    assert exported(cache, ids) == content
    place[:] = bytes(len(content))
    cache.export_blocks(ids, place)
    assert shifted == bytes(offset) + content + b"end"
    (other,) = [i for i in range(5) if i not in ids][:1]
    assert exported(cache, [other]) == bytes(cache.bytes_per_block)
    cache.copy_blocks(np.array([[ids[1], other]], np.int32))
    assert exported(cache, [other]) == exported(cache, [ids[1]])
    assert exported(cache, ids) == content


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [16, 32, 48, 128])
def test_int8_elements_times_scales_are_the_values(isa: str, head_dim: int) -> None:
    heads = HeadLayout(2, 2, head_dim)
    sequences, num_blocks = make_sequences(np.random.default_rng(8), heads, [32])
    layer = NativeLayer(heads, num_blocks, isa=isa, kv_format="int8")
    feed(layer, [[(sequences[0], 32)]])
    content = exported(layer.cache, sequences[0].block_ids.tolist())
    num_elements = NUM_LAYERS * 2 * 2 * 32 * head_dim
    shape = (NUM_LAYERS, 2, 2, 32)
    elements = np.frombuffer(content[:num_elements], np.int8).reshape(*shape, head_dim)
    scales = np.frombuffer(content[num_elements:], np.float32).reshape(shape)
    stored = (elements * scales[..., None])[LAYER]
    written = (
        sequences[0].rows[:, heads.query_width :].reshape(32, 2, 2, head_dim).transpose(1, 2, 0, 3)
    )
    half_steps = np.abs(written).max(axis=-1, keepdims=True) / 254
    assert (np.abs(stored - written) <= half_steps * 1.001).all()


def resident_bytes() -> int:
    """Memory of this process that the system has given pages for."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="takes pages on Linux only")
def test_pages_are_taken_for_the_blocks_asked_for_and_keep_what_they_hold() -> None:
    cache = _native.KvCache(4, 8, 128, "bf16", 64)
    block_bytes = cache.bytes_per_block
    content = bytes(range(256)) * (block_bytes // 256)
    cache.import_blocks([1], content)
    before = resident_bytes()
    cache.populate(0, 32)
    taken = resident_bytes() - before
    assert 24 * block_bytes < taken < 48 * block_bytes
    assert exported(cache, [1]) == content
    with pytest.raises(ValueError, match=r"\[0, 64\)"):
        cache.populate(60, 5)
    with pytest.raises(ValueError, match="no block"):
        cache.populate(60, 0)


def test_a_block_takes_the_memory_of_itself_and_not_of_every_layer() -> None:
    cache = _native.KvCache(64, 8, 128, "bf16", 256)
    before = resident_bytes()
    cache.import_blocks([0], bytes(cache.bytes_per_block))
    assert resident_bytes() - before < 2 * cache.bytes_per_block + (8 << 20)


def test_blocks_that_do_not_exist_are_refused() -> None:
    cache = _native.KvCache(1, 1, 16, "bf16", 4)
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        cache.export_blocks([4], bytearray(cache.bytes_per_block))
    with pytest.raises(ValueError, match=r"\[0, 4\)"):
        cache.copy_blocks(np.array([[0, -1]], np.int32))
    with pytest.raises(ValueError, match="they take"):
        cache.import_blocks([0], b"\0")
    with pytest.raises(ValueError, match="multiple of 16"):
        _native.KvCache(1, 1, 24, "bf16", 4)


def test_buffers_that_are_no_good_are_refused() -> None:
    cache = _native.KvCache(1, 1, 16, "bf16", 4)
    size = cache.bytes_per_block
    with pytest.raises(ValueError, match="they take"):
        cache.export_blocks([0, 1], bytearray(size))
    with pytest.raises(BufferError, match="writable"):
        cache.export_blocks([0], memoryview(bytes(size)))
    with pytest.raises(BufferError, match="contiguous"):
        cache.import_blocks([0], memoryview(bytes(2 * size))[::2])
    with pytest.raises(TypeError, match="bytes-like"):
        cache.import_blocks([0], "text")  # type: ignore[arg-type]
