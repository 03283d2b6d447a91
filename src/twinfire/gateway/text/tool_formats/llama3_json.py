"""Calls of Llama 3: the answer is JSON objects, after `<|python_tag|>` or not, `;` between them."""

from __future__ import annotations

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps
from twinfire.gateway.text.tool_formats.json_call import read_json_call

_TAG = "<|python_tag|>"
_TAGS = Markers(_TAG)


def read_llama3_json(text: GrowingText, sink: AnswerSink) -> Steps[None]:
    """Read an answer. Calls stand at its beginning, or where the tag is."""
    text.keep()
    yield from text.skip_space()
    sink.content(text.kept())
    marker = _TAG if (yield from text.expect(_TAG)) else ""
    while True:
        yield from _calls(text, sink, marker)
        marker = yield from text.until(_TAGS, sink.content)
        if not marker:
            return


def _calls(text: GrowingText, sink: AnswerSink, before: str) -> Steps[None]:
    """Read calls; `before` is what is given back before one that is none."""
    while True:
        text.keep()
        yield from text.skip_space()
        if not (yield from read_json_call(text, sink, None, bare=True)):
            sink.content(before + text.kept())
            return
        before = ""
        if (yield from text.expect(";", after_space=True)):
            before = ";"
