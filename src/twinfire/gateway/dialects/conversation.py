"""Conversations as the model's template sees them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

from twinfire.artifacts.chat_template import DEFAULT_TEMPLATE
from twinfire.artifacts.chat_template import ChatTemplate as CompiledTemplate
from twinfire.gateway.dialects.prompts import encode_text
from twinfire.gateway.dialects.requests import ContentPart, Message, TemplateFields
from twinfire.gateway.dialects.tool_prompt import with_tools_described
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.settings import GatewaySettings
from twinfire.gateway.text.answer_formats import AnswerFormats, ParserChoice, detect_formats
from twinfire.gateway.text.tokenizer import ChatTemplate
from twinfire.gateway.text.tool_formats.readers import MISTRAL_ID_CHARS
from twinfire.protocol.errors import InvalidRequest, ModelError

_PART_SEPARATOR = "\n"
_TOOL_CHARS = 400
"""About what a tool's description takes."""
_MISTRAL_ID = re.compile(f"[A-Za-z0-9]{{{MISTRAL_ID_CHARS}}}")
ToolDefinitions = Sequence[Mapping[str, object]]


def check_template_fields(
    request: TemplateFields, messages: Sequence[Message], settings: GatewaySettings
) -> None:
    """Refuse a conversation that cannot be rendered, whatever the template is."""
    if not messages:
        raise InvalidRequest("`messages` must not be empty.", "messages")
    if request.chat_template is not None and not settings.allow_request_chat_template:
        raise InvalidRequest(
            "`chat_template` of a request is not allowed by this server.", "chat_template"
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            "continue_final_message",
        )


def conversation_chars(messages: Sequence[Message], num_tools: int = 0) -> int:
    """Return about how much text there is."""
    total = _TOOL_CHARS * num_tools
    for message in messages:
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif content is not None:
            total += sum(len(part.text or "") for part in content)
        total += 64 + 256 * len(message.tool_calls or ())
    return total


def render_conversation(
    request: TemplateFields,
    messages: Sequence[Message],
    template: ChatTemplate,
    formats: AnswerFormats,
    tools: ToolDefinitions | None,
) -> str:
    """Return the prompt text. May run on a thread.

    `tools` are those that the model is told of; None where the request has none at all.
    """
    rendered = [
        template_message(message, index, template, formats)
        for index, message in enumerate(messages)
    ]
    if tools is not None and not formats.knows_tools:
        rendered = with_tools_described(rendered, tools)
        tools = None
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    return template.render(
        rendered,
        tools=tools or None,
        documents=request.documents,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        variables=_template_variables(request),
    )


def _template_variables(request: TemplateFields) -> dict[str, object]:
    variables: dict[str, object] = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        variables["reasoning_effort"] = effort
        # Templates of models that think, or not, ask for one of these.
        for name in ("enable_thinking", "thinking"):
            variables.setdefault(name, effort != "none")
    return variables


def conversation_ids(
    request: TemplateFields,
    messages: Sequence[Message],
    model: ReadyModel,
    tools: ToolDefinitions | None,
    *,
    add_special_tokens: bool,
    may_be_long: bool,
) -> array[int]:
    """Render and tokenise. May run on a thread."""
    template, formats = model.text.template, model.text.formats
    if request.chat_template is not None:
        template = _compile_template(request.chat_template, model)
        formats = detect_formats(template, model.text.vocabulary, ParserChoice())
    if template is None:
        raise InvalidRequest(
            "The model has no chat template; use /v1/completions with a prompt.", "messages"
        )
    return encode_text(
        render_conversation(request, messages, template, formats, tools),
        model,
        add_special_tokens=add_special_tokens,
        may_be_long=may_be_long,
        param="messages",
    )


def untemplated_ids(
    request: TemplateFields,
    messages: Sequence[Message],
    model: ReadyModel,
    tools: ToolDefinitions | None,
    *,
    add_special_tokens: bool,
    may_be_long: bool,
) -> array[int]:
    """Tokenise the messages' text and nothing else. May run on a thread."""
    text = "".join(message_text(message, index) for index, message in enumerate(messages))
    return encode_text(
        text,
        model,
        add_special_tokens=add_special_tokens,
        may_be_long=may_be_long,
        param="messages",
    )


def template_message(
    message: Message, index: int, template: ChatTemplate, formats: AnswerFormats
) -> dict[str, object]:
    """Return one message in the shape that the template reads."""
    role: str = "tool" if message.role == "function" else message.role
    if role == "developer" and "developer" not in template.source:
        # Templates that do not know the role would drop the instructions silently.
        role = "system"
    texts = content_texts(message, index)
    rendered: dict[str, object] = {"role": role, "content": _PART_SEPARATOR.join(texts)}
    if isinstance(message.content, list) and template.reads_content_parts:
        rendered["content"] = [{"type": "text", "text": text} for text in texts]
    for name in ("name", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    if message.reasoning is not None:
        rendered.setdefault("reasoning_content", message.reasoning)
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = _known_id(message.tool_call_id, formats)
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append({"type": "function", "function": message.function_call})
    if calls:
        rendered["tool_calls"] = [_tool_call(call, formats) for call in calls]
    return rendered


def message_text(message: Message, index: int) -> str:
    """Return a message's content as one text."""
    return _PART_SEPARATOR.join(content_texts(message, index))


def content_texts(message: Message, index: int) -> list[str]:
    """Return the texts of a message's content; InvalidRequest for parts that are not text."""
    content = message.content
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    return [
        part_text(part, f"messages[{index}].content[{position}]")
        for position, part in enumerate(content)
    ]


def _compile_template(source: str, model: ReadyModel) -> ChatTemplate:
    try:
        return CompiledTemplate({DEFAULT_TEMPLATE: source}, model.text.tokenizer.special_tokens)
    except ModelError as error:
        raise InvalidRequest(str(error), "chat_template") from None


def part_text(part: ContentPart, param: str) -> str:
    """Return the text of the part at `param`; InvalidRequest where it is none."""
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidRequest(
            f"`{param}` is of type {part.type[:80]!r}; this model takes text only.", param
        )
    if text is None:
        raise InvalidRequest(f"`{param}` has no text.", param)
    return text


def _tool_call(call: Mapping[str, object], formats: AnswerFormats) -> dict[str, object]:
    """Return a past call as the template reads it: most iterate over the arguments."""
    told = dict(call)
    if isinstance(told.get("id"), str):
        told["id"] = _known_id(str(told["id"]), formats)
    function = told.get("function")
    if not isinstance(function, dict):
        return told
    arguments: object = function.get("arguments")
    if formats.takes_arguments_as_text:
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
    elif isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            # A model's malformed call is history now; the conversation must still go on.
            return told
    told["function"] = {**function, "arguments": arguments}
    return told


def _known_id(call_id: str, formats: AnswerFormats) -> str:
    """Return an id that the template takes; equal ids stay equal."""
    is_mistral = formats.tools is not None and formats.tools.name.startswith("mistral")
    if not is_mistral or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return sha256(call_id.encode("utf-8", "replace")).hexdigest()[:MISTRAL_ID_CHARS]
