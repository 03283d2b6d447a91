"""Tensors of a `pytorch_model.bin`, read without torch and without running what it holds.

Such a file is a zip of one pickle and the tensors' bytes. The pickle may name the few things that
rebuild a tensor and nothing else; any other name refuses the file, before it is looked up.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.block_formats import FLOAT_FORMATS
from twinfire.artifacts.mapped_file import FileRange, MappedFile
from twinfire.artifacts.safetensors_source import INTEGER_TYPES
from twinfire.artifacts.tensors import MappedTensor
from twinfire.protocol.errors import ModelError

TORCH_FILE = "pytorch_model.bin"
MAX_PICKLE_BYTES = 16 << 20
"""A head has some dozens of tensors; a pickle that describes them takes kilobytes."""
_HOW_TO_CONVERT = (
    "convert it: safetensors.torch.save_file(torch.load(path, weights_only=True), "
    "'model.safetensors')"
)
_FLOATS = {"FloatStorage": "f32", "HalfStorage": "f16", "BFloat16Storage": "bf16"}
_INTEGERS = {
    **{"LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16"},
    **{"CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL"},
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, then the lengths of name and extra field (APPNOTE.TXT 4.3.7)."""
_SIGNATURE = b"PK\x03\x04"
_BROKEN_ZIP = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError),
    *(ValueError, OSError, EOFError, struct.error),
)
_BROKEN_PICKLE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, AttributeError),
    *(IndexError, ImportError, RecursionError, OverflowError, MemoryError, struct.error),
)


