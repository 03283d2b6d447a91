"""A request inside the engine: its choices, its times, and what has been reported of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from twinfire.engine.token_history import TokenHistory
from twinfire.protocol.messages import FinishReason, LogprobRows
from twinfire.protocol.sampling import SamplingParams
from twinfire.scheduler.sequence import Sequence


@dataclass(slots=True)
class Choice:
    """One of a request's n answers. `sequence` is None until it forks and after it ends."""

    index: int
    history: TokenHistory
    sequence: Sequence | None = None
    finish_reason: FinishReason | None = None


class Request:
    """A submitted request. Choice 0 computes the prompt; the others fork from it."""

    def __init__(
        self,
        gateway_id: str,
        request_id: int,
        prompt: array[int],
        sampling: SamplingParams,
        arrival_s: float,
    ) -> None:
        self.gateway_id = gateway_id
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.choices = [Choice(index, TokenHistory(prompt)) for index in range(sampling.n)]
        self.ending_token_ids = sampling.ending_token_ids
        self.prompt_done = False
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self._prompt_logprobs: list[LogprobRows] = []
        self._num_prompt_scored = 0

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def choices_drawing_from(self, sequence: Sequence) -> list[int]:
        """Return the choices whose next token comes from `sequence`'s last row."""
        if self.prompt_done:
            return [sequence.key[2]]
        return [choice.index for choice in self.choices if choice.finish_reason is None]

    def prompt_rows_wanted(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of positions in [start, end) whose logits score a prompt token.

        The row at position i scores token i + 1. Rows scored before a preemption are not wanted
        again.
        """
        if self.sampling.prompt_logprobs < 0:
            return 0, 0
        return max(start, self._num_prompt_scored), min(end, len(self.prompt) - 1)

    def add_prompt_logprobs(self, rows: LogprobRows, count: int) -> None:
        """Append the scores of the next `count` prompt tokens."""
        self._prompt_logprobs.append(rows)
        self._num_prompt_scored += count

    def prompt_logprobs(self) -> LogprobRows | None:
        """Return the scores of prompt tokens 1.., None when they were not asked for."""
        if self.sampling.prompt_logprobs < 0:
            return None
        parts = self._prompt_logprobs
        return LogprobRows(
            k=parts[0].k if parts else 0,
            token_logprobs=b"".join(part.token_logprobs for part in parts),
            ranks=b"".join(part.ranks for part in parts),
            top_ids=b"".join(part.top_ids for part in parts),
            top_logprobs=b"".join(part.top_logprobs for part in parts),
        )
