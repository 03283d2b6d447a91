"""Grammars compiled for a vocabulary, and the state of one output."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.grammar_vocabulary import (
    CALL_ID,
    EOS_ID,
    NUM_TOKENS,
    GrammarVocabulary,
    json_grammar,
    text_of,
    token_grammar,
)
from twinfire.artifacts.grammar_compiler import GrammarCompiler
from twinfire.artifacts.token_grammar import (
    AllowedTokens,
    CompiledGrammar,
    Matcher,
    TokenGrammar,
    grammar_problem,
)
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

TOKENS = token_grammar()
OBJECT = TOKENS.compile(json_grammar('{"type":"object"}'))


def ids_of(allowed: AllowedTokens) -> list[int]:
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits[:NUM_TOKENS])]


def walk(matcher: Matcher, length: int, rng: random.Random) -> list[int]:
    taken: list[int] = []
    for _ in range(length):
        options = ids_of(matcher.allowed())
        if not options:
            break
        taken.append(rng.choice(options))
        assert matcher.accept(taken[-1])
    return taken


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 40), back=st.integers(0, 40))
def test_what_may_come_next_depends_on_the_tokens_alone(seed: int, length: int, back: int) -> None:
    matcher = OBJECT.matcher()
    taken = walk(matcher, length, random.Random(seed))
    kept = taken[: max(0, len(taken) - back)]
    forked = matcher.fork()
    matcher.rollback(len(taken) - len(kept))
    replayed = OBJECT.matcher()
    assert all(replayed.accept(token_id) for token_id in kept)
    for here, there in ((matcher, replayed),):
        np.testing.assert_array_equal(here.allowed(), there.allowed())
        assert (here.may_end, here.is_done) == (there.may_end, there.is_done)
    for token_id in taken[len(kept) :]:
        assert matcher.accept(token_id)
    np.testing.assert_array_equal(matcher.allowed(), forked.allowed())
    assert matcher.is_done == forked.is_done


def test_every_allowed_token_is_accepted_and_no_other() -> None:
    rng = random.Random(4)
    for _ in range(30):
        matcher = OBJECT.matcher()
        walk(matcher, rng.randrange(20), rng)
        allowed = ids_of(matcher.allowed())
        for token_id in range(NUM_TOKENS):
            other = matcher.fork()
            assert other.accept(token_id) == (token_id in allowed), text_of([token_id])
            assert not other.failure


def test_a_complete_output_is_done_and_can_be_taken_back_from_there() -> None:
    matcher = TOKENS.compile(Grammar("regex", "a|abb")).matcher()
    assert not matcher.may_end
    a, ab, b = (GrammarVocabulary().encode(text)[0] for text in ("a", "ab", "b"))
    assert matcher.accept(a)
    assert (matcher.may_end, matcher.is_done) == (True, False)
    matcher.rollback(1)
    assert matcher.accept(ab)
    assert matcher.accept(b)
    assert (matcher.may_end, matcher.is_done) == (True, True)
    assert ids_of(matcher.allowed()) == []
    assert not matcher.accept(b)
    matcher.rollback(1)
    assert ids_of(matcher.allowed()) == [b]


def test_special_tokens_are_no_text() -> None:
    matcher = TOKENS.compile(Grammar("regex", "(?s:.)*")).matcher()
    assert not {CALL_ID, EOS_ID} & set(ids_of(matcher.allowed()))


def test_text_that_a_grammar_forces_comes_in_the_tokenizers_own_tokens() -> None:
    class AddsInFront(GrammarVocabulary):
        def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
            return super().encode(" " + text)

    for vocabulary in (GrammarVocabulary(), AddsInFront()):
        tokens = TokenGrammar(vocabulary, NUM_TOKENS)
        matcher = tokens.compile(Grammar("lark", 'start: "truenull" /[ab]/')).matcher()
        assert [text_of([one]) for one in ids_of(matcher.allowed())] == ["true"]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("lark", "start: other"), "unknown name"),
        (Grammar("json_schema", "{"), "not JSON"),
        (json_grammar('{"not": {}}'), "not"),
        (Grammar("lark", "start: <|unknown|>"), "<|unknown|>"),
    ],
)
def test_what_cannot_be_compiled_says_why_in_one_line(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TOKENS.compile(grammar)
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_a_special_token_is_no_fault_before_the_vocabulary_is_known() -> None:
    assert grammar_problem(Grammar("lark", "start: <|anything|> <[7]>")) == ""


def wait_for(compiler: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
    until = time.monotonic() + 30
    while (found := compiler.find(grammar)) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return found


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten() -> None:
    compiler = GrammarCompiler(token_grammar)
    first = wait_for(compiler, Grammar("regex", "a"))
    assert wait_for(compiler, Grammar("regex", "a")) is first
    for number in range(80):
        wait_for(compiler, Grammar("regex", f"b{number}"))
    assert wait_for(compiler, Grammar("regex", "a")) is not first
    compiler.close()


def test_a_vocabulary_that_cannot_be_loaded_fails_requests_and_is_tried_again() -> None:
    attempts: list[int] = []

    def load() -> TokenGrammar:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("the disk is gone")
        return token_grammar()

    compiler = GrammarCompiler(load)
    with pytest.raises(InvalidRequest, match="the disk is gone"):
        wait_for(compiler, Grammar("regex", "a"))
    assert (
        wait_for(compiler, Grammar("regex", "a"))
        .matcher()
        .accept(GrammarVocabulary().encode("a")[0])
    )


def test_the_library_is_imported_with_the_first_grammar_only() -> None:
    program = (
        "import sys, twinfire.gateway.app, twinfire.worker.worker, twinfire.worker.build\n"
        "sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
