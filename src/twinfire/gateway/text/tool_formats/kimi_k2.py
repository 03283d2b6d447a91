"""Calls of Kimi K2: a section of calls, each with an id that holds its name, `functions.NAME:0`."""

from __future__ import annotations

import re

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps
from twinfire.gateway.text.tool_formats.sections import read_sections

SECTION_BEGIN = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_CALL_BEGIN = "<|tool_call_begin|>"
_ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_ENDS = Markers(_CALL_END, _SECTION_END)
_ID = re.compile(r"[^\s<|{}\"]*")
_NAMED_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<number>\d+))?")


def read_kimi_k2(text: GrowingText, sink: AnswerSink) -> Steps[None]:
    """Read an answer."""
    return read_sections(
        text,
        sink,
        _call,
        section_begin=SECTION_BEGIN,
        call_begin=_CALL_BEGIN,
        section_end=_SECTION_END,
    )


def _call(text: GrowingText, sink: AnswerSink) -> Steps[bool]:
    """Read a call after its first marker."""
    yield from text.skip_space()
    match = _NAMED_ID.fullmatch((yield from text.word(_ID)))
    if match is None or not (yield from text.expect(_ARGUMENTS_BEGIN, after_space=True)):
        return False
    yield from text.skip_space()
    if not sink.is_name(match["name"]) or (yield from text.peek()) != "{":
        return False
    text.forget()
    # The model counts over the conversation and looks for the same ids among the results.
    number = match["number"] or str(sink.num_calls)
    sink.start_call(match["name"], f"functions.{match['name']}:{number}")
    if not (yield from text.json_value(sink.arguments)):
        yield from text.until(_ENDS, sink.arguments)
        return True
    yield from text.expect(_CALL_END, after_space=True)
    return True
