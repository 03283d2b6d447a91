"""Text to token ids and back, over the `tokenizers` library.

Owns the facts that the rest asks for: special ids, bytes per token, whether a BOS is added. Safe to
use from several threads, and encoding does not hold the GIL, so a long prompt on a thread
stalls nobody. Knows no file format; `tokenizer_files` and `gguf_tokenizer` build one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property

import tokenizers

from twinfire.artifacts.vocabulary_bytes import alphabet_of, vocabulary_bytes
from twinfire.protocol.errors import InvalidRequest

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """One model's tokenizer.

    `special_tokens` are the named ones (`bos_token` and so on) with their text; chat templates get
    them as variables. `source` is how errors call the file.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, special_tokens: Mapping[str, str], source: str
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.special_tokens: Mapping[str, str] = dict(special_tokens)
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._alphabet = alphabet_of(library, source)
        self._vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one, added tokens included."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: matched in text, left out of decoded text unless asked for."""
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        """Id of the named beginning-of-sequence token."""
        return self.token_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the named end-of-sequence token."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` with special tokens begins with the BOS."""
        ids = self.encode("", add_special_tokens=True)
        return len(ids) > 0 and ids[0] == self.bos_token_id

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """Bytes of every id, in order; those that no token has are empty."""
        return vocabulary_bytes(self._library, self._alphabet, self._vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Return the ids of `text` as array('I'), special tokens in the text recognised.

        InvalidRequest when the text has a lone surrogate, which no UTF-8 can carry.
        """
        try:
            # The batch call is the library's only one that releases the GIL.
            (encoding,) = self._library.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("the text is not valid Unicode: it has a lone surrogate") from None
        return array("I", encoding.ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; incomplete UTF-8 becomes U+FFFD, unknown ids nothing."""
        known = [token_id for token_id in ids if 0 <= token_id < self._vocab_size]
        return self._library.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text, none for an unknown id."""
        return self.vocabulary[token_id] if 0 <= token_id < self._vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD where they are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_entry(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it (`Ġhello`), None for an unknown id."""
        return self._library.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None

    def token_id(self, entry: str) -> int | None:
        """Return the id of a vocabulary entry, None when there is none."""
        return self._library.token_to_id(entry)
