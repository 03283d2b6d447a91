"""Times and counts of one HTTP request, reported to the metrics as it goes.

The same counts become the usage that the client sees, so that the two can never differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from twinfire.gateway.backends.route_record import FirstTokenTimes
from twinfire.gateway.metrics import FirstTokenPart, Metrics
from twinfire.protocol.messages import PromptDone


class RequestMeter:
    """Counts one request. `arrival_s` is on the monotonic clock."""

    def __init__(
        self, metrics: Metrics, arrival_s: float, prompt_lengths: Sequence[int], n: int
    ) -> None:
        self.num_prompt_tokens = sum(prompt_lengths)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        """Of the output, where a dialect tells the reasoning from the answer."""
        self.num_accepted_tokens = 0
        """Of the output, tokens that were drafted before they were drawn."""
        self.num_rejected_tokens = 0
        """Drafted tokens that are no part of the output."""
        self.queue_s = 0.0
        """The longest that a prompt waited at its worker."""
        self.ttft_s: float | None = None
        """From the arrival to the first token of all."""
        self.first_token_parts: dict[FirstTokenPart, float] = {}
        """Where the time to the first prompt's first token went, in seconds that add up to it."""
        self.finish_reasons: set[str] = set()
        self.cost_nanos: int | None = None
        """What the client asked to be told that it costs, once that is settled."""
        self._num_done_tokens = 0
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._prompt_lengths = prompt_lengths
        self._n = n
        num_choices = len(prompt_lengths) * n
        self._first_token_s: list[float | None] = [None] * num_choices
        self._last_token_s = [0.0] * num_choices
        self._num_tokens = [0] * num_choices
        self._queued_s = [0.0] * len(prompt_lengths)
        self._prefill_s = [0.0] * len(prompt_lengths)
        self._submitted_s = arrival_s
        self._times: list[FirstTokenTimes | None] = [None] * len(prompt_lengths)

    @property
    def billed_counts(self) -> tuple[int, int, int, int]:
        """Input (of computed prompts), cached, output and reasoning tokens."""
        counts = (self.num_cached_tokens, self.num_output_tokens, self.num_reasoning_tokens)
        return (self._num_done_tokens, *counts)

    @property
    def num_billed_tokens(self) -> int:
        """Input and output."""
        return self._num_done_tokens + self.num_output_tokens

    def submitted(self, max_tokens: int) -> None:
        """The request goes to the worker."""
        self._submitted_s = time.monotonic()
        self._metrics.request_params_n.observe(self._n)
        for _ in self._prompt_lengths:
            self._metrics.request_params_max_tokens.observe(max_tokens)

    def prompt_done(
        self, prompt_index: int, event: PromptDone, times: FirstTokenTimes | None = None
    ) -> None:
        """A prompt has been computed; `times` say where the time went, where that is known."""
        self._times[prompt_index] = times
        metrics = self._metrics
        length = self._prompt_lengths[prompt_index]
        self._num_done_tokens += length
        self.queue_s = max(self.queue_s, event.queue_s)
        self.num_cached_tokens += event.cached_tokens
        self._queued_s[prompt_index] = event.queue_s
        self._prefill_s[prompt_index] = event.prefill_s
        metrics.prompt_tokens.inc(length)
        metrics.prompt_tokens_cached.inc(event.cached_tokens)
        metrics.request_prompt_tokens.observe(length)
        metrics.request_computed_tokens.observe(length - event.cached_tokens)
        metrics.queue.observe(event.queue_s)
        metrics.prefill.observe(event.prefill_s)

    def tokens(self, choice: int, num_output_tokens: int) -> None:
        """`choice` (over all prompts) has now `num_output_tokens`."""
        gained = num_output_tokens - self._num_tokens[choice]
        if gained <= 0:
            return
        metrics = self._metrics
        now = time.monotonic()
        if self._first_token_s[choice] is None:
            self._first_token_s[choice] = now
            if self.ttft_s is None:
                self.ttft_s = now - self._arrival_s
            if choice % self._n == 0:
                self._observe_first_token(choice // self._n, now)
        else:
            # Tokens that come together count as evenly spread over the wait for them.
            metrics.inter_token.observe((now - self._last_token_s[choice]) / gained, gained)
        self._last_token_s[choice] = now
        self._num_tokens[choice] = num_output_tokens
        self.num_output_tokens += gained
        metrics.num_generated_tokens += gained

    def drafts(self, num_drafted: int, num_accepted: int) -> None:
        """`num_drafted` tokens were verified, of which `num_accepted` are served."""
        self.num_accepted_tokens += num_accepted
        self.num_rejected_tokens += num_drafted - num_accepted

    def _observe_first_token(self, prompt_index: int, now_s: float) -> None:
        metrics = self._metrics
        metrics.ttft.observe(now_s - self._arrival_s)
        parts = self._first_token_parts_of(prompt_index, now_s)
        for part, seconds in parts.items():
            metrics.observe_first_token(part, seconds)
        if prompt_index == 0:
            self.first_token_parts = parts

    def _first_token_parts_of(self, prompt_index: int, now_s: float) -> dict[FirstTokenPart, float]:
        times = self._times[prompt_index]
        request_s, since_s = self._submitted_s - self._arrival_s, now_s - self._submitted_s
        if times is None:
            # One worker did all of it.
            queue_s, prefill_s = self._queued_s[prompt_index], self._prefill_s[prompt_index]
            return {
                "request": request_s,
                "prefill_queue": queue_s,
                "prefill": prefill_s,
                "first_decode": max(since_s - queue_s - prefill_s, 0.0),
            }
        return {
            "request": request_s,
            "gateway_queue": times.gateway_queue_s,
            "lost": times.lost_s,
            "prefill_queue": times.prefill_queue_s,
            "prefill": times.prefill_s,
            "transfer": times.transfer_s,
            "decode_queue": times.decode_queue_s,
            # Whatever is in no other part is between the parts.
            "first_decode": since_s - (times.total_s - times.first_decode_s),
        }

    def choice_finished(self, choice: int, reason: str) -> None:
        """`choice` ended for `reason`."""
        metrics = self._metrics
        self.finish_reasons.add(reason)
        now = time.monotonic()
        num_tokens = self._num_tokens[choice]
        first_s = self._first_token_s[choice]
        decode_s = 0.0 if first_s is None else self._last_token_s[choice] - first_s
        metrics.count_finished(reason)
        metrics.request_generation_tokens.observe(num_tokens)
        metrics.e2e.observe(now - self._arrival_s)
        metrics.decode.observe(decode_s)
        metrics.inference.observe(self._prefill_s[choice // self._n] + decode_s)
        if num_tokens > 1:
            metrics.time_per_output_token.observe(decode_s / (num_tokens - 1))

    def request_finished(self) -> None:
        """Every choice ended."""
        for start in range(0, len(self._num_tokens), self._n):
            longest = max(self._num_tokens[start : start + self._n])
            self._metrics.request_max_generation_tokens.observe(longest)

    def rejected(self) -> None:
        """The worker had no room for the request."""
        self._metrics.rejections.inc()

    def aborted(self, num_unfinished: int) -> None:
        """The client left, or the request failed, with choices still running."""
        for _ in range(num_unfinished):
            self._metrics.count_finished("abort")
