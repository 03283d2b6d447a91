"""From the text of a choice to the parts of its answer.

The same parts come whatever way the text was cut. Reasoning tokens are counted exactly: a token
belongs to what its first character belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from twinfire.gateway.text.answer_parts import AnswerDelta, AnswerFinish
from twinfire.gateway.text.answer_sink import AnswerSink, MakeId, ToolSchemas, call_id
from twinfire.gateway.text.choice_text import ShownToken, TextDelta
from twinfire.gateway.text.hold_back import GrowingText, Steps
from twinfire.gateway.text.reasoning import ReasoningFormat, ReasoningPlace, read_reasoning

ReadAnswer = Callable[[GrowingText, AnswerSink], Steps[None]]
"""Reads content and calls to the end of the text."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What the answers to a request may consist of."""

    read_answer: ReadAnswer | None = None
    """None for an answer that has no calls."""
    tools: ToolSchemas = field(default_factory=dict)
    make_id: MakeId = call_id
    one_call: bool = False
    reasoning: ReasoningFormat | None = None
    reasoning_is_open: bool = False
    """Whether the prompt began it."""
    reasoning_also_ends_at: str | None = None
    show_reasoning: bool = True
    show_tokens: bool = True
    """Whether deltas carry tokens; they come for counting, too."""


class AnswerSplitter:
    """One choice."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.num_reasoning_tokens = 0
        self._text = GrowingText()
        self._sink = AnswerSink(
            plan.tools,
            plan.make_id,
            show_reasoning=plan.show_reasoning,
            one_call=plan.one_call,
        )
        self._place = ReasoningPlace()
        self._steps: Steps[None] | None = self._read(plan)
        self._counts = plan.reasoning is not None
        self._uncounted: deque[int] = deque()
        """Where tokens begin that may belong to the reasoning."""
        self._show_tokens = plan.show_tokens
        self._waiting: list[ShownToken] = []
        """Tokens of text that is held back."""

    def feed(self, delta: TextDelta) -> AnswerDelta:
        """Return what the choice gained."""
        if delta.text:
            self._text.feed(delta.text)
        if delta.finish_reason is not None:
            self._text.ended = True
        self._go_on()
        parts = self._sink.take()
        if self._counts:
            self._count(delta)
        tokens: list[ShownToken] = []
        if self._show_tokens and delta.tokens:
            self._waiting.extend(delta.tokens)
        if self._waiting and (parts or delta.finish_reason is not None):
            tokens, self._waiting = self._waiting, tokens
        return AnswerDelta(
            delta.index,
            parts,
            tokens,
            self._finish(delta),
            delta.stop_reason,
            delta.num_output_tokens,
            self.num_reasoning_tokens,
        )

    def _go_on(self) -> None:
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None

    def _read(self, plan: AnswerPlan) -> Steps[None]:
        text, sink = self._text, self._sink
        if plan.reasoning is not None:
            opened = yield from read_reasoning(
                text,
                sink,
                plan.reasoning,
                self._place,
                is_open=plan.reasoning_is_open,
                also_ends_at=plan.reasoning_also_ends_at,
            )
            if opened:
                text.unread(opened)
        if plan.read_answer is None:
            yield from text.rest(sink.content)
        else:
            yield from plan.read_answer(text, sink)
        sink.end_text()

    def _finish(self, delta: TextDelta) -> AnswerFinish | None:
        if delta.finish_reason == "stop" and self._sink.num_calls:
            return "tool_calls"
        return delta.finish_reason

    def _count(self, delta: TextDelta) -> None:
        self._uncounted.extend(token.start for token in delta.tokens)
        place = self._place
        if not place.is_known:
            return
        if place.start is None:
            self._counts = False
            return
        end = self._text.position if place.end is None else place.end
        while self._uncounted and self._uncounted[0] < end:
            self.num_reasoning_tokens += self._uncounted.popleft() >= place.start
        if place.end is not None:
            self._counts = False
