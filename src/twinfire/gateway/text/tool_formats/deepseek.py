"""Calls of DeepSeek V3, R1 and V3.1, between markers that are single tokens.

V3 writes the type, the name and the arguments in a fence; V3.1 the name and the bare arguments.
"""

from __future__ import annotations

import re

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps
from twinfire.gateway.text.tool_formats.sections import read_sections

_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_ENDS = Markers(_CALL_END, _CALLS_END)
_NAME = re.compile(r"[^\s<｜{}\"]*")


def read_deepseek(text: GrowingText, sink: AnswerSink) -> Steps[None]:
    """Read an answer."""
    return read_sections(
        text,
        sink,
        _call,
        section_begin=_CALLS_BEGIN,
        call_begin=_CALL_BEGIN,
        section_end=_CALLS_END,
    )


def _call(text: GrowingText, sink: AnswerSink) -> Steps[bool]:
    """Read a call after its first marker."""
    yield from text.skip_space()
    name = yield from text.word(_NAME)
    if not (yield from text.expect(_SEPARATOR, after_space=True)):
        return False
    yield from text.skip_space()
    fenced = False
    if (yield from text.peek()) != "{":
        name = yield from text.word(_NAME)
        yield from text.skip_space()
        fenced = (yield from text.expect("```json")) or (yield from text.expect("```"))
        yield from text.skip_space()
    if not sink.is_name(name) or (yield from text.peek()) != "{":
        return False
    text.forget()
    sink.start_call(name)
    if not (yield from text.json_value(sink.arguments)):
        yield from text.until(_ENDS, sink.arguments)
        return True
    if fenced:
        yield from text.expect("```", after_space=True)
    yield from text.expect(_CALL_END, after_space=True)
    return True
