"""The events of a streamed completion."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from twinfire.gateway.dialects.echo import EchoedPrompt
from twinfire.gateway.dialects.logprobs import LogprobFormat
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.dialects.sse import NULL, ChunkFrame, TextChunks, encode
from twinfire.gateway.text.choice_text import ShownToken, TextDelta
from twinfire.gateway.text_generation import PromptReady


class CompletionStream:
    """Writes one stream."""

    def __init__(
        self,
        frame: ChunkFrame,
        logprob_format: LogprobFormat,
        *,
        n: int,
        logprobs: bool,
        echoes: Sequence[EchoedPrompt] | None,
        prompts: Sequence[array[int]] | None,
        total_usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._frame = frame
        self._logprob_format = logprob_format
        self._n = n
        self._logprobs = logprobs
        self._echoes = echoes
        self._total_usage = total_usage
        self._prompts = prompts
        """Given when token ids are to be reported."""
        self._text_chunks: TextChunks | None = None
        if not logprobs and prompts is None:
            self._text_chunks = frame.text_chunks(
                b'"text":', b',"logprobs":null,"finish_reason":null}'
            )

    def prompt_ready(self, ready: PromptReady) -> bytes:
        """Return the echoed prompt of every choice, and its ids where they are asked for."""
        echo = None if self._echoes is None else self._echoes[ready.prompt_index]
        if echo is None and self._prompts is None:
            return b""
        tokens = [] if echo is None else echo.tokens(ready.logprobs)
        extra = b""
        if self._prompts is not None:
            ids = encode(list(self._prompts[ready.prompt_index]))
            extra = b',"token_ids":[],"prompt_token_ids":' + ids
        text = "" if echo is None else echo.text
        first = ready.prompt_index * self._n
        return b"".join(
            self._chunk(index, text, tokens, extra, 0) for index in range(first, first + self._n)
        )

    def delta(self, delta: TextDelta) -> bytes:
        """Return one chunk, or nothing when there is nothing to see."""
        if self._text_chunks is not None and delta.finish_reason is None:
            return self._text_chunks.chunk(delta.text, delta.index) if delta.text else b""
        if not (delta.text or delta.tokens or delta.finish_reason):
            return b""
        tokens = delta.tokens
        if self._echoes is not None:
            tokens = self._echoes[delta.index // self._n].shifted(tokens)
        extra = b""
        if self._prompts is not None:
            extra = b',"token_ids":' + encode([token.token_id for token in tokens])
        finish = NULL
        if delta.finish_reason is not None:
            finish = b'"%b"' % delta.finish_reason.encode()
            extra = b',"stop_reason":' + encode(delta.stop_reason) + extra
        return self._chunk(delta.index, delta.text, tokens, extra, delta.num_output_tokens, finish)

    def end(self) -> bytes:
        """Return the closing usage event, where it is asked for."""
        return b"" if self._total_usage is None else self._frame.closing_usage(self._total_usage())

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[ShownToken],
        extra: bytes,
        num_output_tokens: int,
        finish: bytes = NULL,
    ) -> bytes:
        logprobs = NULL
        if self._logprobs:
            logprobs = encode(self._logprob_format.completion(tokens))
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index,
            encode(text),
            logprobs,
            finish,
            extra,
        )
        return self._frame.chunk(choice, index, num_output_tokens)
