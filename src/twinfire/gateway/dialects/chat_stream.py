"""The events of a streamed chat completion."""

from __future__ import annotations

from array import array

from twinfire.gateway.dialects.logprobs import LogprobFormat
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.dialects.sse import NULL, ChunkFrame, TextChunks, encode
from twinfire.gateway.text.choice_text import TextDelta
from twinfire.gateway.text_generation import PromptReady


class ChatStream:
    """Writes one stream. `num_top_logprobs` is None when no log-probabilities are asked for."""

    def __init__(
        self,
        frame: ChunkFrame,
        logprob_format: LogprobFormat,
        *,
        n: int,
        num_top_logprobs: int | None,
        token_ids: bool,
        prompt_token_ids: array[int] | None,
        echoed: str,
    ) -> None:
        self._frame = frame
        self._logprob_format = logprob_format
        self._n = n
        self._num_top_logprobs = num_top_logprobs
        self._token_ids = token_ids
        self._prompt_token_ids = prompt_token_ids
        self._echoed = echoed
        self._text_chunks: TextChunks | None = None
        if num_top_logprobs is None and not token_ids:
            self._text_chunks = frame.text_chunks(
                b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
            )

    def prompt_ready(self, ready: PromptReady) -> bytes:
        """Return the role of every choice, and the text that the answers begin with."""
        frames: list[bytes] = []
        extra = b""
        if self._prompt_token_ids is not None:
            extra = b',"prompt_token_ids":' + encode(list(self._prompt_token_ids))
        for index in range(self._n):
            opening = b'{"index":%d,"delta":{"role":"assistant","content":""},' % index
            opening += b'"logprobs":null,"finish_reason":null}'
            frames.append(self._frame.chunk(opening, index, 0, extra))
            if self._echoed:
                content = b'{"index":%d,"delta":{"content":%b},' % (index, encode(self._echoed))
                content += b'"logprobs":null,"finish_reason":null}'
                frames.append(self._frame.chunk(content, index, 0))
        return b"".join(frames)

    def delta(self, delta: TextDelta) -> bytes:
        """Return a content chunk, a finish chunk, both, or nothing."""
        if self._text_chunks is not None and delta.finish_reason is None:
            return self._text_chunks.chunk(delta.text, delta.index) if delta.text else b""
        frames = b""
        if delta.text or delta.tokens:
            frames = self._content(delta)
        if delta.finish_reason is not None:
            finish = (
                b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}'
            )
            choice = finish % (
                delta.index,
                delta.finish_reason.encode(),
                encode(delta.stop_reason),
            )
            frames += self._frame.chunk(choice, delta.index, delta.num_output_tokens)
        return frames

    def usage(self, usage: Usage) -> bytes:
        """Return the closing usage event."""
        return self._frame.closing_usage(usage)

    def _content(self, delta: TextDelta) -> bytes:
        logprobs = NULL
        if self._num_top_logprobs is not None:
            logprobs = encode(self._logprob_format.chat(delta.tokens, self._num_top_logprobs))
        token_ids = b""
        if self._token_ids:
            token_ids = b',"token_ids":' + encode([token.token_id for token in delta.tokens])
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
            delta.index,
            encode(delta.text),
            logprobs,
            token_ids,
        )
        return self._frame.chunk(choice, delta.index, delta.num_output_tokens)
