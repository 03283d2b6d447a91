"""Grammars as clients write them, in llguidance's Lark.

GBNF is what llama.cpp reads and vLLM calls EBNF: rules `name ::= ...` of which `root` is the whole
output. Anything else is taken for Lark.
"""

from __future__ import annotations

import re

from twinfire.protocol.errors import InvalidRequest

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_CONTINUED = re.compile(r"\n\s*(?=\|)")
_UNICODE_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
_LAST_CODE_POINT = 0x10FFFF


def lark_of(text: str, param: str) -> str:
    """Return a grammar in Lark; InvalidRequest, naming the place, when it cannot be read."""
    if not _GBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    # The converter loses zeros of escapes, and ends a rule at the end of its line.
    text = _UNICODE_ESCAPE.sub(_character, _CONTINUED.sub(" ", text))
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply.", param) from None
    except Exception as error:
        # The converter raises bare Exception for rules that are missing or defined twice.
        raise InvalidRequest(f"`{param}` is not a grammar: {error}", param) from None


def _character(escape: re.Match[str]) -> str:
    code_point = int(escape[1] or escape[2], 16)
    character = chr(code_point) if code_point <= _LAST_CODE_POINT else ""
    is_plain = character.isprintable() and character not in '"\\[]-^/'
    return character if character and is_plain else escape[0]
