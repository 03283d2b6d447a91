"""Server-sent events of the OpenAI dialects, built from parts that are encoded once per stream.

A token costs one JSON encoding of its text and a few byte joins.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from twinfire.gateway.dialects.responses import Usage

_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode
NULL = b"null"


class ChunkFrame:
    """What every chunk of one stream starts and ends with."""

    __slots__ = ("_head", "_usage_so_far")

    def __init__(
        self,
        *,
        answer_id: str,
        kind: str,
        created_s: int,
        model: str,
        fingerprint: str,
        usage_so_far: Callable[[int, int], Usage] | None = None,
    ) -> None:
        """`usage_so_far`, of a choice and its output tokens, goes into every chunk."""
        common = {
            "id": answer_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + encode(common)[:-1] + b',"choices":['
        self._usage_so_far = usage_so_far

    def text_chunks(self, before_text: bytes, after_text: bytes) -> TextChunks | None:
        """Return chunks whose choice is its index, `before_text`, the text and `after_text`.

        None where chunks have more that changes.
        """
        if self._usage_so_far is not None:
            return None
        return TextChunks(self._head, before_text, after_text + b"]}\n\n")

    def chunk(self, choice: bytes, index: int, num_output_tokens: int, extra: bytes = b"") -> bytes:
        """Return a chunk of one choice; `extra` is top-level fields, each after a comma."""
        if self._usage_so_far is not None:
            extra += b',"usage":' + encode(self._usage_so_far(index, num_output_tokens))
        return self._head + choice + b"]" + extra + b"}\n\n"

    def closing_usage(self, total: Usage) -> bytes:
        """Return the chunk without choices that ends a stream."""
        return self._head + b'],"usage":' + encode(total) + b"}\n\n"


class TextChunks:
    """Chunks of one stream in which only the text changes: all else is encoded once a choice."""

    __slots__ = ("_before_text", "_frame_head", "_heads", "_tail")

    def __init__(self, frame_head: bytes, before_text: bytes, tail: bytes) -> None:
        self._frame_head = frame_head
        self._before_text = before_text
        self._tail = tail
        self._heads: dict[int, bytes] = {}

    def chunk(self, text: str, index: int) -> bytes:
        """Return a chunk of one choice."""
        head = self._heads.get(index)
        if head is None:
            head = self._frame_head + b'{"index":%d,' % index + self._before_text
            self._heads[index] = head
        return head + encode(text) + self._tail
