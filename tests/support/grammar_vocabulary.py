"""64 tokens that JSON can be written with, some of several characters, and two special ones."""

from __future__ import annotations

import string
from array import array
from collections.abc import Sequence

from twinfire.artifacts.grammar_compiler import GrammarCompiler
from twinfire.artifacts.token_grammar import TokenGrammar
from twinfire.protocol.grammar import Grammar

_PIECES = ("true", "null", '", "', '": ', '{"', '"}', "ab", "12", "\\", "false", "[]", '",')
TOKENS = (*'{}[]",: ', *string.digits, *"-.e", *string.ascii_lowercase.replace("e", ""), *_PIECES)
NUM_TOKENS = 64
SPECIAL = ("<|call|>", "<|eos|>")
CALL_ID, EOS_ID = NUM_TOKENS - 2, NUM_TOKENS - 1


class GrammarVocabulary:
    """Encodes greedily. Ids between the tokens and the special ones mean nothing."""

    vocab_size = NUM_TOKENS
    special_ids = frozenset((CALL_ID, EOS_ID))

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        ids = array("I")
        longest_first = sorted(range(len(TOKENS)), key=lambda token_id: -len(TOKENS[token_id]))
        while text:
            found = (one for one in longest_first if text.startswith(TOKENS[one]))
            token_id = next(found, None)
            if token_id is not None:
                ids.append(token_id)
            text = text[len(TOKENS[token_id]) if token_id is not None else 1 :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < len(TOKENS):
            return TOKENS[token_id].encode()
        return SPECIAL[token_id - CALL_ID].encode() if token_id >= CALL_ID else b""


def text_of(ids: Sequence[int]) -> str:
    return b"".join(map(GrammarVocabulary().token_bytes, ids)).decode()


def token_grammar() -> TokenGrammar:
    return TokenGrammar(GrammarVocabulary(), NUM_TOKENS)


def grammar_compiler() -> GrammarCompiler:
    return GrammarCompiler(token_grammar)


def json_grammar(schema: str) -> Grammar:
    return Grammar("json_schema", schema)
