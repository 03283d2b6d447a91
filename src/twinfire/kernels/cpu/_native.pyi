"""The extension module, built from `csrc/`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twinfire.cache.kv_group import WireBuffer, WireBytes

Int32Array = npt.NDArray[np.int32]
StepArrays = tuple[
    Int32Array,
    Int32Array,
    Int32Array,
    Int32Array,
    Int32Array,
    Int32Array,
    Int32Array,
    Int32Array,
]
"""The arrays of a `StepBatch`, in its order."""

kernel_version: str
"""Changes whenever a kernel's source or the compiler does: equal versions compute equal bits."""

def isa() -> str:
    """Return the greatest instruction set that this processor has kernels for."""

def supported_isas() -> list[str]:
    """Return every usable instruction set, the least first."""

class ThreadTeam:
    """Threads that compute steps; one of them is the caller's. One step at a time."""

    def __init__(
        self,
        num_threads: int,
        spin_us: int = 50,
        num_own_threads: int | None = None,
        load_file: str = "/proc/loadavg",
    ) -> None:
        """Threads beyond `num_own_threads` compute only where a core would be idle otherwise.

        That is told by `load_file`. None: all are the team's own. ValueError without one.
        """
    @property
    def num_threads(self) -> int:
        """The caller's included, and those that only use idle cores."""
    @property
    def num_own_threads(self) -> int:
        """Those that always compute."""

    def count_tiles(self, num_phases: int, tiles_per_phase: int, tile_us: int) -> list[int]:
        """Run tiles that take `tile_us` microseconds; return how many each thread ran."""

    def measure_phases(self, num_phases: int, tiles_per_phase: int) -> tuple[float, int]:
        """Run empty tiles; return (microseconds per phase, tiles run)."""

    def measure_read(self, content: npt.NDArray[np.uint8]) -> float:
        """Return the seconds that all threads take to read `content` once.

        ValueError unless its size is a multiple of 256 bytes.
        """

