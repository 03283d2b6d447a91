"""Calls in a section: markers around each call and around all of them."""

from __future__ import annotations

from collections.abc import Callable

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps

ReadCall = Callable[[GrowingText, AnswerSink], Steps[bool]]
"""Reads a call after its first marker; False where it is none, which the sink never saw."""


def read_sections(
    text: GrowingText,
    sink: AnswerSink,
    read_call: ReadCall,
    *,
    section_begin: str,
    call_begin: str,
    section_end: str,
) -> Steps[None]:
    """Read an answer. Models forget the section's own markers."""
    begin = Markers(section_begin, call_begin)
    while marker := (yield from text.until(begin, sink.content)):
        text.keep()
        is_call = marker == call_begin or (yield from text.expect(call_begin, after_space=True))
        if not is_call or not (yield from read_call(text, sink)):
            sink.content(marker + text.kept())
            continue
        text.keep()
        while (yield from text.expect(call_begin, after_space=True)):
            if not (yield from read_call(text, sink)):
                sink.content(text.kept())
                break
            text.keep()
        text.forget()
        yield from text.expect(section_end, after_space=True)
