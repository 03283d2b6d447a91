"""Tensors of a Hugging Face folder: one safetensors file, or shards listed by an index.

Reads the header itself, because the format's own library cannot give bf16 to numpy, and trusts
nothing in it: sizes, ranges and overlaps are checked before any tensor is handed out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from twinfire.artifacts.block_formats import FLOAT_FORMATS
from twinfire.artifacts.fields import read_json_fields
from twinfire.artifacts.mapped_file import FileRange, MappedFile
from twinfire.artifacts.tensors import MappedTensor
from twinfire.protocol.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}

INTEGER_TYPES: dict[str, np.dtype[np.generic]] = {
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2")},
    **{"I8": np.dtype("i1"), "U8": np.dtype("u1"), "BOOL": np.dtype("u1")},
}
"""Types of tensors that hold numbers of things; how each lies in a file."""
_BODY = "model."
_BARE_EMBEDDING = "embed_tokens.weight"
"""Folders of a model without its head lack the prefix in every name."""


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor and where its bytes are."""

    entry: _HeaderEntry
    place: FileRange

    @property
    def path(self) -> Path:
        return self.place.file.path


class SafetensorsSource:
    """A WeightSource over the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, _Placed] = {}
        for path, names in _shards(folder).items():
            found = _read_file(path)
            for name in found if names is None else names:
                if name not in found:
                    raise ModelError(f"{folder / INDEX_FILE}: {path.name} has no tensor '{name}'")
                self._tensors[name] = found[name]
        if _BARE_EMBEDDING in self._tensors:
            self._tensors = {_BODY + name: placed for name, placed in self._tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that the tensors lie in."""
        return tuple(dict.fromkeys(placed.path for placed in self._tensors.values()))

    def forget_pages(self) -> None:
        """Let the memory go that reading tensors took."""
        for file in {placed.place.file for placed in self._tensors.values()}:
            file.forget_pages()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(placed.place.num_bytes for placed in self._tensors.values())

    @property
    def main_format(self) -> str:
        """The format that most bytes are in: f32, f16 or bf16, or another's name in lower case."""
        sizes: dict[str, int] = {}
        for placed in self._tensors.values():
            sizes[placed.entry.dtype] = sizes.get(placed.entry.dtype, 0) + placed.place.num_bytes
        dtype = max(sizes, key=lambda name: sizes[name])
        return _FORMATS.get(dtype, dtype.lower())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without touching its content; ModelError when missing."""
        return self._placed(name).entry.shape

    def tensor(self, name: str) -> MappedTensor:
        """Return a tensor; ModelError when it is missing or of a format that is not read."""
        placed = self._placed(name)
        format_name = _FORMATS.get(placed.entry.dtype)
        if format_name is None:
            raise ModelError(
                f"{placed.path}: tensor '{name}' has type {placed.entry.dtype}; "
                f"supported are {', '.join(_FORMATS)}"
            )
        dtype = FLOAT_FORMATS[format_name]
        shape = placed.entry.shape
        raw = placed.place.array(dtype).reshape(shape)
        return MappedTensor(name, shape, format_name, raw, placed.place)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a tensor of integers or booleans; ModelError when it is missing or neither."""
        placed = self._placed(name)
        dtype = INTEGER_TYPES.get(placed.entry.dtype)
        if dtype is None:
            raise ModelError(
                f"{placed.path}: tensor '{name}' has type {placed.entry.dtype}; "
                f"expected one of {', '.join(INTEGER_TYPES)}"
            )
        return placed.place.array(dtype).reshape(placed.entry.shape).astype(np.int64)

    def _placed(self, name: str) -> _Placed:
        placed = self._tensors.get(name)
        if placed is None:
            raise ModelError(f"the checkpoint has no tensor '{name}'")
        return placed


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Return each file with the tensors that the index expects there; None for all it has."""
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        return {_only_file(folder): None}
    weight_map = read_json_fields(index_path).nested("weight_map")
    if weight_map is None:
        raise ModelError(f"{index_path}: field 'weight_map' is missing")
    shards: dict[Path, list[str] | None] = {}
    for name in weight_map:
        file_name = weight_map.text(name)
        if Path(file_name).name != file_name:
            raise ModelError(f"{index_path}: '{file_name}' is not a plain file name")
        names = shards.setdefault(folder / file_name, [])
        if names is not None:
            names.append(name)
    if not shards:
        raise ModelError(f"{index_path}: 'weight_map' names no tensor")
    return shards


def _only_file(folder: Path) -> Path:
    single = folder / SINGLE_FILE
    if single.is_file():
        return single
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    raise ModelError(
        f"{folder} has no weights that can be read: expected {SINGLE_FILE}, or shards with "
        f"{INDEX_FILE} ({len(others)} other .safetensors files found; "
        "pytorch_model.bin is not read, convert it to safetensors)"
    )


def _read_file(path: Path) -> dict[str, _Placed]:
    file = MappedFile(path)
    mapping = file.mapping
    if len(mapping) < _LENGTH_BYTES:
        raise ModelError(f"{path}: {len(mapping)} bytes are too few for a safetensors file")
    header_bytes = int.from_bytes(mapping[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelError(f"{path}: header of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    if data_start > len(mapping):
        raise ModelError(
            f"{path}: header of {header_bytes} bytes does not fit the file's {len(mapping)}; "
            "the file is truncated or not in the safetensors format"
        )
    placed = {
        name: _place(file, name, entry, data_start)
        for name, entry in _decode_header(path, mapping[_LENGTH_BYTES:data_start]).items()
    }
    _refuse_overlaps(path, placed)
    return placed


def _decode_header(path: Path, header: bytes) -> dict[str, _HeaderEntry]:
    try:
        raw_entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw_entries.pop("__metadata__", None)
        return {
            name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in raw_entries.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is not valid: {error}") from None


def _place(file: MappedFile, name: str, entry: _HeaderEntry, data_start: int) -> _Placed:
    path, file_bytes = file.path, len(file.mapping)
    begin, end = entry.data_offsets
    if min(0, begin, *entry.shape) < 0:
        raise ModelError(f"{path}: tensor '{name}' has a negative size or offset")
    if end < begin or data_start + end > file_bytes:
        raise ModelError(
            f"{path}: tensor '{name}' lies at bytes [{begin}, {end}) of "
            f"{file_bytes - data_start}; the file is truncated or damaged"
        )
    item_bytes = _ITEM_BYTES.get(entry.dtype)
    size_bytes = end - begin
    if item_bytes is not None and math.prod(entry.shape) * item_bytes != size_bytes:
        raise ModelError(
            f"{path}: tensor '{name}' of shape {list(entry.shape)} and type {entry.dtype} "
            f"takes {math.prod(entry.shape) * item_bytes} bytes, but its range has {size_bytes}"
        )
    return _Placed(entry, FileRange(file, data_start + begin, size_bytes))


def _refuse_overlaps(path: Path, tensors: dict[str, _Placed]) -> None:
    end, last = 0, ""
    for name, placed in sorted(tensors.items(), key=lambda item: (item[1].place.offset, item[0])):
        if placed.place.num_bytes == 0:
            continue
        if placed.place.offset < end:
            raise ModelError(f"{path}: tensors '{last}' and '{name}' overlap")
        end, last = placed.place.offset + placed.place.num_bytes, name
