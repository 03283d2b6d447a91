"""Server-sent events of the OpenAI dialects, built from parts that are encoded once per stream.

A token costs one JSON encoding of its text and a few byte joins.
"""

from __future__ import annotations

import msgspec

from twinfire.gateway.dialects.generate import usage
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.request_meter import RequestMeter

_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode
NULL = b"null"


class ChunkFrame:
    """What every chunk of one stream starts and ends with."""

    __slots__ = ("_continuous", "_head", "_meter", "_n", "_prompt_lengths")

    def __init__(
        self,
        *,
        answer_id: str,
        kind: str,
        created_s: int,
        model: str,
        fingerprint: str,
        meter: RequestMeter,
        prompt_lengths: list[int],
        n: int,
        continuous_usage: bool,
    ) -> None:
        common = {
            "id": answer_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + encode(common)[:-1] + b',"choices":['
        self._meter = meter
        self._prompt_lengths = prompt_lengths
        self._n = n
        self._continuous = continuous_usage

    def text_chunks(self, before_text: bytes, after_text: bytes) -> TextChunks | None:
        """Return chunks whose choice is its index, `before_text`, the text and `after_text`.

        None where chunks have more that changes.
        """
        if self._continuous:
            return None
        return TextChunks(self._head, before_text, after_text + b"]}\n\n")

    def chunk(self, choice: bytes, index: int, num_output_tokens: int, extra: bytes = b"") -> bytes:
        """Return a chunk of one choice; `extra` is top-level fields, each after a comma."""
        if self._continuous:
            num_prompt_tokens = self._prompt_lengths[index // self._n]
            extra += b',"usage":' + encode(
                usage(num_prompt_tokens, num_output_tokens, self._meter.num_cached_tokens)
            )
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
