"""How a model writes calls and reasoning: found by its chat template and its vocabulary.

Templates are asked by rendering small conversations; nothing is known of models by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from twinfire.gateway.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningFormatName,
)
from twinfire.gateway.text.tokenizer import ChatTemplate
from twinfire.gateway.text.tool_formats.tool_format import TOOL_FORMATS, ToolFormat, ToolFormatName
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.errors import InvalidRequest

AUTO = "auto"
NONE = "none"
TOOL_PARSERS: tuple[str, ...] = (AUTO, NONE, *get_args(ToolFormatName))
REASONING_PARSERS: tuple[str, ...] = (AUTO, NONE, *get_args(ReasoningFormatName))

_PROBE = "probe_of_tools"
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_USER: dict[str, object] = {"role": "user", "content": "hello"}
_CALL_ID = "abcdefGHI"
"""Of a length that every template takes."""


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """What the operator says: a name, `auto` or `none`."""

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        """InvalidRequest for a name that nobody has."""
        for name, known, param in (
            (self.tools, TOOL_PARSERS, "tool_parser"),
            (self.reasoning, REASONING_PARSERS, "reasoning_parser"),
        ):
            if name not in known:
                raise InvalidRequest(f"{param} is `{name}`; there are {', '.join(known)}", param)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Of one model."""

    tools: ToolFormat | None
    """None where calls are not to be looked for."""
    reasoning: ReasoningFormat | None
    knows_tools: bool
    """Whether the template shows tools to the model."""
    takes_arguments_as_text: bool
    """Whether the template wants the arguments of past calls as JSON text, not as an object."""
    tool_marker_ids: frozenset[int]
    """Special tokens that are part of calls."""
    reasoning_marker_ids: frozenset[int]


def detect_formats(
    template: ChatTemplate | None, vocabulary: Vocabulary, choice: ParserChoice
) -> AnswerFormats:
    """Return a model's formats. Renders its template a few times."""
    has = _Evidence(template, vocabulary)
    tools = _chosen_tools(choice.tools, has)
    reasoning = _chosen_reasoning(choice.reasoning, has)
    return AnswerFormats(
        tools=tools,
        reasoning=reasoning,
        knows_tools=template is not None and _shows_tools(template),
        takes_arguments_as_text=template is not None and _wants_text(template),
        tool_marker_ids=vocabulary.special_ids_of(tools.markers if tools else ()),
        reasoning_marker_ids=vocabulary.special_ids_of(reasoning.markers if reasoning else ()),
    )


class _Evidence:
    """Whether a text is in the template or is a token."""

    def __init__(self, template: ChatTemplate | None, vocabulary: Vocabulary) -> None:
        self._source = "" if template is None else template.source + template.tool_source
        self._vocabulary = vocabulary

    def in_template(self, *texts: str) -> bool:
        return all(text in self._source for text in texts)

    def anywhere(self, text: str) -> bool:
        return text in self._source or bool(self._vocabulary.special_ids_of((text,)))


_TOOL_RULES: tuple[tuple[ToolFormatName, Callable[[_Evidence], bool]], ...] = (
    ("kimi_k2", lambda has: has.anywhere("<|tool_calls_section_begin|>")),
    ("deepseek_v3", lambda has: has.in_template("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", lambda has: has.anywhere("<｜tool▁calls▁begin｜>")),
    ("mistral_v11", lambda has: has.anywhere("[TOOL_CALLS]") and has.anywhere("[ARGS]")),
    ("mistral", lambda has: has.anywhere("[TOOL_CALLS]")),
    ("qwen3_coder", lambda has: has.in_template("<function=", "<parameter=")),
    ("hermes", lambda has: has.in_template("<tool_call>")),
    ("llama3_json", lambda has: has.anywhere("<|python_tag|>")),
)
"""The first that holds."""


def _chosen_tools(choice: str, has: _Evidence) -> ToolFormat | None:
    if choice == NONE:
        return None
    for name, tool_format in TOOL_FORMATS.items():
        if name == choice:
            return tool_format
    # A model whose template shows no form is told of one, which is Hermes'.
    found: ToolFormatName = next((name for name, holds in _TOOL_RULES if holds(has)), "hermes")
    return TOOL_FORMATS[found]


def _chosen_reasoning(choice: str, has: _Evidence) -> ReasoningFormat | None:
    for name, form in REASONING_FORMATS.items():
        if name == choice or (choice == AUTO and not form.always and has.anywhere(form.end)):
            return form
    return None


def _shows_tools(template: ChatTemplate) -> bool:
    try:
        return _PROBE in template.render([_USER], tools=[_TOOL])
    except InvalidRequest:
        return False


def _wants_text(template: ChatTemplate) -> bool:
    """Whether a past call is rendered only with its arguments as text."""
    return not _renders_call(template, {"key": "value"}) and _renders_call(
        template, '{"key": "value"}'
    )


def _renders_call(template: ChatTemplate, arguments: object) -> bool:
    function = {"name": _PROBE, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    messages: list[dict[str, object]] = [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _PROBE, "content": "done"},
    ]
    try:
        template.render(messages, tools=[_TOOL])
    except InvalidRequest:
        return False
    return True
