"""A request inside the engine: its choices, its times, and what has been reported of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Series
from dataclasses import dataclass

from twinfire.artifacts.token_grammar import CompiledGrammar
from twinfire.engine.choice_grammar import ChoiceGrammar
from twinfire.engine.logprob_rows import join_logprob_rows
from twinfire.engine.pooled_states import PooledStates
from twinfire.engine.token_history import TokenHistory
from twinfire.protocol.messages import FinishReason, LogprobRows, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.tokens import unpack_ids
from twinfire.scheduler.prompt_turn import PromptTurn
from twinfire.scheduler.sequence import Sequence


@dataclass(slots=True)
class Choice:
    """One of a request's n answers. `sequence` is None until it forks and after it ends."""

    index: int
    """Its number among the request's n, whichever of them are computed here."""
    history: TokenHistory
    sequence: Sequence | None = None
    finish_reason: FinishReason | None = None
    grammar: ChoiceGrammar | None = None
    """Where its output is in the request's grammar; None until that is compiled."""


class Request:
    """A submitted request.

    Its first choice computes the prompt and the others fork from it. When choices have output
    already each has a sequence of its own from the start, and the prompt is not scored again.
    """

    def __init__(
        self,
        gateway_id: str,
        message: Submit,
        prompt: array[int],
        outputs: Series[array[int]],
        arrival_s: float,
    ) -> None:
        """`prompt` and `outputs` are those of `message`, unpacked; no outputs are none so far."""
        self.gateway_id = gateway_id
        self.request_id = message.request_id
        self.priority = message.priority
        self.cache_salt = message.cache_salt
        self.key = HandOffKey(gateway_id, message.request_id, message.attempt)
        self.timeout_s = message.timeout_s
        self.handed_over = message.hand_off is not None
        """Whether another worker goes on once the prompt is computed."""
        self.prompt = prompt
        self.prediction = unpack_ids(message.prediction)
        """What the client expects the output to be; empty where it has not said."""
        self.sampling = sampling = message.sampling
        indices = message.choices or tuple(range(sampling.n))
        self.resumed = any(outputs)
        self.choices = [Choice(index, TokenHistory(self.prompt)) for index in indices]
        for choice, output in zip(self.choices, outputs, strict=bool(outputs)):
            for token_id in output:
                choice.history.append(token_id)
        self._by_index = {choice.index: choice for choice in self.choices}
        self.scores_prompt = sampling.prompt_logprobs >= 0 and not self.resumed
        """Whether the log-probabilities of prompt tokens are wanted."""
        self.ending_token_ids = sampling.ending_token_ids
        self.num_pulled_tokens = 0
        self.turn: PromptTurn | None = None
        """Of its prompt, where it had one before the scheduler saw it."""
        self.prompt_done = False
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.embedding = PooledStates(len(prompt), sampling.pooling) if sampling.pooling else None
        self._prompt_logprobs: list[LogprobRows] = []
        self._num_prompt_scored = 0

    def follow_grammar(self, compiled: CompiledGrammar) -> None:
        """Hold every choice to the request's grammar; InvalidRequest when its output breaks it."""
        for choice in self.choices:
            choice.grammar = ChoiceGrammar(compiled, self.ending_token_ids, choice.history.output)

    def choice(self, index: int) -> Choice:
        """Return the choice of this number; KeyError when it is not computed here."""
        return self._by_index[index]

    def choices_named(self, index: int | None) -> list[Choice]:
        """Return the choice of this number, none if it is not computed here, all for None."""
        if index is None:
            return self.choices
        return [choice for choice in self.choices if choice.index == index]

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def choices_drawing_from(self, sequence: Sequence) -> list[int]:
        """Return the choices whose next token comes from `sequence`'s last row."""
        if self.prompt_done or self.resumed:
            return [sequence.key[2]]
        return [choice.index for choice in self.choices if choice.finish_reason is None]

    def prompt_rows_wanted(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of positions in [start, end) whose logits score a prompt token.

        The row at position i scores token i + 1. Rows scored before a preemption are not wanted
        again.
        """
        if not self.scores_prompt:
            return 0, 0
        return max(start, self._num_prompt_scored), min(end, len(self.prompt) - 1)

    def add_prompt_logprobs(self, rows: LogprobRows, count: int) -> None:
        """Append the scores of the next `count` prompt tokens."""
        self._prompt_logprobs.append(rows)
        self._num_prompt_scored += count

    def prompt_logprobs(self) -> LogprobRows | None:
        """Return the scores of prompt tokens 1.., None when they are not wanted."""
        if not self.scores_prompt:
            return None
        return join_logprob_rows(self._prompt_logprobs)
