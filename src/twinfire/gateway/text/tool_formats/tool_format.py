"""The forms in which families of models write tool calls, as data.

A grammar writes calls from `CallSyntax`; the parser of the same name reads them back.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ToolFormatName = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "qwen3_coder",
]


class CallSyntax(msgspec.Struct, frozen=True):
    """The text around names and arguments: one way that the format's parser reads.

    `opens`, then calls with `separator` between them, then `closes`. A call is `before_name`, the
    name, `before_arguments`, the arguments as a JSON object, `after_arguments`.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    opens: str = ""
    closes: str = ""
    separator: str = ""
    numbered: bool = False
    """Whether a colon and the call's number, from 0, follow the name."""


class ToolFormat(msgspec.Struct, frozen=True):
    """One family's form."""

    name: ToolFormatName
    syntax: CallSyntax
    """What a forced call looks like."""
    markers: tuple[str, ...]
    """Texts that are single special tokens in the family's vocabularies; they are not text to be
    hidden but part of the form."""


_JSON_CALL = CallSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")

HERMES = ToolFormat(
    "hermes",
    msgspec.structs.replace(_JSON_CALL, separator="\n"),
    ("<tool_call>", "</tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    CallSyntax('{"name": "', '", "parameters": ', "}", separator="; "),
    ("<|python_tag|>",),
)
MISTRAL = ToolFormat(
    "mistral",
    CallSyntax(
        '{"name": "', '", "arguments": ', "}", opens="[TOOL_CALLS][", closes="]", separator=", "
    ),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)
MISTRAL_V11 = ToolFormat(
    "mistral_v11", CallSyntax("[TOOL_CALLS]", "[ARGS]", ""), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
)
_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    CallSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
        separator="\n",
    ),
    _DEEPSEEK_MARKERS,
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    CallSyntax(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
    ),
    _DEEPSEEK_MARKERS,
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    CallSyntax(
        "<|tool_call_begin|>functions.",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        opens="<|tool_calls_section_begin|>",
        closes="<|tool_calls_section_end|>",
        numbered=True,
    ),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
)
QWEN3_CODER = ToolFormat(
    # Its own form has no JSON for a grammar to hold to a schema; its parser reads Hermes' form too.
    "qwen3_coder",
    HERMES.syntax,
    HERMES.markers,
)

TOOL_FORMATS: dict[ToolFormatName, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        HERMES,
        LLAMA3_JSON,
        MISTRAL,
        MISTRAL_V11,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        KIMI_K2,
        QWEN3_CODER,
    )
}
