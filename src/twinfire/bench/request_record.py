"""What was seen of one request: times, counts, how it ended.

Times are readings of the client's monotonic clock, in seconds. Owns no definition of a metric:
those are in `load_metrics`.
"""

from __future__ import annotations

import msgspec

from twinfire.bench.request import GenerationRequest
from twinfire.bench.stream_events import (
    Finished,
    StreamEvent,
    StreamFault,
    TextDelta,
    TokenIds,
    Usage,
)


class RequestRecord(msgspec.Struct, frozen=True):
    """One request, finished in whatever way."""

    label: str
    started_s: float
    """When the request was handed to the socket."""
    ended_s: float
    """When the stream was over or the fault was seen."""
    last_s: float
    """When the last piece of the answer (text or finish_reason) came; `ended_s` if none did."""
    chunk_times_s: tuple[float, ...]
    """When text arrived; chunks that arrived together count once."""
    num_chunks: int
    """Chunks with text."""
    max_tokens: int | None
    ignore_eos: bool
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    accepted_tokens: int | None = None
    rejected_tokens: int | None = None
    """Token counts are the server's usage; None where it sent none."""
    token_ids_seen: int | None = None
    """Output token ids received, where they were asked for."""
    finish_reason: str | None = None
    error_kind: str | None = None
    error_message: str = ""
    session: str | None = None
    answer: str = ""
    """Its text, reasoning left out."""

    @property
    def completed(self) -> bool:
        """Whether the answer came whole."""
        return self.error_kind is None

    @property
    def output_tokens(self) -> int:
        """Output tokens by usage; without usage, one per chunk."""
        if self.completion_tokens is None:
            return self.num_chunks
        return self.completion_tokens

    @property
    def ended_early(self) -> bool:
        """Whether a fixed output length was asked for and fewer tokens came."""
        return (
            self.completed
            and self.ignore_eos
            and self.max_tokens is not None
            and self.completion_tokens is not None
            and self.completion_tokens < self.max_tokens
        )


class Recorder:
    """Collects the timed events of one request."""

    def __init__(self, request: GenerationRequest, started_s: float) -> None:
        self._request = request
        self._started_s = started_s
        self._chunk_times_s: list[float] = []
        self._num_chunks = 0
        self._answer: list[str] = []
        self._last_s: float | None = None
        self._usage: Usage | None = None
        self._token_ids_seen: int | None = None
        self._finish_reason: str | None = None

    def restart(self, started_s: float) -> None:
        """Move the start to the moment when the request really goes out."""
        self._started_s = started_s

    @property
    def answer(self) -> str:
        """The answer so far, reasoning left out: what a history keeps."""
        return "".join(self._answer)

    def add(self, event: StreamEvent, at_s: float) -> None:
        """Take the next event, received at `at_s`."""
        match event:
            case TextDelta():
                self._num_chunks += 1
                if event.kind == "content":
                    self._answer.append(event.text)
                if not self._chunk_times_s or self._chunk_times_s[-1] != at_s:
                    self._chunk_times_s.append(at_s)
                self._last_s = at_s
            case Finished():
                self._finish_reason = event.reason
                self._last_s = at_s
            case TokenIds():
                self._token_ids_seen = (self._token_ids_seen or 0) + event.count
            case Usage():
                self._usage = event

    def finish(self, ended_s: float, fault: StreamFault | None = None) -> RequestRecord:
        """Return the record; an answer without text, tokens or fault counts as `empty`."""
        usage = self._usage
        if fault is None and not self._chunk_times_s and not (usage and usage.completion_tokens):
            fault = StreamFault("empty", "the answer has no token")
        return RequestRecord(
            label=self._request.label,
            started_s=self._started_s,
            ended_s=ended_s,
            last_s=ended_s if self._last_s is None else self._last_s,
            chunk_times_s=tuple(self._chunk_times_s),
            num_chunks=self._num_chunks,
            max_tokens=self._request.max_tokens,
            ignore_eos=self._request.ignore_eos,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            accepted_tokens=usage.accepted_tokens if usage else None,
            rejected_tokens=usage.rejected_tokens if usage else None,
            token_ids_seen=self._token_ids_seen,
            finish_reason=self._finish_reason,
            error_kind=fault.kind if fault else None,
            error_message=fault.message if fault else "",
            session=self._request.session,
            answer=self.answer,
        )
