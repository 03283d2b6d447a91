"""The Jinja environment that chat templates run in.

Owns what a template may do and use up: no attribute that leads out of the sandbox, no change of
its inputs, and bounds on time, on the size of strings and on numbers, so that a bad template fails
with an error instead of taking the process with it. Knows no conversation.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
import time
from collections.abc import Callable

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from twinfire.artifacts.template_limits import (
    check_length,
    check_operation,
    check_operator,
    check_result,
)

RENDER_LIMIT_S = 5.0


class TemplateRefusal(jinja2.TemplateError):
    """What the template itself says is wrong with the conversation."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the functions that published chat templates use."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, LoopControlExtension],
        )
        self._running = threading.local()
        self.filters["tojson"] = to_json
        self.filters = {name: _bounded_filter(name, code) for name, code in self.filters.items()}
        # It makes text of any length out of nothing.
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_bounded(self, text: str) -> jinja2.Template:
        """Compile a template whose loops, macros and joins are checked as they run."""
        tree = _BoundsInserter().visit(self.parse(text))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def render_bounded(
        self, template: jinja2.Template, variables: dict[str, object], limit_s: float
    ) -> str:
        """Render within `limit_s` seconds and MAX_TEXT_CHARACTERS; SecurityError beyond."""
        self._running.deadline_s = time.monotonic() + limit_s
        pieces: list[str] = []
        num_characters = 0
        for piece in template.generate(variables):
            num_characters += len(piece)
            check_length(num_characters)
            pieces.append(piece)
        return "".join(pieces)

    def check_deadline(self) -> str:
        """Raise SecurityError once the rendering of this thread has run for too long."""
        if time.monotonic() > self._running.deadline_s:
            raise SecurityError("the template runs for too long")
        return ""

    def joined(self, *values: object) -> str:
        """Return what `a ~ b` means, within the limit."""
        texts = [str(value) for value in values]
        check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Compute an intercepted operator if its result is of reasonable size."""
        check_operator(operator, left, right)
        result: object = super().call_binop(context, operator, left, right)
        return result

    def call(
        self, context: Context, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        """Call a function or method if its result is of reasonable size."""
        # The sandbox wraps `str.format`; the method is behind the wrapper.
        method = getattr(function, "__wrapped__", function)
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            check_operation(method.__name__, subject, (*args, *kwargs.values()))
        result: object = super().call(context, function, *args, **kwargs)
        check_result(result)
        return result


def _bounded_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a filter that checks what it is given and what it returns."""
    # Some filters get the environment or context first, then the value.
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        check_operation(name, args[position], (*args[position + 1 :], *kwargs.values()))
        result = function(*args, **kwargs)
        check_result(result)
        return result

    return bounded


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's part for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the class attribute that Jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundsInserter(NodeTransformer):
    """Puts a deadline check into everything that repeats, and bounds string joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.body.insert(0, _method_call("check_deadline", [], node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.body.insert(0, _method_call("check_deadline", [], node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return _environment_call("joined", node.nodes, node.lineno)


def _environment_call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, arguments, [], None, None, lineno=line)


def _method_call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Node:
    return nodes.ExprStmt(_environment_call(name, arguments, line), lineno=line)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models are trained on it: characters as they are, nothing HTML-escaped."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> str:
    raise TemplateRefusal(str(message))


def _strftime_now(format_text: str) -> str:
    return datetime.datetime.now().strftime(format_text)
