"""Programs that keep rows and read them, and blocks on a wire that several caches share."""

from __future__ import annotations

import numpy as np
import pytest

from twinfire.kernels.cpu._native import (
    KeptRows,
    KvCache,
    PackedMatrix,
    Program,
    ThreadTeam,
    allocate_bytes,
    pack_panels,
    supported_isas,
)

VOCAB, WIDTH, COLUMNS = 20, 48, 70
EPS = 1e-5


def packed(array: np.ndarray, format_name: str = "bf16") -> PackedMatrix:
    shape = (format_name, *array.shape, False, False)
    panels = allocate_bytes(PackedMatrix.num_bytes_of(*shape))
    matrix = PackedMatrix(*shape, panels)
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    pack_panels(matrix, panels, [("f32", content)], None, 0, matrix.num_panels)
    return matrix


def step(token_ids: list[int], logit_rows: list[int]) -> tuple[np.ndarray, ...]:
    count = len(token_ids)
    arrays = (token_ids, range(count), range(count), [0, count], [count])
    flat = [np.array(values, np.int32) for values in arrays]
    tables, copies = np.zeros((1, -(-count // 32)), np.int32), np.zeros((0, 2), np.int32)
    return (*flat, tables, np.array(logit_rows, np.int32), copies)


def table_of(seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((VOCAB, WIDTH), np.float32)
    # Values that bf16 holds, so that only sums are rounded.
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def keeper(team: ThreadTeam, isa: str, table: np.ndarray, kept: KeptRows, column: int) -> Program:
    program = Program(team, isa, VOCAB)
    rows = program.add_buffer("f32", WIDTH, False)
    program.add_embed_plain(table.reshape(-1).view(np.uint8), "f32", rows)
    program.add_keep_rows(rows, kept, column)
    return program


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_kept_rows_are_joined_with_a_step_s_own(isa: str, num_tokens: int) -> None:
    random = np.random.default_rng(num_tokens)
    team, kept, cache = ThreadTeam(2), KeptRows(2 * WIDTH), KvCache(1, 1, 16, "bf16", 4)
    first, second, own = table_of(1), table_of(2), table_of(3)
    ids = random.integers(0, VOCAB, num_tokens)
    for column, table in ((0, first), (WIDTH, second)):
        keeper(team, isa, table, kept, column).run(step(ids.tolist(), []), cache)
    assert kept.num_rows == num_tokens
    norm = 1 + random.standard_normal(WIDTH).astype(np.float32) / 4
    matrix = np.ascontiguousarray(random.standard_normal((COLUMNS, 3 * WIDTH), np.float32))
    program = Program(team, isa, VOCAB)
    embedded = program.add_buffer("f32", WIDTH, False)
    joined = program.add_buffer("f32", 3 * WIDTH, False)
    taken = program.add_buffer("f32", 3 * WIDTH, True)
    converted = program.add_buffer("bf16", 3 * WIDTH, True)
    program.add_embed_plain(own.reshape(-1).view(np.uint8), "f32", embedded)
    program.add_join(
        [
            (embedded, 0, WIDTH, [], 0.0),
            (-1, 0, WIDTH, norm.tolist(), EPS),
            (-1, WIDTH, WIDTH, [], 0.0),
        ],
        kept,
        joined,
    )
    program.add_take_rows(joined, taken)
    program.add_convert(taken, converted)
    program.set_head(packed(matrix), converted)
    rows = random.integers(0, num_tokens, 9).astype(np.int32)
    own_ids = random.integers(0, VOCAB, 9)
    logit_rows = [0, 4, 8]
    columns, shares = np.empty(3, np.int64), np.empty(3, np.float32)
    program.run_greedy(step(own_ids.tolist(), logit_rows), rows, cache, columns, shares)
    scale = np.sqrt(np.mean(first**2, axis=1, keepdims=True) + EPS)
    normed = first / scale * norm
    sides = (own[own_ids], normed[ids[rows]], second[ids[rows]])
    scores = np.concatenate(sides, axis=1)[logit_rows].astype(np.float64) @ matrix.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_array_equal(columns, scores.argmax(axis=1))
    np.testing.assert_allclose(shares, 1 / weights.sum(axis=1), rtol=0.15)


def test_rows_stay_while_more_are_kept() -> None:
    """A step may read the rows of the one before, and keeps more of its own."""
    team, kept, cache = ThreadTeam(1), KeptRows(WIDTH), KvCache(1, 1, 16, "bf16", 4)
    table = table_of(1)
    isa = supported_isas()[-1]
    keeper(team, isa, table, kept, 0).run(step([7], []), cache)
    program = Program(team, isa, VOCAB)
    rows = program.add_buffer("f32", WIDTH, False)
    taken, converted = (program.add_buffer(f, WIDTH, True) for f in ("f32", "bf16"))
    program.add_join([(-1, 0, WIDTH, [], 0.0)], kept, rows)
    program.add_take_rows(rows, taken)
    program.add_keep_rows(taken, kept, 0)
    program.add_convert(taken, converted)
    program.set_head(packed(table), converted)
    count = 60
    columns, shares = np.empty(count, np.int64), np.empty(count, np.float32)
    arrays = step([0] * count, list(range(count)))
    program.run_greedy(arrays, np.zeros(count, np.int32), cache, columns, shares)
    assert kept.num_rows == count
    assert (columns == columns[0]).all()
    assert (shares == shares[0]).all()


def test_programs_that_make_no_sense_are_refused() -> None:
    team, kept, cache = ThreadTeam(1), KeptRows(WIDTH), KvCache(1, 1, 16, "bf16", 4)
    program = Program(team, supported_isas()[-1], VOCAB)
    rows = program.add_buffer("f32", WIDTH, False)
    narrow = program.add_buffer("bf16", 16, False)
    for parts, given, out, message in (
        ([(-1, 1, WIDTH, [], 0.0)], kept, rows, "outside the kept rows"),
        ([(-1, 0, WIDTH, [], 0.0)], None, rows, "outside the kept rows"),
        ([(rows, 0, 16, [], 0.0)], kept, narrow, "another width than its buffer"),
        ([(narrow, 0, 16, [], 0.0)], kept, narrow, "not float rows"),
        ([(-1, 0, WIDTH, [1.0], EPS)], kept, rows, "norm has another width"),
        ([(-1, 0, 16, [], 0.0)], kept, rows, "do not fill the row"),
        ([(9, 0, WIDTH, [], 0.0)], kept, rows, "no such buffer"),
    ):
        with pytest.raises(ValueError, match=message):
            program.add_join(parts, given, out)
    with pytest.raises(ValueError, match="do not fit the kept ones"):
        program.add_keep_rows(rows, kept, 1)
    with pytest.raises(ValueError, match="width of at least 1"):
        KeptRows(0)
    program.add_join([(-1, 0, WIDTH, [], 0.0)], kept, rows)
    with pytest.raises(ValueError, match="reads kept rows"):
        program.run(step([1], []), cache)
    nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    with pytest.raises(ValueError, match="no head"):
        program.run_greedy(step([1], []), np.zeros(1, np.int32), cache, *nothing)


@pytest.mark.parametrize("format_name", ["bf16", "int8"])
def test_blocks_share_a_wire(format_name: str) -> None:
    first, second = (KvCache(layers, 2, 16, format_name, 6) for layers in (3, 1))
    sizes = [first.bytes_per_block, second.bytes_per_block]
    stride = sum(sizes)
    wire = np.random.default_rng(1).integers(0, 256, 2 * stride, np.uint8)
    ids = [4, 2]
    first.import_blocks(ids, wire.data, 0, stride)
    second.import_blocks(ids, wire.data, sizes[0], stride)
    back = bytearray(2 * stride)
    first.export_blocks(ids, back, stride=stride)
    second.export_blocks(ids, back, offset=sizes[0], stride=stride)
    assert bytes(back) == wire.tobytes()
    alone = bytearray(sizes[1])
    second.export_blocks([2], alone)
    assert bytes(alone) == wire[stride + sizes[0] :].tobytes()
    for offset, length in ((-1, stride), (sizes[0] + 1, stride), (0, sizes[1] - 1)):
        with pytest.raises(ValueError, match="place on the wire"):
            second.export_blocks(ids, back, offset, length)
    with pytest.raises(ValueError, match="bytes for 2 blocks"):
        second.export_blocks(ids, back[:-1], sizes[0], stride)
