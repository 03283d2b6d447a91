"""What the answers to a chat request may consist of, by its tools, its model and its prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.dialects.tools import RequestedTools
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.text.answer_splitter import AnswerPlan
from twinfire.gateway.text.choice_text import TextOptions
from twinfire.gateway.text.reasoning import ReasoningFormat
from twinfire.gateway.text.tool_formats.readers import READERS, id_maker, reasoning_also_ends_at

_TAIL_TOKENS = 16
"""Of the prompt, in which its opening of the reasoning is found."""


def answer_plan(
    request: ChatRequest, tools: RequestedTools | None, text: TextSide, prompt: Sequence[int]
) -> AnswerPlan | None:
    """Return the plan; None where an answer is text and nothing else."""
    tail = text.vocabulary.join(prompt[-_TAIL_TOKENS:]).decode("utf-8", "replace")
    reasoning = text.formats.reasoning
    if reasoning is not None and reasoning.is_closed(tail):
        reasoning = None
    tool_format = text.formats.tools if tools is not None and tools.may_be_called else None
    if reasoning is None and tool_format is None:
        return None
    plan = AnswerPlan(
        reasoning=reasoning,
        reasoning_is_open=reasoning is not None and reasoning.is_open(tail),
        show_reasoning=request.include_reasoning is not False,
        show_tokens=bool(request.logprobs or request.return_token_ids),
    )
    if tools is None or tool_format is None:
        return plan
    return dataclasses.replace(
        plan,
        read_answer=READERS[tool_format.name],
        tools={tool.name: tool.parameters for tool in tools.callable},
        make_id=id_maker(tool_format),
        one_call=not tools.parallel,
        reasoning_also_ends_at=reasoning_also_ends_at(tool_format),
    )


def planned_options(plan: AnswerPlan, options: TextOptions, text: TextSide) -> TextOptions:
    """Return how the output becomes the text that the plan's readers understand."""
    shown = _reasoning_ids(plan.reasoning, text)
    if plan.read_answer is not None:
        shown |= text.formats.tool_marker_ids
    # Reasoning tokens are counted one by one.
    want_tokens = options.want_tokens or plan.reasoning is not None
    return dataclasses.replace(options, shown_special_ids=shown, want_tokens=want_tokens)


def _reasoning_ids(reasoning: ReasoningFormat | None, text: TextSide) -> frozenset[int]:
    return frozenset() if reasoning is None else text.formats.reasoning_marker_ids
