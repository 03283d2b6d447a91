"""Which tokens may come next so that an output keeps to its grammar, over llguidance.

Owns how a `Grammar` is compiled for one vocabulary, and the state of one output in it. llguidance
is imported when the first grammar is compiled. What may come next depends on the grammar and the
tokens so far alone, so a state is rebuilt anywhere by replaying its tokens. Ends of the output are
not its matter: a state says whether the output may end, never with which token.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

AllowedTokens = npt.NDArray[np.uint32]
"""One bit per token id, id i in bit i % 32 of word i // 32."""

JSON_LAYOUT: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""White space in JSON: at most one space after a comma or a colon, so that it cannot go on for
ever. Both separators are regular expressions."""

_MAX_LEXER_STATES = 20_000
"""At 1 to 2 kB each; beyond it a grammar is too complex."""
_SENTINEL = "\x02"
"""A character that tokenizers keep apart; put before a text, it takes what they add in front."""


class GrammarTokenizer(Protocol):
    """What compiling asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids below this have a meaning."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Control tokens: a grammar has them only where it names them."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Return the ids of `text`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        ...


class TokenGrammar:
    """A vocabulary that grammars are compiled for. Safe to use from several threads.

    Building one takes a fraction of a second, most of it with the interpreter's lock held.
    """

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        """`vocab_size` is the number of logits, which may exceed the tokenizer's."""
        from llguidance import LLTokenizer, TokenizerWrapper

        self.vocab_size = vocab_size
        # The library ends outputs by a token of its own, which nobody can draw.
        end = _Encoding(tokenizer, vocab_size)
        self._library: LLTokenizer = LLTokenizer(TokenizerWrapper(end), eos_token=[vocab_size])

    @property
    def num_words(self) -> int:
        """Words of a row of `AllowedTokens`."""
        return (self.vocab_size + 1 + 31) // 32

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the grammar ready to be matched; InvalidRequest says what is wrong with it."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        start = LLMatcher(self._library, _source(grammar), log_level=0, limits=limits)
        # The first mask builds most of what later ones share.
        start.compute_bitmask()
        if start.is_error():
            raise InvalidRequest(f"the grammar cannot be compiled: {_reason(start.get_error())}")
        return CompiledGrammar(start, self.num_words)


class CompiledGrammar:
    """A grammar for one vocabulary."""

    def __init__(self, start: LLMatcher, num_words: int) -> None:
        self._start = start
        self._num_words = num_words

    def matcher(self) -> Matcher:
        """Return the state of an output that is still empty."""
        return Matcher(self._start.deep_copy(), self._num_words)


class Matcher:
    """Where one output is in its grammar. Not thread-safe."""

    def __init__(self, library: LLMatcher, num_words: int) -> None:
        self._library = library
        self._num_words = num_words

    def allowed(self) -> AllowedTokens:
        """Return the tokens that may come next; none once the output can only end."""
        row = np.empty(self._num_words, np.uint32)
        self._library.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return row

    def accept(self, token_id: int) -> bool:
        """Add a token; False, with nothing changed, when the grammar does not allow it."""
        return self._library.try_consume_tokens([token_id]) == 1

    def forced(self) -> list[int]:
        """Return the usual tokens of the text that must come next, none where there is a choice."""
        return self._library.compute_ff_tokens()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, one after the other, the grammar allows."""
        return self._library.validate_tokens(list(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        if num_tokens and not self._library.rollback(num_tokens):
            raise ValueError(f"{num_tokens} tokens cannot be taken back: {self.failure}")

    def fork(self) -> Matcher:
        """Return another output that is where this one is."""
        return Matcher(self._library.deep_copy(), self._num_words)

    @property
    def may_end(self) -> bool:
        """Whether the output is complete as it is."""
        return self._library.is_accepting()

    @property
    def is_done(self) -> bool:
        """Whether nothing may come any more."""
        return self._library.is_stopped() and not self._library.is_error()

    @property
    def failure(self) -> str:
        """Why the matching broke down (a grammar that became too complex), empty if it did not."""
        return _reason(self._library.get_error()) if self._library.is_error() else ""


def grammar_problem(grammar: Grammar) -> str:
    """Return what is wrong with a grammar whatever the vocabulary is, empty when nothing is."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(_source(grammar))
    return _reason(messages[0]) if is_error else ""


def _source(grammar: Grammar) -> str:
    """Return a grammar in the library's own form."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_LAYOUT)
            except ValueError as error:
                raise InvalidRequest(f"the JSON schema is not JSON: {error}") from None
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _reason(message: str) -> str:
    """Return a fault of the library in one line, without the picture of the place."""
    first, *others = message.strip().split("\n")
    details = (line.removeprefix("error: ") for line in others if line.startswith("error: "))
    detail = next(details, "")
    return f"{first.removesuffix(':')}: {detail}" if detail else first


class _Encoding:
    """A tokenizer in the shape that the library asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        known = range(min(tokenizer.vocab_size, vocab_size))
        content = [tokenizer.token_bytes(token_id) for token_id in known]
        content += [b""] * (vocab_size - len(content))
        self.eos_token_id = vocab_size
        self.tokens: Sequence[bytes] = [*content, b"<end of the grammar>"]
        self.special_token_ids = sorted({*tokenizer.special_ids, vocab_size})
        self._adds_in_front = b"".join(content[i] for i in tokenizer.encode("a", False)) != b"a"
        self._num_sentinel_ids = len(tokenizer.encode(_SENTINEL, False))

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the usual tokens of a text that a grammar forces."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "ignore")
        if self._adds_in_front:
            return list(self._tokenizer.encode(_SENTINEL + text, False)[self._num_sentinel_ids :])
        return list(self._tokenizer.encode(text, False))
