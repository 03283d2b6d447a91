"""The events of a streamed chat completion."""

from __future__ import annotations

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.generate import usage, wants_continuous_usage, wants_usage
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.dialects.sse import NULL, ChunkFrame, TextChunks, encode
from twinfire.gateway.text.answer_parts import AnswerDelta, ContentText
from twinfire.gateway.text_generation import PromptReady


class ChatStream:
    """Writes one stream."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._num_cached_tokens = 0
        self._frame = ChunkFrame(
            answer_id=job.answer_id,
            kind="chat.completion.chunk",
            created_s=job.created_s,
            model=job.model.name,
            fingerprint=job.model.fingerprint,
            usage_so_far=self._usage_so_far if wants_continuous_usage(job.request) else None,
        )
        self._logprob_format = job.logprob_format
        self._token_ids = bool(job.request.return_token_ids)
        self._text_chunks: TextChunks | None = None
        if job.num_top_logprobs is None and not self._token_ids:
            self._text_chunks = self._frame.text_chunks(
                b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
            )

    def prompt_ready(self, ready: PromptReady, usage: Usage) -> bytes:
        """Return the role of every choice, and the text that the answers begin with."""
        self._num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        frames: list[bytes] = []
        extra = b""
        if self._token_ids:
            extra = b',"prompt_token_ids":' + encode(list(self._job.prompt))
        for index in range(self._job.n):
            opening = b'{"index":%d,"delta":{"role":"assistant","content":""},' % index
            opening += b'"logprobs":null,"finish_reason":null}'
            frames.append(self._frame.chunk(opening, index, 0, extra))
            if self._job.echoed:
                content = b'{"index":%d,"delta":{"content":%b},' % (
                    index,
                    encode(self._job.echoed),
                )
                content += b'"logprobs":null,"finish_reason":null}'
                frames.append(self._frame.chunk(content, index, 0))
        return b"".join(frames)

    def delta(self, delta: AnswerDelta) -> bytes:
        """Return a content chunk, a finish chunk, both, or nothing."""
        frames = b""
        if self._text_chunks is not None:
            for part in delta.parts:
                assert isinstance(part, ContentText), "nothing else is asked for"
                frames += self._text_chunks.chunk(part.text, delta.index)
        elif delta.parts or delta.tokens:
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

    def end(self, usage: Usage) -> bytes:
        """Return the closing usage event, where the request asks for it."""
        return self._frame.closing_usage(usage) if wants_usage(self._job.request) else b""

    def _content(self, delta: AnswerDelta) -> bytes:
        logprobs = NULL
        if self._job.num_top_logprobs is not None:
            logprobs = encode(self._logprob_format.chat(delta.tokens, self._job.num_top_logprobs))
        token_ids = b""
        if self._token_ids:
            token_ids = b',"token_ids":' + encode([token.token_id for token in delta.tokens])
        text = "".join(part.text for part in delta.parts if isinstance(part, ContentText))
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
            delta.index,
            encode(text),
            logprobs,
            token_ids,
        )
        return self._frame.chunk(choice, delta.index, delta.num_output_tokens)

    def _usage_so_far(self, index: int, num_output_tokens: int) -> Usage:
        return usage(len(self._job.prompt), num_output_tokens, self._num_cached_tokens)
