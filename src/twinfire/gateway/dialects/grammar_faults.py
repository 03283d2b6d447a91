"""What is wrong with a grammar, said in terms of the request that brought it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from twinfire.artifacts.token_grammar import grammar_problem
from twinfire.gateway.settings import RequestLimits
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

UNSUPPORTED_SCHEMA = "unsupported_schema"
_MAX_TRIALS = 512
"""Parts of a schema that are tried to find the one at fault."""
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_TOOL_ARGUMENTS = re.compile(r"^// (.+)\narguments_\d+: %json (.+)$", re.MULTILINE)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "if", "then", "else")
_DEFINITIONS = ("$defs", "definitions")


def check_size(grammar: Grammar, limits: RequestLimits, param: str) -> None:
    """Raise InvalidRequest when a grammar is longer or deeper than allowed."""
    if len(grammar.text) > limits.max_grammar_chars:
        raise InvalidRequest(
            f"`{param}` makes a grammar of {len(grammar.text)} characters; the limit is "
            f"{limits.max_grammar_chars}.",
            param,
        )
    depth = _depth(grammar.text)
    if depth > limits.max_grammar_depth:
        raise InvalidRequest(
            f"`{param}` is nested {depth} deep; the limit is {limits.max_grammar_depth}.", param
        )


def grammar_fault(grammar: Grammar, param: str) -> InvalidRequest | None:
    """Return why workers could not compile a grammar, None when they can. Takes milliseconds."""
    problem = grammar_problem(grammar)
    if not problem:
        return None
    if grammar.kind == "json_schema":
        return _schema_fault(grammar.text, param)
    for name, schema in _TOOL_ARGUMENTS.findall(grammar.text):
        if grammar_problem(Grammar("json_schema", schema)):
            return _schema_fault(schema, param, f"parameters of `{name}`")
    return InvalidRequest(f"`{param}` is not a grammar that can be used: {problem}", param)


def _schema_fault(text: str, param: str, what: str = "the schema") -> InvalidRequest:
    schema: object = msgspec.json.decode(text)
    problem = grammar_problem(Grammar("json_schema", text))
    place = _place_of(schema, problem)
    code = None
    if keys := _UNIMPLEMENTED.search(problem):
        code = UNSUPPORTED_SCHEMA
        problem = f"{keys[1].replace(chr(34), '`')} cannot be enforced"
    elif name := _UNKNOWN_FORMAT.search(problem):
        code = UNSUPPORTED_SCHEMA
        problem = f"the `format` {name[1]} cannot be enforced"
    elif problem.startswith("oneOf"):
        code = UNSUPPORTED_SCHEMA
        problem = "`oneOf` cannot be enforced unless its options exclude each other; use `anyOf`"
    return InvalidRequest(f"`{param}`: {what}, at `{place}`: {problem}.", param, code)


def _place_of(schema: object, problem: str) -> str:
    """Return the path of the innermost part of a schema that has the same fault by itself."""
    definitions = {}
    if isinstance(schema, Mapping):
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    place, num_trials = "$", 0
    while True:
        for step, part in _parts(schema):
            num_trials += 1
            if num_trials > _MAX_TRIALS:
                return place
            if not isinstance(part, Mapping):
                continue
            alone = msgspec.json.encode({**definitions, **part}).decode()
            is_definition = any(name in step for name in _DEFINITIONS)
            own = msgspec.json.encode(part).decode() if is_definition else alone
            if grammar_problem(Grammar("json_schema", own)) == problem:
                place, schema = place + step, part
                break
        else:
            return place


def _parts(schema: object) -> Iterator[tuple[str, object]]:
    """Yield the schemas directly inside one, each with its path from there."""
    if not isinstance(schema, Mapping):
        return
    for name in _SCHEMA_MAPS:
        if isinstance(parts := schema.get(name), Mapping):
            yield from ((f".{name}.{key}", part) for key, part in parts.items())
    for name in _SCHEMA_LISTS:
        if isinstance(parts := schema.get(name), list):
            yield from ((f".{name}[{index}]", part) for index, part in enumerate(parts))
    for name in _SCHEMAS:
        if name in schema:
            yield f".{name}", schema[name]


def _depth(text: str) -> int:
    """Return how deep brackets are nested outside of quoted texts."""
    depth = deepest = 0
    for piece in _BRACKETS.finditer(text):
        bracket = piece[0]
        if bracket in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in ")]}":
            depth -= 1
    return deepest


_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]', re.DOTALL)
