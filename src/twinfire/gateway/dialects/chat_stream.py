"""The events of a streamed chat completion."""

from __future__ import annotations

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.generate import usage, wants_continuous_usage, wants_usage
from twinfire.gateway.dialects.responses import FinishWord, Usage
from twinfire.gateway.dialects.sse import NULL, ChunkFrame, TextChunks, encode
from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    AnswerFinish,
    AnswerPart,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from twinfire.gateway.text_generation import PromptReady


class ChatStream:
    """Writes one stream."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._num_cached_tokens = 0
        self._num_reasoning = [0] * job.n
        self._is_legacy = job.tools is not None and job.tools.is_legacy
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
        """Return a chunk for each part, a finish chunk, or nothing."""
        frames: list[bytes] = []
        if self._text_chunks is not None:
            for part in delta.parts:
                if isinstance(part, ContentText):
                    frames.append(self._text_chunks.chunk(part.text, delta.index))
                else:
                    frames.append(self._part(delta, self._fields(part), NULL, b""))
        elif delta.parts or delta.tokens:
            self._num_reasoning[delta.index] = delta.num_reasoning_tokens
            frames = self._with_tokens(delta)
        if delta.finish_reason is not None:
            frames.append(self._finish(delta, delta.finish_reason))
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """Return the closing usage event, where the request asks for it."""
        return self._frame.closing_usage(usage) if wants_usage(self._job.request) else b""

    def _with_tokens(self, delta: AnswerDelta) -> list[bytes]:
        """Return the parts' chunks, the first of them with what is told of the tokens."""
        logprobs, token_ids, no_ids = NULL, b"", b""
        if self._job.num_top_logprobs is not None:
            logprobs = encode(self._logprob_format.chat(delta.tokens, self._job.num_top_logprobs))
        if self._token_ids:
            token_ids = b',"token_ids":' + encode([token.token_id for token in delta.tokens])
            no_ids = b',"token_ids":[]'
        first, *others = delta.parts or (ContentText(""),)
        return [
            self._part(delta, self._fields(first), logprobs, token_ids),
            *(self._part(delta, self._fields(part), NULL, no_ids) for part in others),
        ]

    def _part(self, delta: AnswerDelta, fields: bytes, logprobs: bytes, extra: bytes) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (
            delta.index,
            fields,
            logprobs,
            extra,
        )
        return self._frame.chunk(choice, delta.index, delta.num_output_tokens)

    def _fields(self, part: AnswerPart) -> bytes:
        match part:
            case ContentText(text):
                return b'{"content":%b}' % encode(text)
            case ReasoningText(text):
                reasoning = encode(text)
                return b'{"reasoning_content":%b,"reasoning":%b}' % (reasoning, reasoning)
            case ToolCallStart(index, call_id, name):
                function = b'{"name":%b,"arguments":""}' % encode(name)
                if self._is_legacy:
                    return b'{"function_call":%b}' % function
                return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":%b}]}' % (
                    index,
                    encode(call_id),
                    function,
                )
            case ToolCallArguments(index, text):
                if self._is_legacy:
                    return b'{"function_call":{"arguments":%b}}' % encode(text)
                return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                    index,
                    encode(text),
                )

    def _finish(self, delta: AnswerDelta, reason: AnswerFinish) -> bytes:
        choice = (
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}'
            % (
                delta.index,
                finish_word(reason, self._is_legacy).encode(),
                encode(delta.stop_reason),
            )
        )
        return self._frame.chunk(choice, delta.index, delta.num_output_tokens)

    def _usage_so_far(self, index: int, num_output_tokens: int) -> Usage:
        return usage(
            len(self._job.prompt),
            num_output_tokens,
            self._num_cached_tokens,
            self._num_reasoning[index],
        )


def finish_word(reason: AnswerFinish, is_legacy: bool) -> FinishWord:
    """Return how a client is told; one that sent `functions` knows no `tool_calls`."""
    return "function_call" if is_legacy and reason == "tool_calls" else reason
