"""Answers as models of each family write them, and what is in them.

Written by the public description of each form, which every vector names; no model produced them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from twinfire.gateway.text.answer_splitter import AnswerPlan, AnswerSplitter
from twinfire.gateway.text.choice_text import ClientFinish, TextDelta
from twinfire.gateway.text.reasoning import REASONING_FORMATS
from twinfire.gateway.text.tool_formats.readers import READERS, reasoning_also_ends_at
from twinfire.gateway.text.tool_formats.tool_format import TOOL_FORMATS, ToolFormatName

SCHEMAS: dict[str, dict[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "places": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "list_files": {"type": "object", "properties": {}},
}


@dataclass
class Answered:
    """What a client would have put together from a choice's parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, arguments)."""
    ids: list[str] = field(default_factory=list, compare=False)
    finish: str | None = None

    def add(self, delta: AnswerDelta) -> None:
        for part in delta.parts:
            match part:
                case ContentText(text):
                    self.content += text
                case ReasoningText(text):
                    self.reasoning += text
                case ToolCallStart(index, call_id, name):
                    assert index == len(self.calls), "calls are numbered in order"
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case ToolCallArguments(index, text):
                    assert index == len(self.calls) - 1, "only the last call goes on"
                    name, before = self.calls[index]
                    self.calls[index] = (name, before + text)
            assert not hasattr(part, "text") or part.text, "empty parts are not worth sending"
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason


@dataclass(frozen=True)
class Vector:
    name: str
    source: str
    """Public description of the form."""
    format: ToolFormatName
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""
    reasoning: str = ""
    inside_reasoning: bool = False
    finish: str = "tool_calls"
    stops: ClientFinish = "stop"

    @property
    def plan(self) -> AnswerPlan:
        return plan_of(self.format, inside_reasoning=self.inside_reasoning)

    @property
    def expected(self) -> Answered:
        return Answered(self.content, self.reasoning, list(self.calls), [], self.finish)


def plan_of(name: ToolFormatName, *, inside_reasoning: bool = False) -> AnswerPlan:
    return AnswerPlan(
        read_answer=READERS[name],
        tools=SCHEMAS,
        reasoning=REASONING_FORMATS["think"],
        reasoning_is_open=inside_reasoning,
        reasoning_also_ends_at=reasoning_also_ends_at(TOOL_FORMATS[name]),
    )


def answered(plan: AnswerPlan, pieces: list[str], stops: ClientFinish = "stop") -> Answered:
    splitter = AnswerSplitter(plan)
    result = Answered()
    for piece in pieces:
        result.add(splitter.feed(TextDelta(0, piece)))
    result.add(splitter.feed(TextDelta(0, "", finish_reason=stops)))
    return result


HERMES = "NousResearch/Hermes-Function-Calling README; QwenLM/Qwen3 docs, function_call"
LLAMA = "vllm-project/vllm examples/tool_chat_template_llama3.2_json.jinja; meta-llama/llama-models"
MISTRAL = "mistralai/mistral-common tokens/tokenizers/instruct.py (v3, v7, v11)"
DEEPSEEK = "vllm-project/vllm examples/tool_chat_template_deepseekv3.jinja and deepseekv31.jinja"
KIMI = "MoonshotAI/Kimi-K2 docs/tool_call_guidance.md"
CODER = "vllm-project/vllm examples/tool_chat_template_qwen3coder.jinja"
PARIS = '{"city": "Paris"}'
ROME = '{"city": "Rome", "days": 2}'

