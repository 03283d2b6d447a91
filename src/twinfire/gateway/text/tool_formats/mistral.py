"""Calls of Mistral: `[TOOL_CALLS]`, then a JSON list of calls or, since v11, `name[ARGS]{…}`."""

from __future__ import annotations

import re

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps
from twinfire.gateway.text.tool_formats.json_call import read_json_call

_OPEN = Markers("[TOOL_CALLS]")
_NAME = re.compile(r"[^\s\[\]{}\"]*")
_ID = re.compile(r"[A-Za-z0-9]*")


def read_mistral(text: GrowingText, sink: AnswerSink) -> Steps[None]:
    """Read an answer."""
    while marker := (yield from text.until(_OPEN, sink.content)):
        text.keep()
        yield from text.skip_space()
        if (yield from text.expect("[")):
            yield from _list(text, sink, marker)
        elif (yield from text.peek()) == "{":
            if not (yield from read_json_call(text, sink, None)):
                sink.content(marker + text.kept())
        elif not (yield from _named(text, sink)):
            sink.content(marker + text.kept())


def _list(text: GrowingText, sink: AnswerSink, before: str) -> Steps[None]:
    """Read calls up to the closing bracket; `before` is given back before one that is none."""
    while True:
        yield from text.skip_space()
        if not (yield from read_json_call(text, sink, None)):
            sink.content(before + text.kept())
            return
        text.keep()
        before = ""
        if not (yield from text.expect(",", after_space=True)):
            yield from text.expect("]", after_space=True)
            text.forget()
            return


def _named(text: GrowingText, sink: AnswerSink) -> Steps[bool]:
    name = yield from text.word(_NAME)
    call_id = None
    if (yield from text.expect("[CALL_ID]")):
        call_id = (yield from text.word(_ID)) or None
    yield from text.expect("[ARGS]")
    if not sink.is_name(name) or (yield from text.peek()) != "{":
        return False
    text.forget()
    sink.start_call(name, call_id)
    if not (yield from text.json_value(sink.arguments)):
        yield from text.rest(sink.arguments)
    return True
