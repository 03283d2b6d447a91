from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers

from support.byte_tokenizer import BOS_ID, END_ID, EOS_ID, VOCAB_SIZE, ByteTokenizer
from twinfire.artifacts.tokenizer import Tokenizer
from twinfire.gateway.text.detokenizer import Detokenizer
from twinfire.gateway.text.vocabulary import Vocabulary

BYTES = ByteTokenizer()
VOCABULARY = Vocabulary(BYTES)
EMOJI = "😀".encode()


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    inner = st.lists(st.integers(0, length), max_size=8)
    return inner.map(lambda points: sorted([0, *points, length]))


@st.composite
def split_ids(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    text = draw(st.text(max_size=20)).encode()
    noise = draw(st.lists(st.integers(0, VOCAB_SIZE + 8), max_size=10))
    ids = list(text)
    at = draw(st.integers(0, len(ids)))
    ids[at:at] = noise
    return ids, draw(cuts(len(ids)))


@given(split_ids(), st.booleans())
@example(([*EMOJI[:3], BOS_ID, *EMOJI[3:]], [0, 1, 2, 3, 4, 5]), True)
@example(([*EMOJI[:3]], [0, 3]), True)
def test_pieces_make_the_text_decoded_at_once(
    case: tuple[list[int], list[int]], skip_special_tokens: bool
) -> None:
    ids, points = case
    detokenizer = Detokenizer(VOCABULARY, (), skip_special_tokens)
    pieces = [detokenizer.feed(ids[start:end]) for start, end in pairwise(points)]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3])
def test_prompt_cut_inside_a_character_is_completed_but_never_emitted(
    num_prompt_bytes: int,
) -> None:
    prompt = list(b"long prompt " + EMOJI[:num_prompt_bytes])
    detokenizer = Detokenizer(VOCABULARY, prompt)
    pieces = [detokenizer.feed((token,)) for token in EMOJI[num_prompt_bytes:] + b"!"]
    assert "".join(pieces) + detokenizer.finish() == "😀!"


def test_prompt_cut_inside_a_character_that_never_completes_leaves_no_trace() -> None:
    detokenizer = Detokenizer(VOCABULARY, list(EMOJI[:2]))
    assert detokenizer.feed(list(b"abc")) == "abc"
    assert Detokenizer(VOCABULARY, list(EMOJI[:2])).finish() == ""


def test_character_of_many_tokens_comes_once() -> None:
    ids = list("你好".encode())
    detokenizer = Detokenizer(VOCABULARY)
    assert [detokenizer.feed((token,)) for token in ids] == ["", "", "你", "", "", "好"]


def test_half_a_character_at_the_end_is_shown_as_replacement() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    assert detokenizer.feed(list(EMOJI[:2])) == ""
    assert detokenizer.finish() == "\ufffd"


def test_control_tokens_are_shown_only_when_asked_for() -> None:
    ids = [BOS_ID, ord("a"), END_ID, EOS_ID]
    assert Detokenizer(VOCABULARY).feed(ids) == "a"
    shown = Detokenizer(VOCABULARY, skip_special_tokens=False).feed(ids)
    assert shown == "<|bos|>a<|end|><|eos|>"


def sentencepiece_like() -> Tokenizer:
    """A vocabulary whose words carry their leading space, with byte fallback."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ("▁", "▁hello", "▁world", "lo", "h"):
        vocabulary[word] = len(vocabulary)
    library = LibraryTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(library, {"bos_token": "<s>"}, "test")


def test_first_space_of_a_text_is_dropped_only_at_its_start() -> None:
    tokenizer = sentencepiece_like()
    vocabulary = Vocabulary(tokenizer)
    hello, world = tokenizer.token_id("▁hello"), tokenizer.token_id("▁world")
    bos = tokenizer.token_id("<s>")
    assert hello is not None
    assert world is not None
    assert bos is not None
    assert vocabulary.strips_leading_space
    at_start = Detokenizer(vocabulary, [bos])
    assert at_start.feed((hello,)) + at_start.feed((world,)) == "hello world"
    assert tokenizer.decode([bos, hello, world]) == "hello world"
    assert Detokenizer(vocabulary, [bos, hello]).feed((world,)) == " world"


@given(st.lists(st.integers(0, 275), max_size=12))
def test_byte_fallback_equals_the_library_but_for_replacements(ids: list[int]) -> None:
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    text = "".join([detokenizer.feed((token,)) for token in ids]) + detokenizer.finish()
    whole = tokenizer.decode(ids)
    if "\ufffd" not in text + whole:
        assert text == whole
