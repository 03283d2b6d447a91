from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import EOS_ID, ByteTokenizer
from support.scripted_backend import scripted_rows
from twinfire.gateway.text.choice_text import ChoiceText, TextDelta, TextOptions
from twinfire.gateway.text.stop_strings import StopStrings
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.messages import ChoiceDelta, FinishReason
from twinfire.protocol.tokens import pack_ids

VOCABULARY = Vocabulary(ByteTokenizer())


def options(*stops: str, min_tokens: int = 0, include: bool = False) -> TextOptions:
    return TextOptions(
        stops=StopStrings(stops),
        include_stop_in_output=include,
        min_tokens=min_tokens,
        want_tokens=True,
    )


def play(
    tokens: Sequence[int],
    settings: TextOptions,
    step: int,
    finish: FinishReason = "length",
) -> list[TextDelta]:
    choice = ChoiceText(0, VOCABULARY, list(b"prompt"), settings)
    deltas: list[TextDelta] = []
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        reason = finish if start + step >= len(tokens) else None
        rows = scripted_rows(part, 2)
        deltas.append(choice.feed(ChoiceDelta(1, 0, pack_ids(part), reason, None, rows)))
        if choice.finished:
            break
    return deltas


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def token_ids_of(deltas: list[TextDelta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50])
def test_text_tokens_and_logprobs_end_together_at_a_stop(step: int) -> None:
    deltas = play(list(b"one\nstop and more"), options("stop"), step)
    assert text_of(deltas) == "one\n"
    assert token_ids_of(deltas) == list(b"one\n")
    logprobs = [token.logprob for delta in deltas for token in delta.tokens]
    assert [entry.token_id for entry in logprobs if entry is not None] == list(b"one\n")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "stop")
    assert deltas[-1].num_output_tokens == len(b"one\nstop")


def test_included_stop_keeps_its_tokens() -> None:
    deltas = play(list(b"one stop more"), options("stop", include=True), 4)
    assert text_of(deltas) == "one stop"
    assert token_ids_of(deltas) == list(b"one stop")


def test_no_part_of_a_stop_is_shown_before_it_is_decided() -> None:
    deltas = play(list(b"a<b<en<end>"), options("<end>"), 1)
    shown = [delta.text for delta in deltas]
    assert shown == ["a", "", "<b", "", "", "", "<en", "", "", "", ""]
    assert token_ids_of(deltas[:3]) == list(b"a<b")


@pytest.mark.parametrize("step", [1, 3, 20])
def test_stop_before_min_tokens_is_text(step: int) -> None:
    deltas = play(list(b"x.y.z.w"), options(".", min_tokens=4), step)
    assert text_of(deltas) == "x.y.z"
    assert deltas[-1].stop_reason == "."


def test_held_text_is_flushed_at_the_end() -> None:
    deltas = play(list(b"almost sto"), options("stop"), 1)
    assert text_of(deltas) == "almost sto"
    assert token_ids_of(deltas) == list(b"almost sto")
    assert deltas[-1].finish_reason == "length"


def test_end_token_gives_no_text_but_is_a_token() -> None:
    deltas = play([*b"hi", EOS_ID], options(), 1, finish="stop")
    assert text_of(deltas) == "hi"
    assert token_ids_of(deltas) == [*b"hi", EOS_ID]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_stop_completed_by_the_replacement_at_the_end_counts() -> None:
    deltas = play([ord("a"), 0xF0, 0x9F], options("\ufffd"), 1)
    assert text_of(deltas) == "a"
    assert deltas[-1].stop_reason == "\ufffd"


@given(
    st.text(alphabet="ab é😀", max_size=16),
    st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=3), max_size=3),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_steps_do_not_matter(text: str, stops: list[str], step: int, min_tokens: int) -> None:
    tokens = [*text.encode(), EOS_ID]
    settings = options(*stops, min_tokens=min_tokens)
    one_by_one = play(tokens, settings, 1, finish="stop")
    stepped = play(tokens, settings, step, finish="stop")
    assert text_of(stepped) == text_of(one_by_one)
    assert token_ids_of(stepped) == token_ids_of(one_by_one)
    assert stepped[-1].stop_reason == one_by_one[-1].stop_reason
    assert stepped[-1].num_output_tokens == one_by_one[-1].num_output_tokens
    plain = TextOptions(settings.stops, min_tokens=min_tokens)
    assert text_of(play(tokens, plain, step, finish="stop")) == text_of(one_by_one)
