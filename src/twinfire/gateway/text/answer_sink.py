"""Where readers of an answer put its parts; joins what is alike and numbers the calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

from twinfire.gateway.text.answer_parts import (
    AnswerPart,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)

ToolSchemas = Mapping[str, Mapping[str, object]]
"""The JSON Schema of each tool's arguments, by its name."""
MakeId = Callable[[], str]

_NAME = re.compile(r"[^\s\"<>\[\]{}]+")


def call_id() -> str:
    """Return a new id in OpenAI's form."""
    return "call_" + secrets.token_hex(12)


class AnswerSink:
    """The parts of one choice. White space next to a call or to reasoning's ends is dropped."""

    __slots__ = (
        "_held_space",
        "_is_dropping",
        "_make_id",
        "_one_call",
        "_parts",
        "_seen_ids",
        "_show_reasoning",
        "num_calls",
        "tools",
    )

    def __init__(
        self, tools: ToolSchemas, make_id: MakeId, *, show_reasoning: bool, one_call: bool
    ) -> None:
        """With `one_call` calls after the first are dropped."""
        self.tools = tools
        self.num_calls = 0
        self._make_id = make_id
        self._show_reasoning = show_reasoning
        self._one_call = one_call
        self._is_dropping = False
        self._held_space = ""
        self._parts: list[AnswerPart] = []
        self._seen_ids: set[str] = set()

    def take(self) -> list[AnswerPart]:
        """Return the parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        """Add text of the answer; space at its end waits for what follows."""
        shown = self._without_space(text)
        if not shown:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ContentText):
            last.text += shown
        else:
            self._parts.append(ContentText(shown))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        shown = self._without_space(text)
        if not shown or not self._show_reasoning:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ReasoningText):
            last.text += shown
        else:
            self._parts.append(ReasoningText(shown))

    def drop_space(self) -> None:
        """Forget the space that waits."""
        self._held_space = ""

    def end_text(self) -> None:
        """The text has ended: space that waits is part of it, unless calls end the answer."""
        space, self._held_space = self._held_space, ""
        if space and not self.num_calls:
            self._parts.append(ContentText(space))

    def is_name(self, name: str) -> bool:
        """Whether a tool could be called so."""
        return _NAME.fullmatch(name) is not None

    def start_call(self, name: str, its_id: str | None = None) -> None:
        """Begin a call, under the model's own id where that is given and new."""
        self.drop_space()
        self._is_dropping = self._one_call and self.num_calls > 0
        if self._is_dropping:
            return
        if its_id is None or its_id in self._seen_ids:
            its_id = self._make_id()
        self._seen_ids.add(its_id)
        self._parts.append(ToolCallStart(self.num_calls, its_id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add JSON text of the last call's arguments."""
        if self._is_dropping or not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallArguments):
            last.text += text
        else:
            self._parts.append(ToolCallArguments(self.num_calls - 1, text))

    def _without_space(self, text: str) -> str:
        text = self._held_space + text
        shown = text.rstrip()
        self._held_space = text[len(shown) :]
        return shown
