"""Token ids to text, one step at a time.

Works on the tokens' bytes through an incremental UTF-8 decoder, so the concatenated pieces equal
the text decoded at once whatever way the tokens arrive. It never emits text of the prompt, never
takes back what it emitted, and never fails on an odd id.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Collection, Sequence

from twinfire.gateway.text.vocabulary import Vocabulary

_TAIL_TOKENS = 16
_MAX_PENDING_BYTES = 3
"""Of an incomplete UTF-8 character."""


class Detokenizer:
    """The text of one choice, as its tokens come.

    `prompt` is what the choice continues: a character that it left incomplete is completed by the
    first output tokens.
    """

    __slots__ = (
        "_hidden_ids",
        "_pending",
        "_prompt_pending",
        "_strip_space",
        "_vocabulary",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_special_ids` are part of the text though special tokens are skipped."""
        self._vocabulary = vocabulary
        self._hidden_ids: Collection[int] = ()
        if skip_special_tokens:
            self._hidden_ids = vocabulary.special_ids - shown_special_ids
        tail = vocabulary.join(prompt[-_TAIL_TOKENS:], self._hidden_ids)
        self._pending = b""
        """The bytes of a character that is not complete."""
        self._decode(tail[-_MAX_PENDING_BYTES:])
        self._prompt_pending = bool(self._pending)
        self._strip_space = vocabulary.strips_leading_space and not (
            tail or vocabulary.join(prompt, self._hidden_ids)
        )

    @property
    def has_pending(self) -> bool:
        """Whether output tokens have begun a character that is not complete."""
        return not self._prompt_pending and bool(self._pending)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that the tokens complete."""
        content = self._vocabulary.join(token_ids, self._hidden_ids)
        if not content:
            return ""
        if self._prompt_pending:
            self._prompt_pending = False
            if not _continues_character(content):
                # The prompt's own half character would become a U+FFFD of the output.
                self._pending = b""
        if self._strip_space:
            self._strip_space = False
            content = content.removeprefix(b" ")
        return self._decode(content)

    def finish(self) -> str:
        """Return what was held back as incomplete, U+FFFD included; nothing may follow."""
        if self._prompt_pending:
            return ""
        return self._pending.decode("utf-8", "replace")

    def _decode(self, content: bytes) -> str:
        if self._pending:
            content = self._pending + content
        text, num_decoded = utf_8_decode(content, "replace", False)
        self._pending = content[num_decoded:]
        return text


def _continues_character(content: bytes) -> bool:
    return 0x80 <= content[0] <= 0xBF
