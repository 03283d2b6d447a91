"""The tools of a request: their shapes and limits, and which of them the model may call.

OpenAI's `tools`, their flat form that Workers AI takes, and the deprecated `functions`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.protocol.errors import InvalidRequest

MAX_TOOLS = 128
_MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}

ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask for."""

    name: str
    parameters: Mapping[str, object]
    """JSON Schema of the arguments, an object's."""
    definition: Mapping[str, object]
    """As chat templates read it."""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """What a request says about tools. There is at least one."""

    tools: Sequence[Tool]
    """All that are declared; templates are shown them."""
    mode: ToolMode
    callable: Sequence[Tool]
    """Those that may be called; one where the request names it."""
    parallel: bool
    """Whether one answer may have several calls."""
    is_legacy: bool = False
    """Whether they came as `functions`, so that a call goes back as `function_call`."""

    @property
    def is_named(self) -> bool:
        """Whether the request says which one must be called."""
        return self.mode == "required" and len(self.callable) == 1

    @property
    def may_be_called(self) -> bool:
        """Whether an answer may have calls. The model is told of the tools in any case.

        A prompt without them would begin otherwise, and find nothing of the conversation cached.
        """
        return self.mode != "none"

    @property
    def definitions(self) -> list[Mapping[str, object]]:
        """What templates are shown."""
        return [tool.definition for tool in self.tools]


def requested_tools(request: ChatRequest) -> RequestedTools | None:
    """Return the request's tools, None without any; InvalidRequest names what is wrong."""
    has_legacy = request.functions is not None or request.function_call is not None
    is_legacy = request.tools is None and request.tool_choice is None and has_legacy
    field = "functions" if is_legacy else "tools"
    choice_field = "function_call" if is_legacy else "tool_choice"
    declared = request.functions if is_legacy else request.tools
    choice = request.function_call if is_legacy else request.tool_choice
    tools = declared_tools(declared, field)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"`{choice_field}` needs `{field}`.", choice_field)
        return None
    mode, names = _choice(choice, choice_field)
    by_name = {tool.name: tool for tool in tools}
    for name in names or ():
        if name not in by_name:
            raise InvalidRequest(
                f"`{choice_field}` names `{name[:80]}`, which is not in `{field}`.", choice_field
            )
    callable_tools = tools if names is None else [by_name[name] for name in names]
    parallel = request.parallel_tool_calls is not False and not is_legacy
    return RequestedTools(tools, mode, callable_tools, parallel, is_legacy)


def declared_tools(declared: object, field: str = "tools") -> list[Tool]:
    """Return tools in the order of the request."""
    if declared is None:
        return []
    if not isinstance(declared, list):
        raise InvalidRequest(f"`{field}` must be a list.", field)
    if len(declared) > MAX_TOOLS:
        raise InvalidRequest(
            f"`{field}` has {len(declared)} entries; the limit is {MAX_TOOLS}.", field
        )
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(declared):
        tool = _tool(entry, f"{field}[{index}]")
        if tool.name in tools:
            raise InvalidRequest(f"`{field}` has two tools named `{tool.name}`.", field)
        tools[tool.name] = tool
    return list(tools.values())


def _tool(entry: object, param: str) -> Tool:
    if not isinstance(entry, dict):
        raise InvalidRequest(f"`{param}` must be an object.", param)
    kind = entry.get("type", "function")
    function = entry.get("function")
    if kind != "function":
        raise InvalidRequest(
            f"`{param}` is of type {str(kind)[:80]!r}; only `function` is supported.",
            f"{param}.type",
            "unsupported",
        )
    if function is None:
        function = entry
    else:
        param += ".function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"`{param}` must be an object.", param)
    name = _name(function.get("name"), f"{param}.name")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"`{param}.description` must be a string.", f"{param}.description")
    parameters = _parameters(function.get("parameters"), f"{param}.parameters")
    shown: dict[str, object] = {"name": name}
    if description is not None:
        shown["description"] = description
    shown["parameters"] = parameters
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"`{param}.strict` must be true or false.", f"{param}.strict")
    return Tool(name, parameters, {"type": "function", "function": shown}, bool(strict))


def _name(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"`{param}` is required.", param)
    if len(value) > _MAX_NAME_CHARS:
        raise InvalidRequest(
            f"`{param}` has {len(value)} characters; the limit is {_MAX_NAME_CHARS}.", param
        )
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"`{param}` is {value[:80]!r}; a name has letters, digits, `_`, `-` and `.` only.",
            param,
        )
    return value


def _parameters(value: object, param: str) -> Mapping[str, object]:
    if value is None or value == {}:
        return _NO_PARAMETERS
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{param}` must be a JSON Schema object.", param)
    if value.get("type", "object") != "object":
        raise InvalidRequest(
            f"`{param}` must be the schema of an object, not of `{str(value['type'])[:80]}`.",
            f"{param}.type",
        )
    if not isinstance(value.get("properties", {}), dict):
        raise InvalidRequest(f"`{param}.properties` must be an object.", f"{param}.properties")
    return value


def _choice(choice: object, param: str) -> tuple[ToolMode, list[str] | None]:
    """Return the mode and the names of the tools that may be called, None for all."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required" | "any":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {"type": "function", "name": str(name)}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*allowed]}}:
            return _allowed(mode, allowed, param)
        case {"name": str(name)}:
            return "required", [name]
    raise InvalidRequest(
        f'`{param}` must be "none", "auto", "required" or the function to call.', param
    )


def _allowed(
    mode: object, allowed: Sequence[object], param: str
) -> tuple[ToolMode, list[str] | None]:
    names: list[str] = []
    for entry in allowed:
        match entry:
            case {"type": "function", "function": {"name": str(name)}}:
                names.append(name)
            case _:
                raise InvalidRequest(f"`{param}.allowed_tools.tools` must name functions.", param)
    if mode == "auto":
        return "auto", names
    if mode == "required" and names:
        return "required", names
    raise InvalidRequest(
        f'`{param}.allowed_tools` must have the mode "auto" or "required", and tools.', param
    )