def allocate_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory that starts at a page, in huge pages where the system has them."""

class PackedMatrix:
    """A matrix [n, k] in panels, a view of memory that it keeps alive.

    Formats are bf16, int8, q8_0, q4_0 and q4_1. A `gated` matrix is [gate; up], n rows together.
    """

    def __init__(
        self,
        format: str,
        n: int,
        k: int,
        gated: bool,
        has_bias: bool,
        panels: npt.NDArray[np.uint8],
    ) -> None:
        """ValueError when `panels` has another size or does not start at 64 bytes."""

    @staticmethod
    def num_bytes_of(
        format: str, n: int, k: int, gated: bool = False, has_bias: bool = False
    ) -> int:
        """Return the bytes of the panels of such a matrix."""
    @property
    def format(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def num_panels(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def out_columns(self) -> int:
        """Width of a product: n / 2 for a gated matrix."""
    @property
    def input_format(self) -> str:
        """Format of the activation rows that it multiplies."""

def pack_panels(
    matrix: PackedMatrix,
    panels: npt.NDArray[np.uint8],
    parts: Sequence[tuple[str, npt.NDArray[np.uint8]]],
    bias: npt.NDArray[np.float32] | None,
    first_panel: int,
    last_panel: int,
    isa: str | None = None,
) -> None:
    """Write panels [first, last) from rows as they lie on disk, without the GIL.

    `parts` are (format, bytes), one above the other: f32, f16, bf16, q8_0, q4_0 or q4_1. A block
    format that is that of the matrix is only reordered; all others go through float32.
    ValueError when sizes do not fit.
    """

def row_to_f32(
    matrix: PackedMatrix, row: int, out: npt.NDArray[np.float32], isa: str | None = None
) -> None:
    """Write row `row` of the unpacked matrix to `out` [k]."""

def activation_row_bytes(format: str, k: int) -> int:
    """Return the bytes of a row of k values as f32, bf16, int8 or int8_groups."""

def write_activation_rows(
    x: npt.NDArray[np.float32],
    format: str,
    out: npt.NDArray[np.uint8],
    isa: str | None = None,
) -> None:
    """Write rows [R, k] to `out` [R, row bytes]."""

def gemm(
    matrix: PackedMatrix,
    rows: npt.NDArray[np.uint8],
    epilogue: str,
    out: npt.NDArray[np.uint8],
    team: ThreadTeam | None = None,
    isa: str | None = None,
) -> None:
    """Multiply activation rows [R, row bytes] into `out` [R, row bytes], on the caller's thread
    or on a team.

    Epilogues: store_bf16, store_f32, add_f32 (out += y), and for a gated matrix silu_mul_f32,
    silu_mul_bf16 and silu_mul_int8_groups.
    """

class KvCache:
    """The memory of `num_blocks` KV blocks of 32 tokens, zeroed; `format` is bf16 or int8."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, format: str, num_blocks: int
    ) -> None:
        """ValueError unless `head_dim` is a multiple of 16."""
    @property
    def memory_bytes(self) -> int: ...
    @property
    def bytes_per_block(self) -> int:
        """Of the wire layout, and in memory as well."""

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy block `pairs[:, 0]` to block `pairs[:, 1]`, one after the other."""

    def populate(self, first: int, count: int) -> None:
        """Take the pages of blocks [first, first + count) from the system, without the GIL.

        Changes nothing, nor does anything where the system cannot do so (before Linux 5.14).
        ValueError unless all of them are blocks, at least one.
        """

    def export_blocks(
        self,
        block_ids: Sequence[int],
        into: WireBuffer,
        offset: int = 0,
        stride: int | None = None,
    ) -> None:
        """Write the blocks to `into` in the canonical wire layout.

        In int8 a block's float32 scales, one for each head and token, follow its elements. The
        first begins at byte `offset`, each `stride` bytes after the one before; None: its own size.
        ValueError on a block that is none and when the size does not fit.
        """

    def import_blocks(
        self,
        block_ids: Sequence[int],
        content: WireBytes,
        offset: int = 0,
        stride: int | None = None,
    ) -> None:
        """Fill blocks from what `export_blocks` wrote; ValueError likewise."""

class Attention:
    """Attention by itself, for tests and benchmarks."""

    def __init__(self, team: ThreadTeam, isa: str, cache: KvCache, num_heads: int) -> None: ...
    def __call__(
        self,
        layers: Sequence[int],
        fused: npt.NDArray[np.float32],
        slots: npt.NDArray[np.int32],
        query_starts: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        *,
        scale: float,
        window: int = 0,
        query_norm: npt.NDArray[np.float32] | None = None,
        key_norm: npt.NDArray[np.float32] | None = None,
        norm_eps: float = 0.0,
        rope_factors: npt.NDArray[np.float32] | None = None,
        as_bf16: bool = False,
    ) -> npt.NDArray[np.uint8]:
        """Store the rows' keys and values and attend, in one layer after the other.

        `fused` is [tokens, q heads + k heads + v heads]. Returns the last layer's rows: float32
        [tokens, query width], or bf16 padded to a multiple of 32 columns.
        """

def rms_norm(
    isa: str,
    residual: npt.NDArray[np.float32],
    added: npt.NDArray[np.float32] | None,
    weight: npt.NDArray[np.float32],
    eps: float,
    format: str,
) -> npt.NDArray[np.uint8]:
    """Add to the residual in place; return its normed rows in a row format."""

def silu_mul(isa: str, gate_up: npt.NDArray[np.float32], format: str) -> npt.NDArray[np.uint8]:
    """Return silu(first half) * second half of each row in a row format."""

def convert_rows(isa: str, rows: npt.NDArray[np.float32], format: str) -> npt.NDArray[np.uint8]:
    """Return rows in a row format."""

def embed_f32(
    isa: str, table: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return rows of a table."""

