"""Chat templates: equal to transformers', and harmless whatever they try."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from support.default_model import default_model_path
from twinfire.artifacts.chat_template import ChatTemplate
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.template_limits import MAX_TEXT_CHARACTERS
from twinfire.protocol.errors import InvalidRequest, ModelError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_STYLE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_STYLE = """{%- if messages[0]["role"] == "system" %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Roles must alternate user and assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- else %}
        {% generation %}{{- " " + message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
PARTS_STYLE = """{%- macro body(content) -%}
  {%- if content is string %}{{ content }}{% else %}
    {%- for part in content %}{{ part.text }}{% endfor %}
  {%- endif %}
{%- endmacro %}
{%- for m in messages %}
<{{ m.role }}>{{ body(m.content) }}{% if thinking is defined and thinking %}<think>{% endif %}
{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA_STYLE,
    "mistral": MISTRAL_STYLE,
    "parts": PARTS_STYLE,
}
CONVERSATION = [
    {"role": "user", "content": "  What's <b>2 & 3</b>? "},
    {"role": "assistant", "content": 'Five — "5".\n'},
    {"role": "user", "content": "日本語で"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": ["<", "&", "'"]}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def from_transformers(text: str, messages: Any, **variables: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=text, **variables, **SPECIAL)
    return rendered[0]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_renders_as_transformers_does(
    name: str, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL)
    for messages in (CONVERSATION, [{"role": "system", "content": "Be brief."}, *CONVERSATION]):
        ours = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={"thinking": True},
        )
        assert ours == from_transformers(
            TEMPLATES[name],
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            thinking=True,
        )


@pytest.mark.parametrize("name", ["chatml", "llama", "parts"])
@pytest.mark.parametrize("content", ["The answer is", "trailing space "])
def test_continues_the_final_message_as_transformers_does(name: str, content: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL)
    messages = [*CONVERSATION, {"role": "assistant", "content": content}]
    ours = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == from_transformers(TEMPLATES[name], messages, continue_final_message=True)
    assert ours.endswith(content.strip()) or ours.endswith(content)


def test_the_default_models_own_template() -> None:
    template = open_checkpoint(default_model_path()).chat_template()
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text == from_transformers(
        template.source, [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )


def test_the_tool_template_serves_conversations_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([]) == "plain"
    assert template.render([], tools=TOOLS) == "tools"
    assert template.source == "plain"
    assert ChatTemplate({"rag": "only"}, {}).render([]) == "only"


def test_variables_reach_the_template_but_cannot_replace_the_conversation() -> None:
    template = ChatTemplate({"default": "{{ bos_token }}{{ messages|length }}{{ extra }}"}, SPECIAL)
    assert template.render([], variables={"extra": 7, "messages": [1, 2]}) == "<s>07"
    assert template.render([], variables={"bos_token": "B", "extra": ""}) == "B0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHATML, False),
        (LLAMA_STYLE, False),
        (PARTS_STYLE, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_which_templates_read_content_parts(text: str, expected: bool) -> None:
    assert ChatTemplate({"default": text}, SPECIAL).reads_content_parts == expected


def test_what_a_template_refuses_is_the_requests_fault() -> None:
    template = ChatTemplate({"default": MISTRAL_STYLE}, SPECIAL)
    with pytest.raises(InvalidRequest, match="Roles must alternate") as caught:
        template.render([CONVERSATION[0], CONVERSATION[0]])
    assert caught.value.param == "messages"


def test_continuing_needs_something_to_continue() -> None:
    template = ChatTemplate({"default": CHATML}, SPECIAL)
    silent = ChatTemplate({"default": "nothing"}, SPECIAL)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for chosen, messages in (
        (template, []),
        (template, [{"role": "assistant"}]),
        (template, [{"role": "assistant", "content": [{"type": "image_url"}]}]),
        (silent, CONVERSATION),
    ):
        with pytest.raises(InvalidRequest):
            chosen.render(messages, **options)
    with pytest.raises(InvalidRequest, match="cannot both"):
        template.render(CONVERSATION, continue_final_message=True)


@pytest.mark.parametrize("text", ["{% if %}", "{{ x", "{% nosuchtag %}", "{{ x|nosuchfilter }}"])
def test_a_template_that_does_not_compile_is_a_model_error(text: str) -> None:
    with pytest.raises(ModelError, match="chat template 'default' is not valid, line 1"):
        ChatTemplate({"default": text}, {})


def test_a_template_nested_without_end_is_a_model_error() -> None:
    with pytest.raises(ModelError):
        ChatTemplate({"default": "{{ " + "(" * 5000 + ")" * 5000 + " }}"}, {})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ ('{0.__class__.__mro__}'|attr('format'))(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{% set x = messages.append(1) %}",
    "{% set x = messages[0].update({'role': 'x'}) %}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_the_sandbox_holds(text: str) -> None:
    template = ChatTemplate({"default": text}, SPECIAL)
    messages = [{"role": "user", "content": "x"}]
    try:
        rendered = template.render(messages)
    except InvalidRequest:
        rendered = ""
    assert "class" not in rendered
    assert "root:" not in rendered
    assert messages == [{"role": "user", "content": "x"}]


GREEDY = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(10 ** 9) | list }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 10 ** 10 ** 10 ** 10 }}",
    "{% set n = namespace(x=9) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='xy') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='xy') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='xy') %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "{% set n = namespace(x='xy') %}"
    "{% for i in range(60) %}{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ 'x'.zfill(width=10 ** 10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10 ** 10, 1) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
    "{{ 'x\n' | indent(10 ** 10) }}",
    "{{ '\t'.expandtabs(10 ** 10) }}",
    "{{ ('x' * 9999999).join('y' * 9999) }}",
    "{{ lipsum(n=10 ** 9) }}",
    "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
]


@pytest.mark.parametrize("text", GREEDY)
def test_a_greedy_template_is_stopped(text: str) -> None:
    template = ChatTemplate({"default": text}, {}, render_limit_s=0.5)
    started_s = time.perf_counter()
    with pytest.raises(InvalidRequest, match="cannot render"):
        template.render([{"role": "user", "content": "x"}])
    assert time.perf_counter() - started_s < 10.0


def test_large_prompts_are_within_the_limits() -> None:
    template = ChatTemplate({"default": LLAMA_STYLE}, SPECIAL)
    content = "words and\n" * (MAX_TEXT_CHARACTERS // 20)
    rendered = template.render([{"role": "user", "content": content}])
    assert content.strip() in rendered
    many = [{"role": "user", "content": "x"}] * 5000
    assert template.render(many).count("<|start_header_id|>user") == 5000


def test_threads_render_at_once_within_their_own_limits() -> None:
    slow = "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    text = "{% if messages[0].content == 'slow' %}" + slow + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate({"default": text}, {}, render_limit_s=0.5)
    outcomes: dict[str, str] = {}

    def render(content: str) -> None:
        try:
            outcomes[content] = template.render([{"role": "user", "content": content}])
        except InvalidRequest as error:
            outcomes[content] = str(error)

    contents = ["slow", *map(str, range(20))]
    threads = [threading.Thread(target=render, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "too long" in outcomes.pop("slow")
    assert outcomes == {str(number): str(number) for number in range(20)}