@dataclass(frozen=True, slots=True)
class _ElementType:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    element: str


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """What the pickle says of one tensor. Sizes in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]


class TorchFileSource:
    """A WeightSource over one file that torch saved; ModelError says what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = MappedFile(path)
        try:
            self._entries = _stored_entries(path, self._file)
        except _BROKEN_ZIP as error:
            raise ModelError(
                f"{path} is no zip file, as torch writes since 1.6 ({error}); {_HOW_TO_CONVERT}"
            ) from None
        root = next((name[:-8] for name in self._entries if name.endswith("data.pkl")), None)
        if root is None:
            raise ModelError(f"{path} holds no data.pkl; {_HOW_TO_CONVERT}")
        self._root = root
        order = self._entries.get(f"{root}byteorder")
        if order is not None and order.copy().tobytes() != b"little":
            raise ModelError(f"{path} is not little-endian; {_HOW_TO_CONVERT}")
        self._tensors = _unpickled(path, self._entries[f"{root}data.pkl"])

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of the file."""
        return len(self._file.mapping)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; ModelError when missing."""
        return self._rebuilt(name).shape

    def tensor(self, name: str) -> MappedTensor:
        """Return a tensor; ModelError when it is missing, cut off, or not of floats."""
        rebuilt = self._rebuilt(name)
        format_name = _FLOATS.get(rebuilt.storage.element)
        if format_name is None:
            raise self._wrong_type(name, rebuilt, _FLOATS)
        dtype = FLOAT_FORMATS[format_name]
        place = self._place(name, rebuilt, dtype.itemsize)
        raw = place.array(dtype).reshape(rebuilt.shape)
        return MappedTensor(name, rebuilt.shape, format_name, raw, place)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a tensor of integers or booleans; ModelError when it is missing or neither."""
        rebuilt = self._rebuilt(name)
        type_name = _INTEGERS.get(rebuilt.storage.element)
        if type_name is None:
            raise self._wrong_type(name, rebuilt, _INTEGERS)
        dtype = INTEGER_TYPES[type_name]
        place = self._place(name, rebuilt, dtype.itemsize)
        return place.array(dtype).reshape(rebuilt.shape).astype(np.int64)

    def _rebuilt(self, name: str) -> _Rebuilt:
        rebuilt = self._tensors.get(name)
        if rebuilt is None:
            raise ModelError(f"{self._path} has no tensor '{name}'")
        return rebuilt

    def _wrong_type(self, name: str, rebuilt: _Rebuilt, known: dict[str, str]) -> ModelError:
        return ModelError(
            f"{self._path}: tensor '{name}' is of {rebuilt.storage.element}; "
            f"expected one of {', '.join(known)}"
        )

    def _place(self, name: str, rebuilt: _Rebuilt, item_bytes: int) -> FileRange:
        entry = self._entries.get(f"{self._root}data/{rebuilt.storage.key}")
        start = rebuilt.offset * item_bytes
        num_bytes = math.prod(rebuilt.shape) * item_bytes
        if entry is None or start + num_bytes > entry.num_bytes:
            raise ModelError(
                f"{self._path}: tensor '{name}' of shape {list(rebuilt.shape)} needs bytes "
                f"[{start}, {start + num_bytes}) of data/{rebuilt.storage.key}, which has "
                f"{0 if entry is None else entry.num_bytes}"
            )
        return FileRange(self._file, entry.offset + start, num_bytes)


def _stored_entries(path: Path, file: MappedFile) -> dict[str, FileRange]:
    """Return where each entry's content lies; torch compresses none."""
    entries: dict[str, FileRange] = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ModelError(f"{path}: '{info.filename}' is compressed; {_HOW_TO_CONVERT}")
            header = file.mapping[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
            if info.header_offset < 0 or len(header) < _LOCAL_HEADER.size:
                raise ModelError(f"{path} is truncated at '{info.filename}'")
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            offset = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            if signature != _SIGNATURE or offset + info.file_size > len(file.mapping):
                raise ModelError(f"{path} is damaged at '{info.filename}'")
            entries[info.filename] = FileRange(file, offset, info.file_size)
    return entries


def _unpickled(path: Path, place: FileRange) -> dict[str, _Rebuilt]:
    if place.num_bytes > MAX_PICKLE_BYTES:
        raise ModelError(
            f"{path}: data.pkl has {place.num_bytes} bytes; the limit is {MAX_PICKLE_BYTES}"
        )
    try:
        state = _TensorUnpickler(io.BytesIO(place.copy().tobytes())).load()
    except _BROKEN_PICKLE as error:
        raise ModelError(
            f"{path}: data.pkl is not a plain set of tensors ({error}); {_HOW_TO_CONVERT}"
        ) from None
    if not isinstance(state, dict):
        raise ModelError(f"{path} holds no tensors by name; {_HOW_TO_CONVERT}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, _Rebuilt):
            raise ModelError(f"{path}: '{name}' is no tensor; {_HOW_TO_CONVERT}")
    return dict(state)


class _TensorUnpickler(pickle.Unpickler):
    """Knows the names that rebuild tensors; asking for another is an error, never an import."""

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and (name in _FLOATS or name in _INTEGERS or name == "DoubleStorage"):
            return _ElementType(name)
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known

    def persistent_load(self, pid: object) -> object:
        match pid:
            case ("storage", _ElementType(name=element), str(key), *_):
                return _Storage(key, element)
        raise pickle.UnpicklingError("it refers to something that is no tensor's content")


def _rebuild_tensor(
    storage: object, offset: object, shape: object, strides: object, *_: object
) -> _Rebuilt:
    if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0:
        raise pickle.UnpicklingError("a tensor without content")
    sizes, steps = _sizes(shape), _sizes(strides)
    step = 1
    for size, found in zip(reversed(sizes), reversed(steps), strict=True):
        if size > 1 and found != step:
            raise pickle.UnpicklingError(f"a tensor of strides {list(steps)} is not contiguous")
        step *= size
    return _Rebuilt(storage, offset, sizes)


def _rebuild_parameter(tensor: object, *_: object) -> object:
    return tensor


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(size) is not int or size < 0 for size in value):
        raise pickle.UnpicklingError("a tensor's shape is no row of numbers")
    return value


_KNOWN: dict[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}
