"""Tensors of a draft head under one set of names, whatever its file calls them.

Owns the names of published EAGLE-3 checkpoints. What training alone needs is left out; a name that
is not known is kept, so that the check of shapes can refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinfire.artifacts.safetensors_source import SafetensorsSource
from twinfire.artifacts.tensors import MappedTensor
from twinfire.artifacts.torch_file_source import TORCH_FILE, TorchFileSource
from twinfire.protocol.errors import ModelError

DRAFT_IDS = "d2t"
OUTPUT_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
_BODY = "model."
_RENAMED = {
    "draft_id_to_target_id": DRAFT_IDS,
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
_LEFT_OUT = re.compile(
    # t2d and the verifier's own tensors serve training; rotary tables follow from the settings;
    # later layers read no feature, so the norm that some exporters give them has nothing to do.
    r"t2d|target_id_to_draft_id|verifier_.*|(.*\.)?rotary_emb\.inv_freq"
    r"|layers\.[1-9]\d*\.hidden_norm\.weight"
)
_WHOLE_BYTES = 1 << 20
_NUM_PIECES, _PIECE_BYTES = 64, 4096


class FileTensors(Protocol):
    """A file of tensors, with integers among them."""

    def __iter__(self) -> Iterator[str]:
        """Yield every name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        ...

    def tensor(self, name: str) -> MappedTensor:
        """Return a tensor of floats."""
        ...

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a tensor of integers."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        ...


def one_name(name: str) -> str | None:
    """Return what a tensor is called here, None where drafting needs it not."""
    name = name.removeprefix(_BODY)
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    name = _RENAMED.get(name, name)
    return None if _LEFT_OUT.fullmatch(name) else name


class DraftHeadSource:
    """A WeightSource over a head's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = _open_file(folder)
        self._names: dict[str, str] = {}
        for name in self._file:
            known = one_name(name)
            if known is None:
                continue
            if known in self._names:
                raise ModelError(f"{folder}: '{self._names[known]}' and '{name}' are one tensor")
            self._names[known] = name

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return self._file.total_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; ModelError when it is missing."""
        return self._file.shape(self._file_name(name))

    def tensor(self, name: str) -> MappedTensor:
        """Return a tensor of floats; ModelError when it is missing or something else."""
        return replace(self._file.tensor(self._file_name(name)), name=name)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a tensor of integers; ModelError when it is missing or something else."""
        return self._file.integers(self._file_name(name))

    def share(self, name: str, other: str) -> None:
        """Let `name` be the tensor that `other` is."""
        self._names[name] = self._file_name(other)

    def leave_out(self, name: str) -> None:
        """Hand a tensor out no more."""
        del self._names[name]

    def content_key(self, settings: str) -> str:
        """Return a key of settings and tensors, the same for every file that holds them.

        Large tensors are sampled, since training changes all of a tensor.
        """
        digest = sha256(settings.encode())
        for name in sorted(self._names):
            if name == DRAFT_IDS:
                digest.update(self.integers(name).tobytes())
                continue
            tensor = self.tensor(name)
            digest.update(f"{name} {tensor.format} {tensor.shape};".encode())
            content = tensor.raw.reshape(-1).view(np.uint8)
            if len(content) <= _WHOLE_BYTES:
                digest.update(content.data)
            else:
                for start in np.linspace(0, len(content) - _PIECE_BYTES, _NUM_PIECES, dtype=int):
                    digest.update(content[start : start + _PIECE_BYTES].data)
        return digest.hexdigest()

    def _file_name(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:
            raise ModelError(f"{self.folder}: the head has no tensor '{name}'")
        return found


def _open_file(folder: Path) -> FileTensors:
    has_safetensors = any(folder.glob("*.safetensors"))
    if not has_safetensors and (folder / TORCH_FILE).is_file():
        return TorchFileSource(folder / TORCH_FILE)
    return SafetensorsSource(folder)
