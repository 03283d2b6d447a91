"""What a model thinks before it answers: how families mark it, and reading it."""

from __future__ import annotations

from typing import Literal

import msgspec

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps

ReasoningFormatName = Literal["think", "deepseek_r1", "kimi", "mistral"]


class ReasoningFormat(msgspec.Struct, frozen=True):
    """One family's form."""

    name: ReasoningFormatName
    start: str
    end: str
    always: bool = False
    """Whether an answer begins inside the reasoning even where nothing opened it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and are part of the form."""
        return self.start, self.end

    def is_open(self, prompt: str) -> bool:
        """Whether the answer to `prompt` begins inside the reasoning."""
        last_start, last_end = prompt.rfind(self.start), prompt.rfind(self.end)
        if last_start > last_end and not prompt[last_start + len(self.start) :].strip():
            return True
        return self.always and not self.is_closed(prompt)

    def is_closed(self, prompt: str) -> bool:
        """Whether `prompt` has ended the reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)


REASONING_FORMATS: dict[ReasoningFormatName, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}


class ReasoningPlace:
    """Where in the answer's text the reasoning stands, in characters."""

    __slots__ = ("end", "is_known", "start")

    def __init__(self) -> None:
        self.is_known = False
        """Whether it is known if there is any."""
        self.start: int | None = None
        self.end: int | None = None


def read_reasoning(
    text: GrowingText,
    sink: AnswerSink,
    form: ReasoningFormat,
    place: ReasoningPlace,
    *,
    is_open: bool,
    also_ends_at: str | None,
) -> Steps[str]:
    """Read the reasoning at the beginning of an answer, if there is any.

    `also_ends_at` is what opens the tool calls where models go on to them without ending the
    reasoning; it is returned when it was read.
    """
    text.keep()
    yield from text.skip_space()
    # A model may write the mark that its prompt had already.
    has_start = yield from text.expect(form.start)
    if not (has_start or is_open):
        place.is_known = True
        sink.content(text.kept())
        return ""
    text.forget()
    place.start = text.position if has_start else 0
    place.is_known = True
    ends = Markers(form.end) if also_ends_at is None else Markers(form.end, also_ends_at)
    yield from text.skip_space()
    found = yield from text.until(ends, sink.reasoning)
    if found:
        place.end = text.position - len(found)
        sink.drop_space()
    if found == form.end:
        yield from text.skip_space()
        return ""
    return found
