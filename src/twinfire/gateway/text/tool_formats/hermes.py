"""Calls of Hermes, Qwen 2.5 and Qwen 3: JSON objects between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import GrowingText, Markers, Steps
from twinfire.gateway.text.tool_formats.json_call import read_json_call

_OPEN = Markers("<tool_call>")
CLOSE = Markers("</tool_call>")


def read_hermes(text: GrowingText, sink: AnswerSink) -> Steps[None]:
    """Read an answer."""
    while marker := (yield from text.until(_OPEN, sink.content)):
        text.keep()
        yield from text.skip_space()
        if (yield from read_json_call(text, sink, CLOSE)):
            yield from text.expect("</tool_call>", after_space=True)
        else:
            sink.content(marker + text.kept())
