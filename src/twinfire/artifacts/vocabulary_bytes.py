"""The bytes that each token adds to the text.

Two alphabets exist: byte-level BPE writes every byte as one printable character, sentencepiece
writes a space as ▁ and a byte that no piece covers as <0xNN>. Which one holds is read from the
tokenizer's own decoder; any other kind is refused, because its text cannot be built token by token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec
import tokenizers

from twinfire.protocol.errors import ModelError

Alphabet = Literal["byte_level", "sentencepiece"]

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for (GPT-2's table).

    A printable Latin-1 byte stands for itself, the others for characters from U+0100 on.
    """
    alphabet = {chr(byte): byte for byte in _PRINTABLE_BYTES}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def alphabet_of(library: tokenizers.Tokenizer, source: str) -> Alphabet:
    """Return how the vocabulary spells bytes; ModelError for a kind that is not supported."""
    kinds = {str(node.get("type")) for node in _nodes(_state(library.decoder))}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return "sentencepiece"
    raise ModelError(
        f"{source}: the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not "
        "supported; supported are byte-level BPE and sentencepiece"
    )


def vocabulary_bytes(
    library: tokenizers.Tokenizer, alphabet: Alphabet, size: int
) -> tuple[bytes, ...]:
    """Return the bytes of each id below `size`; an id that no token has gives none."""
    content = [b""] * size
    characters = byte_level_alphabet()
    for text, token_id in library.get_vocab(with_added_tokens=True).items():
        if alphabet == "byte_level":
            content[token_id] = _byte_level_bytes(text, characters)
        else:
            content[token_id] = _sentencepiece_bytes(text)
    return tuple(content)


def _byte_level_bytes(text: str, characters: dict[str, int]) -> bytes:
    try:
        return bytes(map(characters.__getitem__, text))
    except KeyError:
        # Added tokens are plain text, not spelled in the alphabet.
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    byte_piece = _BYTE_PIECE.fullmatch(text)
    if byte_piece is not None:
        return bytes([int(byte_piece[1], 16)])
    return text.replace(SPACE_MARK, " ").encode()


def _state(component: object) -> object:
    """Return a library component as JSON values; None when there is none."""
    if component is None:
        return None
    state = component.__getstate__()
    if not isinstance(state, bytes):
        raise AssertionError("the tokenizers library pickles components as JSON bytes")
    return msgspec.json.decode(state)


def _nodes(state: object) -> Iterator[dict[str, object]]:
    """Yield a component and, for a sequence, its parts."""
    if isinstance(state, dict):
        yield state
        for value in state.values():
            if isinstance(value, list):
                for item in value:
                    yield from _nodes(item)
