"""What the gateway asks of a tokenizer and of a chat template.

The real ones live in `artifacts`; these protocols let the dialects be driven by a byte tokenizer in
tests. Nothing here loads a file.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

ChatMessage = Mapping[str, object]
"""One message as templates see it: role, content and what else the client sent."""


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe: long prompts are encoded on threads."""

    special_tokens: Mapping[str, str]
    """The named ones (`bos_token` and so on) with their text."""

    @property
    def vocab_size(self) -> int:
        """Ids below this have a meaning; the model's output head may have more rows."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Control tokens, left out of text unless asked for."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Return the ids of `text` as array('I')."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; incomplete UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        ...


class ChatTemplate(Protocol):
    """Turns a conversation into the prompt that the model was trained on."""

    @property
    def source(self) -> str:
        """The template's own text."""
        ...

    @property
    def tool_source(self) -> str:
        """Text of the template for a conversation with tools, which may be the same."""
        ...

    @property
    def reads_content_parts(self) -> bool:
        """Whether a message's content may be a list of parts instead of one string."""
        ...

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt; InvalidRequest when the template refuses the conversation."""
        ...
