"""How large a value a chat template may build, checked before it is built where that can be told.

Owns the arithmetic of sizes for operators, string methods and filters. Every fault is Jinja's
SecurityError. A result is at most a few times the limit before some check stops its growth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from jinja2.exceptions import SecurityError

MAX_TEXT_CHARACTERS = 16 * 1024 * 1024
"""Longest string, and longest list, that a template may build."""
MAX_INTEGER_BITS = 1024
_PADDING = frozenset(("center", "ljust", "rjust", "zfill", "wordwrap", "truncate"))
_GROUPING = frozenset(("batch", "slice"))
_PER_LINE = {"indent": "\n", "expandtabs": "\t"}
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{5,}|\{)")


def check_length(num_items: int) -> None:
    """Refuse a string or list of more than MAX_TEXT_CHARACTERS items."""
    if num_items > MAX_TEXT_CHARACTERS:
        raise SecurityError(f"the template builds more than {MAX_TEXT_CHARACTERS} characters")


def check_result(value: object) -> None:
    """Refuse a value that has grown too large."""
    if isinstance(value, str | list | tuple | dict):
        check_length(len(value))


def check_operator(operator: str, left: object, right: object) -> None:
    """Refuse `left operator right` when its result would be too large."""
    if operator == "*":
        _check_product(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
        check_length(len(left) + len(right))
    elif operator == "%" and isinstance(left, str) and _formats_wide(left):
        raise SecurityError("the template formats to too great a width")


def check_operation(name: str, subject: object, arguments: Iterable[object]) -> None:
    """Refuse a string method or filter of that name when its result would be too large."""
    given = list(arguments)
    widest = max((value for value in given if isinstance(value, int)), default=0)
    if name in _PADDING or name in _GROUPING:
        check_length(widest)
    elif name == "tojson":
        # Indentation repeats on every line; nobody indents deeper than a screen is wide.
        check_length(0 if widest <= 100 else MAX_TEXT_CHARACTERS + 1)
    elif name in _PER_LINE and isinstance(subject, str):
        widest += max((len(value) for value in given if isinstance(value, str)), default=0)
        check_length(len(subject) + widest * (1 + subject.count(_PER_LINE[name])))
    elif name == "replace":
        _check_replace(subject, given)
    elif name == "join":
        _check_join(subject, given)
    elif name == "format" and isinstance(subject, str) and _formats_wide(subject):
        raise SecurityError("the template formats to too great a width")


def _formats_wide(text: str) -> bool:
    return bool(_WIDE_PERCENT.search(text) or _WIDE_BRACES.search(text))


def _check_product(left: object, right: object) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            check_length(len(value) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INTEGER_BITS:
        raise SecurityError("the template computes with too large a number")


def _check_replace(subject: object, arguments: list[object]) -> None:
    texts = [str(value) for value in arguments[:2]]
    if len(texts) == 2:
        text = str(subject)
        check_length(len(text) + text.count(texts[0]) * len(texts[1]))


def _check_join(subject: object, arguments: list[object]) -> None:
    """Check `separator.join(items)` (a method) and `items | join(separator)` (a filter)."""
    first = arguments[0] if arguments else ""
    separator, items = (subject, first) if isinstance(subject, str) else (first, subject)
    if isinstance(separator, str) and isinstance(items, list | tuple | str):
        check_length(len(separator) * len(items))
