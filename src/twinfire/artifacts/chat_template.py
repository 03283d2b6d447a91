"""A model's own chat template: a conversation in, the prompt's text out.

Owns which of a model's named templates applies and how a conversation's last message is continued.
Whatever goes wrong while rendering is the request's fault or the template's, and becomes an
InvalidRequest, never a crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import jinja2

from twinfire.artifacts.fields import Fields
from twinfire.artifacts.template_sandbox import (
    RENDER_LIMIT_S,
    TemplateEnvironment,
    TemplateRefusal,
)
from twinfire.protocol.errors import InvalidRequest, ModelError

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
_CONTINUE_MARK = "\ue000CONTINUE\ue000"
"""Private-use characters, so that no conversation holds it by accident."""
_TRIMMED = " "
"""Follows the mark: a template that trims content drops it, and the text before is trimmed too."""
_PROBE = "\ue000PROBE\ue000"

Messages = Sequence[Mapping[str, object]]


class ChatTemplate:
    """Compiled templates by name, and the special tokens that they see as variables.

    Thread-safe. ModelError at once when a template is not valid Jinja.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        render_limit_s: float = RENDER_LIMIT_S,
    ) -> None:
        if not templates:
            raise ModelError("a chat template needs a text")
        self._texts = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._render_limit_s = render_limit_s
        self._environment = TemplateEnvironment()
        self._compiled = {name: self._compile(name, text) for name, text in templates.items()}

    @property
    def source(self) -> str:
        """Text of the template for a conversation without tools."""
        return self._texts[self._name(with_tools=False)]

    @property
    def tool_source(self) -> str:
        """Text of the template for a conversation with tools, which may be the same."""
        return self._texts[self._name(with_tools=True)]

    @cached_property
    def reads_content_parts(self) -> bool:
        """Whether a message's content may be a list of parts instead of one string.

        Found by rendering a message in parts: a template that reads them shows the text alone.
        """
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text = self.render([{"role": "user", "content": parts}])
        except InvalidRequest:
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        `variables` are the request's own `chat_template_kwargs`; they win over the special tokens
        but not over the conversation. With `continue_final_message` the prompt ends inside the
        last message. InvalidRequest when the template refuses or cannot render the conversation.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt cannot both be true",
                    param="continue_final_message",
                )
            messages = _with_mark(messages)
        text = self._render(
            self._compiled[self._name(with_tools=bool(tools))],
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _before_mark(text) if continue_final_message else text

    def _name(self, with_tools: bool) -> str:
        if with_tools and TOOL_TEMPLATE in self._compiled:
            return TOOL_TEMPLATE
        return DEFAULT_TEMPLATE if DEFAULT_TEMPLATE in self._compiled else next(iter(self._texts))

    def _compile(self, name: str, text: str) -> jinja2.Template:
        try:
            return self._environment.compile_bounded(text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"chat template '{name}' is not valid, line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise ModelError(f"chat template '{name}' is too deeply nested: {error}") from None

    def _render(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        try:
            return self._environment.render_bounded(template, variables, self._render_limit_s)
        except TemplateRefusal as refusal:
            raise InvalidRequest(str(refusal), param="messages") from None
        except Exception as error:
            # A template is a program: it may raise anything, and none of it is ours to crash on.
            problem = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the chat template cannot render this conversation: {problem}", param="messages"
            ) from None


def _with_mark(messages: Messages) -> Messages:
    """Return the conversation with a mark at the end of its last message's text."""
    if not messages:
        raise InvalidRequest("there is no final message to continue", param="messages")
    final = dict(messages[-1])
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_MARK + _TRIMMED
    elif isinstance(content, Sequence) and content and isinstance(content[-1], Mapping):
        last_part = dict(content[-1])
        if not isinstance(last_part.get("text"), str):
            raise InvalidRequest(
                "continue_final_message needs a final message that ends in text", param="messages"
            )
        last_part["text"] += _CONTINUE_MARK + _TRIMMED
        final["content"] = [*content[:-1], last_part]
    else:
        raise InvalidRequest(
            "continue_final_message needs a final message with content", param="messages"
        )
    return [*messages[:-1], final]


def _before_mark(text: str) -> str:
    before, mark, after = text.rpartition(_CONTINUE_MARK)
    if not mark:
        raise InvalidRequest(
            "the chat template leaves out the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(_TRIMMED) else before.rstrip()


def named_templates(fields: Fields) -> dict[str, str]:
    """Return the templates of a `tokenizer_config.json` by name: one text, or a list of them.

    ModelError when `chat_template` is neither.
    """
    value = fields.raw("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            raise fields.fault("chat_template", "must be a string or a list of named templates")
        described = Fields(entry, f"{fields.source}: chat_template")
        templates[described.text("name")] = described.text("template")
    return templates
