"""Tensors of a GGUF file under their Hugging Face names and in the Hugging Face row order.

Owns the name map and the undoing of the row permutation that llama-type GGUFs carry in q and k
(they rotate neighbouring pairs, Hugging Face rotates halves). Blocks run along a row, so rows
can be reordered without dequantising them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.block_formats import BLOCK_FORMATS, FLOAT_FORMATS, SUPPORTED_FORMATS
from twinfire.artifacts.gguf_file import GgufFile, GgufTensorInfo
from twinfire.artifacts.mapped_file import FileRange
from twinfire.artifacts.tensors import MappedTensor, halves_in_order
from twinfire.protocol.errors import ModelError

ROPE_FREQS = "rope_freqs.weight"
"""Llama 3's rope scaling as a tensor; the config is read from it and no layer needs it."""

_TYPE_FORMATS = {
    **{0: "f32", 1: "f16", 30: "bf16"},
    **{2: "q4_0", 3: "q4_1", 8: "q8_0", 12: "q4_k", 14: "q6_k"},
}
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


@dataclass(frozen=True, slots=True)
class _Source:
    info: GgufTensorInfo
    format: str
    size_bytes: int


class GgufSource:
    """A WeightSource over one GGUF file.

    `rotated_heads` gives, per projection (`q_proj`, `k_proj`), the number of heads whose rows the
    file has permuted; empty where the file keeps the Hugging Face order.
    """

    def __init__(self, file: GgufFile, rotated_heads: dict[str, int]) -> None:
        self._file = file
        self._rotated_heads = rotated_heads
        self._tensors: dict[str, _Source] = {}
        for info in file.tensors.values():
            if not _IGNORED.fullmatch(info.name):
                self._tensors[_hugging_face_name(file, info.name)] = _checked(file, info)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(source.size_bytes for source in self._tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without touching its content; ModelError when missing."""
        return self._source(name).info.shape

    def tensor(self, name: str) -> MappedTensor:
        """Return a tensor; ModelError when it is missing."""
        source = self._source(name)
        raw, place = _raw(self._file, source), _place(self._file, source)
        num_heads = self._rotated_heads.get(name.split(".")[-2], 0) if "." in name else 0
        if num_heads:
            raw = halves_in_order(raw, num_heads)
        return MappedTensor(name, source.info.shape, source.format, raw, place, num_heads)

    def _source(self, name: str) -> _Source:
        source = self._tensors.get(name)
        if source is None:
            raise ModelError(f"{self._file.path} has no tensor '{name}'")
        return source


def main_format(file: GgufFile) -> str:
    """Return the format that most bytes of the file are in; ModelError when it is not read."""
    sizes: dict[str, int] = {}
    for info in file.tensors.values():
        source = _checked(file, info)
        sizes[source.format] = sizes.get(source.format, 0) + source.size_bytes
    if not sizes:
        raise ModelError(f"{file.path} has no tensors")
    return max(sizes, key=lambda name: sizes[name])


def read_float_tensor(file: GgufFile, name: str) -> npt.NDArray[np.float32] | None:
    """Return a tensor by its GGUF name as float32, None when the file has none."""
    info = file.tensors.get(name)
    if info is None:
        return None
    source = _checked(file, info)
    return MappedTensor(name, info.shape, source.format, _raw(file, source)).to_float32()


def _hugging_face_name(file: GgufFile, name: str) -> str:
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{int(layer[1])}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER_NAMES and kind == "weight":
        return f"{_OUTER_NAMES[stem]}.weight"
    raise ModelError(
        f"{file.path}: tensor '{name}' belongs to no supported architecture; "
        "computing without it would give wrong text"
    )


def _checked(file: GgufFile, info: GgufTensorInfo) -> _Source:
    """Return where a tensor lies; ModelError on an unsupported type or a range outside the file."""
    format_name = _TYPE_FORMATS.get(info.type_id)
    if format_name is None:
        raise ModelError(
            f"{file.path}: tensor '{info.name}' has type {_type_name(info.type_id)}; "
            f"supported are {', '.join(SUPPORTED_FORMATS)}"
        )
    num_values = math.prod(info.shape)
    if format_name in FLOAT_FORMATS:
        size_bytes = num_values * FLOAT_FORMATS[format_name].itemsize
    else:
        block = BLOCK_FORMATS[format_name]
        if not info.shape or info.shape[-1] % block.values:
            raise ModelError(
                f"{file.path}: rows of tensor '{info.name}' of shape {list(info.shape)} are not "
                f"whole {format_name} blocks of {block.values} values"
            )
        size_bytes = num_values // block.values * block.size_bytes
    if info.offset + size_bytes > len(file.mapping):
        raise ModelError(
            f"{file.path}: tensor '{info.name}' ends at byte {info.offset + size_bytes} of "
            f"{len(file.mapping)}; the file is truncated"
        )
    return _Source(info, format_name, size_bytes)


def _place(file: GgufFile, source: _Source) -> FileRange:
    return FileRange(file.mapped, source.info.offset, source.size_bytes)


def _raw(file: GgufFile, source: _Source) -> npt.NDArray[np.generic]:
    shape, place = source.info.shape, _place(file, source)
    if source.format in FLOAT_FORMATS:
        return place.array(FLOAT_FORMATS[source.format]).reshape(shape)
    return place.array(np.dtype(np.uint8)).reshape(math.prod(shape[:-1]), -1)


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(type_id).name.lower()
    except ValueError:
        return f"number {type_id}"