VECTORS = (
    Vector(
        "one call",
        HERMES,
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        (("get_weather", PARIS),),
    ),
    Vector(
        "reasoning, content and two calls",
        HERMES,
        "hermes",
        "<think>\nTwo cities: <b>.\n</think>\n\nLet me look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n'
        "</tool_call>",
        (("get_weather", PARIS), ("get_weather", ROME)),
        "Let me look.",
        "Two cities: <b>.",
    ),
    Vector(
        "arguments first, marker and brackets inside strings",
        HERMES,
        "hermes",
        '<tool_call>{"arguments": {"city": "a</tool_call>\\"}{"}, "name": "get_weather"}'
        "</tool_call>",
        (("get_weather", '{"city": "a</tool_call>\\"}{"}'),),
    ),
    Vector(
        "arguments as a string, and null",
        HERMES,
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
        '<tool_call>{"name": "list_files", "arguments": null}</tool_call>',
        (("get_weather", PARIS), ("list_files", "{}")),
    ),
    Vector(
        "last bracket forgotten",
        HERMES,
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call> Done.',
        (("get_weather", PARIS),),
        " Done.",
    ),
    Vector(
        "cut in the arguments",
        HERMES,
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
        (("get_weather", '{"city": "Pa'),),
        finish="length",
        stops="length",
    ),
    Vector(
        "cut in the name",
        HERMES,
        "hermes",
        'I will.\n<tool_call>\n{"name": "get_wea',
        content='I will.\n<tool_call>\n{"name": "get_wea',
        finish="length",
        stops="length",
    ),
    Vector(
        "no JSON in the call",
        HERMES,
        "hermes",
        "<tool_call>get_weather(Paris)</tool_call>",
        content="<tool_call>get_weather(Paris)</tool_call>",
        finish="stop",
    ),
    Vector(
        "broken arguments go on as they are",
        HERMES,
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": ["Paris"}}</tool_call>ok',
        (("get_weather", '{"city": ["Paris"}}'),),
        "ok",
    ),
    Vector(
        "text that only looks like a marker",
        HERMES,
        "hermes",
        "a <tool_ b <tool_cal c < d <think> e",
        content="a <tool_ b <tool_cal c < d <think> e",
        finish="stop",
    ),
    Vector(
        "the prompt opened the reasoning",
        "deepseek-ai/DeepSeek-R1 tokenizer_config.json (chat_template ends in <think>)",
        "hermes",
        "Hmm, let me see.\n</think>\n\nIt is 4.",
        content="It is 4.",
        reasoning="Hmm, let me see.",
        inside_reasoning=True,
        finish="stop",
    ),
    Vector(
        "reasoning that never ends",
        HERMES,
        "hermes",
        "<think>one two",
        reasoning="one two",
        finish="length",
        stops="length",
    ),
    Vector(
        "one call",
        LLAMA,
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        (("get_weather", PARIS),),
    ),
    Vector(
        "tag and two calls",
        LLAMA,
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'
        '; {"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}',
        (("get_weather", PARIS), ("get_weather", ROME)),
    ),
    Vector(
        "tag after text",
        LLAMA,
        "llama3_json",
        'Sure. <|python_tag|>{"name": "list_files", "parameters": {}}',
        (("list_files", "{}"),),
        "Sure.",
    ),
    Vector(
        "an answer in JSON is no call",
        LLAMA,
        "llama3_json",
        '{"name": "Bob", "parameters": {"age": 3}}',
        content='{"name": "Bob", "parameters": {"age": 3}}',
        finish="stop",
    ),
    Vector(
        "built-in tool",
        LLAMA,
        "llama3_json",
        '<|python_tag|>brave_search.call(query="x")',
        content='<|python_tag|>brave_search.call(query="x")',
        finish="stop",
    ),
    Vector(
        "text after a call",
        LLAMA,
        "llama3_json",
        '{"name": "list_files", "parameters": {}}; and more',
        (("list_files", "{}"),),
        "; and more",
    ),
    Vector(
        "list of calls",
        MISTRAL,
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
        (("get_weather", PARIS), ("get_weather", ROME)),
    ),
    Vector(
        "content, then name and arguments",
        MISTRAL,
        "mistral_v11",
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]list_files[ARGS]{}',
        (("get_weather", PARIS), ("list_files", "{}")),
        "I look.",
    ),
    Vector(
        "with an id",
        MISTRAL,
        "mistral_v11",
        '[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{"city": "Paris"}',
        (("get_weather", PARIS),),
    ),
    Vector(
        "no call after the marker",
        MISTRAL,
        "mistral",
        '[TOOL_CALLS] [1, {"name": "get_weather"}] x',
        content='[TOOL_CALLS] [1, {"name": "get_weather"}] x',
        finish="stop",
    ),
    Vector(
        "V3, two calls",
        DEEPSEEK,
        "deepseek_v3",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("get_weather", PARIS), ("get_weather", ROME)),
        "Let me see.",
    ),
    Vector(
        "V3.1, two calls",
        DEEPSEEK,
        "deepseek_v31",
        "<think>So.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>list_files<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", PARIS), ("list_files", "{}")),
        reasoning="So.",
    ),
    Vector(
        "cut",
        DEEPSEEK,
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"ci',
        (("get_weather", '{"ci'),),
        finish="length",
        stops="length",
    ),
    Vector(
        "malformed",
        DEEPSEEK,
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>oh<｜tool▁calls▁end｜>",
        content="<｜tool▁calls▁begin｜>oh<｜tool▁calls▁end｜>",
        finish="stop",
    ),
    Vector(
        "two calls in a section",
        KIMI,
        "kimi_k2",
        "Checking.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>'
        "functions.list_files:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (("get_weather", PARIS), ("list_files", "{}")),
        "Checking.",
    ),
    Vector(
        "calls in the midst of reasoning",
        KIMI,
        "kimi_k2",
        "<think>I need it. <|tool_calls_section_begin|><|tool_call_begin|>functions.list_files:7"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (("list_files", "{}"),),
        reasoning="I need it.",
    ),
    Vector(
        "one parameter of each type",
        CODER,
        "qwen3_coder",
        'Let me.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n<York> "é"\n'
        "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=places>\n["a", "b"]\n</parameter>\n<parameter=note>\nnull\n</parameter>\n'
        "</function>\n</tool_call>",
        (
            (
                "get_weather",
                '{"city": "New\\n<York> \\"é\\"", "days": 3, "hourly": true, '
                '"places": ["a", "b"], "note": null}',
            ),
        ),
        "Let me.",
    ),
    Vector(
        "no parameters, then JSON",
        CODER,
        "qwen3_coder",
        "<tool_call>\n<function=list_files>\n</function>\n</tool_call>\n"
        '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>',
        (("list_files", "{}"), ("list_files", "{}")),
    ),
    Vector(
        "cut in a value",
        CODER,
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew Yo",
        (("get_weather", '{"city": "New Yo'),),
        finish="length",
        stops="length",
    ),
)
