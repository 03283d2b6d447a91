"""Formats found by templates that have what the families' own have; their sources are named."""

from __future__ import annotations

import pytest

from support.byte_tokenizer import SPECIAL_TEXTS, ByteTokenizer
from twinfire.artifacts.chat_template import DEFAULT_TEMPLATE, TOOL_TEMPLATE, ChatTemplate
from twinfire.gateway.text.answer_formats import AnswerFormats, ParserChoice, detect_formats
from twinfire.gateway.text.reasoning import REASONING_FORMATS
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.errors import InvalidRequest

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHOWN = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"


class WithMarkers(ByteTokenizer):
    """The byte tokenizer with other texts of its special tokens."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def token_bytes(self, token_id: int) -> bytes:
        if 256 <= token_id < 256 + len(self._texts):
            return self._texts[token_id - 256].encode()
        return super().token_bytes(token_id)


def formats(
    source: str | None,
    *special: str,
    tools: str = "auto",
    reasoning: str = "auto",
    tool_template: str | None = None,
) -> AnswerFormats:
    template = None
    if source is not None:
        sources = {DEFAULT_TEMPLATE: source}
        if tool_template is not None:
            sources[TOOL_TEMPLATE] = tool_template
        template = ChatTemplate(sources, {})
    vocabulary = Vocabulary(WithMarkers(*special))
    return detect_formats(template, vocabulary, ParserChoice(tools, reasoning))


@pytest.mark.parametrize(
    ("source", "special", "tools", "reasoning"),
    [
        # Qwen/Qwen3-8B and Qwen/Qwen2.5-7B-Instruct, tokenizer_config.json
        ("{# <tool_call> </think> #}", (), "hermes", "think"),
        ("{# <tool_call> #}", (), "hermes", None),
        # Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja
        ("{# <tool_call> <function= <parameter= #}", (), "qwen3_coder", None),
        # meta-llama/Llama-3.1-8B-Instruct; 3.2's template leaves the tag to the vocabulary
        ("{# <|python_tag|> #}", (), "llama3_json", None),
        ("", ("<|python_tag|>",), "llama3_json", None),
        # mistralai: Mistral-7B-Instruct-v0.3, Mistral-Small-3.2, Magistral
        ("{# [TOOL_CALLS] #}", (), "mistral", None),
        ("{# [TOOL_CALLS] #}", ("[ARGS]",), "mistral_v11", None),
        ("{# [TOOL_CALLS] [ARGS] [/THINK] #}", (), "mistral_v11", "mistral"),
        # deepseek-ai: DeepSeek-V3, DeepSeek-R1, DeepSeek-V3.1
        ("{# <｜tool▁calls▁begin｜> ```json #}", (), "deepseek_v3", None),
        ("{# <｜tool▁calls▁begin｜> ```json </think> #}", (), "deepseek_v3", "think"),
        ("{# <｜tool▁calls▁begin｜> </think> #}", (), "deepseek_v31", "think"),
        # moonshotai: Kimi-K2-Instruct, Kimi-K2-Thinking, Kimi-VL-A3B-Thinking
        ("", ("<|tool_calls_section_begin|>",), "kimi_k2", None),
        ("{# <|tool_calls_section_begin|> </think> #}", (), "kimi_k2", "think"),
        ("{# ◁/think▷ #}", (), "hermes", "kimi"),
        # HuggingFaceTB/SmolLM2-135M-Instruct: nothing
        ("", (), "hermes", None),
    ],
)
def test_detected(source: str, special: tuple[str, ...], tools: str, reasoning: str | None) -> None:
    found = formats(source + MESSAGES, *special)
    assert found.tools is not None
    assert found.tools.name == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


def test_the_operator_decides() -> None:
    assert formats(MESSAGES, tools="none", reasoning="none").tools is None
    found = formats(MESSAGES, tools="kimi_k2", reasoning="deepseek_r1")
    assert found.tools is not None
    assert found.tools.name == "kimi_k2"
    assert found.reasoning == REASONING_FORMATS["deepseek_r1"]
    with pytest.raises(InvalidRequest, match="there are auto, none, hermes"):
        ParserChoice(tools="hermess")
    with pytest.raises(InvalidRequest, match="reasoning_parser"):
        ParserChoice(reasoning="x")


def test_whether_the_template_shows_tools_is_found_by_rendering() -> None:
    assert not formats(MESSAGES).knows_tools
    assert formats(SHOWN + MESSAGES).knows_tools
    assert formats(MESSAGES, tool_template=SHOWN + MESSAGES).knows_tools
    assert not formats("{{ raise_exception('no') }}").knows_tools
    assert not formats(None).knows_tools


def test_how_past_arguments_are_wanted_is_found_by_rendering() -> None:
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}{% endfor %}"
    as_text = calls + "{{ 'x' + c.function.arguments }}" + end
    as_object = calls + "{% for k, v in c.function.arguments | items %}{{ v }}{% endfor %}" + end
    assert formats(as_text).takes_arguments_as_text
    assert not formats(as_object).takes_arguments_as_text
    assert not formats(calls + "{{ c.function.arguments | tojson }}" + end).takes_arguments_as_text


def test_markers_that_are_special_tokens_are_known() -> None:
    found = formats(MESSAGES, "<tool_call>", "</think>", "<|x|>")
    assert found.tool_marker_ids == {256}
    assert found.reasoning_marker_ids == {257}
    assert formats(MESSAGES, *SPECIAL_TEXTS).tool_marker_ids == frozenset()


@pytest.mark.parametrize(
    ("prompt", "is_open", "is_closed"),
    [
        ("hi<|assistant|>", False, False),
        ("hi<|assistant|><think>\n", True, False),
        ("<think>\n\n</think>\n\n", False, True),
        ("what is <think>, please?", False, False),
    ],
)
def test_what_the_prompt_says_of_the_reasoning(prompt: str, is_open: bool, is_closed: bool) -> None:
    form, always = REASONING_FORMATS["think"], REASONING_FORMATS["deepseek_r1"]
    assert (form.is_open(prompt), form.is_closed(prompt)) == (is_open, is_closed)
    assert always.is_open(prompt) is not is_closed