def embed_f16(
    isa: str, table: npt.NDArray[np.uint16], ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return rows of a table that holds the bits of float16."""

def embed_bf16(
    isa: str, table: npt.NDArray[np.uint16], ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return rows of a table that holds the bits of bfloat16."""

def take_rows(
    rows: npt.NDArray[np.float32], indices: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return the rows at `indices`."""

def rope_factors(
    positions: npt.NDArray[np.int32], inv_freq: npt.NDArray[np.float32], attention_factor: float
) -> npt.NDArray[np.float32]:
    """Return [positions, head_dim]: the cosines of a position's angles, then the sines."""

def argmax(isa: str, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the id of each row's largest value, the lowest one among equals."""

def top_k(
    isa: str, logits: npt.NDArray[np.float32], k: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the k largest of each row and their ids, the lowest id first among equals."""

def logsumexp(isa: str, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return log(sum(exp(row))) of each row."""

def keep_allowed(
    isa: str, logits: npt.NDArray[np.float32], allowed: npt.NDArray[np.uint32]
) -> None:
    """Set one row to minus infinity where bit i % 32 of `allowed[i // 32]` is 0."""

class KeptRows:
    """Float rows [rows, width] that one program keeps for the next step of another."""

    def __init__(self, width: int) -> None: ...
    @property
    def width(self) -> int: ...
    @property
    def num_rows(self) -> int:
        """Of the last step that kept some."""

class Program:
    """A model's step as nodes that run in the order in which they were added.

    Buffers hold rows between nodes: float32, bf16, int8 or int8_groups, one row per token or one
    per logit row. Weights and tables that are passed stay alive with the program.
    """

    def __init__(self, team: ThreadTeam, isa: str, vocab_size: int) -> None: ...
    def add_buffer(self, format: str, width: int, per_logit_row: bool) -> int:
        """Return the number of a new buffer."""

    def add_rope(self, inv_freq: Sequence[float], attention_factor: float) -> int:
        """Return the number of a new rotary table."""

    def add_embed_packed(self, table: PackedMatrix, out: int) -> None:
        """Read rows of a packed table."""

    def add_embed_plain(self, table: npt.NDArray[np.uint8], format: str, out: int) -> None:
        """Read rows of an f32, f16 or bf16 table as it lies on disk."""

    def add_norm(self, rows: int, weight: Sequence[float], eps: float, out: int) -> None:
        """Norm float rows into any form."""

    def add_convert(self, rows: int, out: int) -> None:
        """Write float rows in another form."""

    def add_join(
        self,
        parts: Sequence[tuple[int, int, int, Sequence[float], float]],
        kept: KeptRows | None,
        out: int,
    ) -> None:
        """Write pieces side by side as rows of any form.

        A piece is (buffer of float rows, first column, width, norm's weight, norm's eps). Buffer -1
        is `kept`, of which each token reads the row that `run_greedy` names, from the first column
        on. An empty weight is no norm.
        """

    def add_keep_rows(self, rows: int, kept: KeptRows, column: int) -> None:
        """Copy float rows to `kept`, from `column` on."""

    def add_take_rows(self, rows: int, out: int) -> None:
        """Copy the rows whose logits the step wants."""

    def add_gemm(
        self, matrix: PackedMatrix, rows: int, epilogue: str, out: int, sole_reader: bool
    ) -> None:
        """Multiply. `sole_reader` says that no other node reads `rows`."""

    def add_attention(
        self,
        heads: tuple[int, int, int],
        layer: int,
        fused: int,
        query_norm: Sequence[float],
        key_norm: Sequence[float],
        norm_eps: float,
        rope: int | None,
        window: int,
        scale: float,
        out: int,
    ) -> None:
        """Norm (unless a norm is empty), turn and store the fused rows' heads, and attend.

        `heads` are query heads, KV heads and head_dim. `window` 0 means all keys.
        """

    def set_head(self, matrix: PackedMatrix, hidden: int) -> None:
        """Name the matrix and rows of `logits`."""

    def run(self, arrays: StepArrays, kv: KvCache, one_by_one: bool = False) -> None:
        """Compute a step without the GIL; ValueError when it makes no sense.

        With `one_by_one` every node is complete before the next one begins.
        """

    def run_greedy(
        self,
        arrays: StepArrays,
        kept_rows: Int32Array,
        kv: KvCache,
        columns: npt.NDArray[np.int64],
        shares: npt.NDArray[np.float32],
        one_by_one: bool = False,
    ) -> None:
        """Compute a step over kept rows, and the head's greatest score of each logit row.

        `kept_rows` has one row of the kept ones for each token. Writes the score's column, the
        lowest among equals, and its share of the softmax. As `run` otherwise.
        """

    def profile(self, arrays: StepArrays, kv: KvCache) -> list[tuple[str, float]]:
        """Compute a step phase by phase; return what each computes and the seconds it took."""

    def logits(self, start: int, stop: int, out: npt.NDArray[np.float32]) -> None:
        """Write the scores of the last step's logit rows [start, stop)."""

    @property
    def num_nodes(self) -> int:
        """Nodes; one that is fused into its reader is not counted."""
    @property
    def num_phases(self) -> int:
        """Phases of the last step, each of which ends with a wait for all its tiles."""
    @property
    def buffer_bytes(self) -> int:
        """Memory of all buffers, which grows to what the largest step has needed."""
