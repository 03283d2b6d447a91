"""What the output of a request must look like: a grammar as the gateway sends it to workers."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that has been checked already; a worker only compiles it."""

    kind: GrammarKind
    """`json_schema`: a JSON Schema; `regex`: matches the whole output; `lark`: llguidance's Lark
    dialect, in which JSON, choices, EBNF and tool calls are written too."""
    text: str
