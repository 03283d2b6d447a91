"""The container format of a GGUF file: metadata and where each tensor lies.

Parses the header itself, from the mapping: a vocabulary of 49k tokens costs milliseconds, where
general readers build an array object per string and take seconds. Long arrays are only walked
over until somebody asks for them. Knows no architecture and no tensor content.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.fields import Fields
from twinfire.artifacts.mapped_file import FileRange, MappedFile
from twinfire.protocol.errors import ModelError

SUPPORTED_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
_MAGIC = b"GGUF"
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4"},
    **{_FLOAT32: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"},
}
_SCALAR_DTYPES = {type_id: np.dtype(code) for type_id, code in _SCALARS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata that has been walked over, not read."""

    item_type: int
    length: int
    offset: int

    def __repr__(self) -> str:
        return f"an array of {self.length} items"


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """A tensor as the header lists it. `shape` has the rows first: [out, in] for a matrix."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    """Of its first byte in the file."""


class GgufFile:
    """An opened file: `fields` (metadata) and `tensors` by their GGUF names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = MappedFile(path)
        self.mapping = self.mapped.mapping
        reader = _HeaderReader(path, self.mapping)
        try:
            values, infos = reader.read()
        except (struct.error, OverflowError):
            raise ModelError(
                f"{path}: the header runs past the end of the file; it is truncated or damaged"
            ) from None
        self.fields = Fields(values, str(path))
        self.tensors = {info.name: info for info in infos}
        if len(self.tensors) != len(infos):
            raise ModelError(f"{path}: a tensor name is listed twice")

    def strings(self, name: str) -> list[str]:
        """Return an array of strings, empty when absent; ModelError when it is something else."""
        array = self._array(name)
        if array is None:
            return []
        if array.item_type != _STRING:
            raise self.fields.fault(name, "must be an array of strings")
        return _HeaderReader(self.path, self.mapping, array.offset).texts(array.length)

    def numbers(self, name: str) -> npt.NDArray[np.generic] | None:
        """Return an array of numbers as a mapped view, None when absent."""
        array = self._array(name)
        if array is None:
            return None
        dtype = _SCALAR_DTYPES.get(array.item_type)
        if dtype is None:
            raise self.fields.fault(name, "must be an array of numbers")
        return FileRange(self.mapped, array.offset, array.length * dtype.itemsize).array(dtype)

    def _array(self, name: str) -> GgufArray | None:
        value = self.fields.raw(name)
        if value is not None and not isinstance(value, GgufArray):
            raise self.fields.fault(name, "must be an array")
        return value


class _HeaderReader:
    """A position in the header. Every read beyond the file raises struct.error."""

    def __init__(self, path: Path, mapping: mmap.mmap, position: int = 0) -> None:
        self._path = path
        self._mapping = mapping
        self._position = position

    def read(self) -> tuple[dict[str, object], list[GgufTensorInfo]]:
        """Return metadata and tensor infos; ModelError on a file that is not GGUF."""
        if self._mapping[: len(_MAGIC)] != _MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file")
        self._position = len(_MAGIC)
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            raise ModelError(
                f"{self._path}: GGUF version {version} is not supported; "
                f"little-endian versions {SUPPORTED_VERSIONS} are"
            )
        num_tensors, num_values = self._u64(), self._u64()
        values: dict[str, object] = {}
        for _ in range(num_values):
            name = self.text()
            values[name] = self._value(self._u32(), name)
        infos = list(self._tensor_infos(num_tensors))
        return values, self._place(infos, values)

    def text(self) -> str:
        """Return the string at the position."""
        (text,) = self.texts(1)
        return text

    def texts(self, count: int) -> list[str]:
        """Return the strings from the position on."""
        ends = list(self._string_ends(count))
        mapping, size = self._mapping, _U64.size
        starts = [self._position, *ends[:-1]]
        self._position = ends[-1] if ends else self._position
        self._skip(0)
        return [
            mapping[start + size : end].decode("utf-8", errors="replace")
            for start, end in zip(starts, ends, strict=True)
        ]

    def _value(self, type_id: int, name: str) -> object:
        if type_id == _STRING:
            return self.text()
        if type_id == _ARRAY:
            return self._array(name)
        dtype = _SCALAR_DTYPES.get(type_id)
        if dtype is None:
            raise ModelError(f"{self._path}: field '{name}' has the unknown type {type_id}")
        start = self._position
        self._skip(dtype.itemsize)
        value = np.frombuffer(self._mapping, dtype, 1, start)[0]
        if type_id == _BOOL:
            return bool(value)
        # The shortest decimal of a float32 is what the model's author wrote: 1e-05, not 9.99e-06.
        return float(str(value)) if type_id == _FLOAT32 else value.item()

    def _array(self, name: str) -> GgufArray:
        item_type, length = self._u32(), self._u64()
        array = GgufArray(item_type, length, self._position)
        if item_type == _STRING:
            for end in self._string_ends(length):
                self._position = end
            self._skip(0)
        elif item_type in _SCALAR_DTYPES:
            self._skip(length * _SCALAR_DTYPES[item_type].itemsize)
        else:
            raise ModelError(
                f"{self._path}: field '{name}' is an array of the unsupported type {item_type}"
            )
        return array

    def _string_ends(self, count: int) -> Iterator[int]:
        # A vocabulary has a hundred thousand strings: no calls of our own for each.
        mapping, position, unpack, size = self._mapping, self._position, _U64.unpack_from, _U64.size
        for _ in range(count):
            position += size + unpack(mapping, position)[0]
            yield position

    def _tensor_infos(self, count: int) -> Iterator[GgufTensorInfo]:
        for _ in range(count):
            name = self.text()
            num_dimensions = self._u32()
            if num_dimensions > MAX_DIMENSIONS:
                raise ModelError(
                    f"{self._path}: tensor '{name}' has {num_dimensions} dimensions; "
                    f"the limit is {MAX_DIMENSIONS}"
                )
            fastest_first = [self._u64() for _ in range(num_dimensions)]
            type_id = self._u32()
            yield GgufTensorInfo(name, tuple(reversed(fastest_first)), type_id, self._u64())

    def _place(
        self, infos: list[GgufTensorInfo], values: dict[str, object]
    ) -> list[GgufTensorInfo]:
        """Turn offsets within the data section into offsets within the file."""
        alignment = Fields(values, str(self._path)).integer("general.alignment", default=32)
        data_start = -(-self._position // alignment) * alignment
        return [
            GgufTensorInfo(info.name, info.shape, info.type_id, data_start + info.offset)
            for info in infos
        ]

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._mapping, self._position)
        self._position += _U32.size
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._mapping, self._position)
        self._position += _U64.size
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        self._position += num_bytes
        if self._position > len(self._mapping):
            raise struct.error("beyond the end of the file")
