"""The bytes of every token, looked up once and kept.

A stream asks for the bytes of each token it emits, so the tokenizer is called only the first time a
token is seen. Never fails: an id without a meaning (padding rows of the output head) has no bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from twinfire.gateway.text.tokenizer import Tokenizer

_SPACE = b" "


class Vocabulary:
    """Token bytes and what the tokenizer's decoder does at the start of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        self._bytes: list[bytes] = [tokenizer.token_bytes(token) for token in range(self._size)]
        self.special_ids = frozenset(tokenizer.special_ids)
        self.longest_token_bytes = max((len(token) for token in self._bytes), default=1) or 1
        self.strips_leading_space = self._probe_leading_space()

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes, empty for an id that has none."""
        return self._bytes[token_id] if 0 <= token_id < self._size else b""

    def text_of(self, token_id: int) -> str:
        """Return a token alone as text, incomplete UTF-8 as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def special_ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """Return the special tokens that are one of the texts."""
        return frozenset(token for token in self.special_ids if self.text_of(token) in texts)

    def join(self, token_ids: Iterable[int], hidden_ids: Collection[int] = ()) -> bytes:
        """Return the bytes of consecutive tokens, without those that are hidden."""
        table, size = self._bytes, self._size
        return b"".join(
            [table[token] for token in token_ids if token < size and token not in hidden_ids]
        )

    def _probe_leading_space(self) -> bool:
        """Whether the decoder drops the first space of a text, as SentencePiece's does."""
        for token, content in enumerate(self._bytes):
            is_word = len(content) > 1 and content.startswith(_SPACE) and content.isascii()
            if is_word and token not in self.special_ids:
                return not self._tokenizer.decode([token], False).startswith(" ")
        return False
