"""Tokenizers rebuilt from metadata: cutting of text, merges, sentencepiece scores."""

from __future__ import annotations

import heapq
import unicodedata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from support.checkpoint_files import GgufBuilder
from twinfire.artifacts.gguf_file import GgufFile
from twinfire.artifacts.gguf_tokenizer import read_gguf_tokenizer
from twinfire.artifacts.tokenizer import Tokenizer
from twinfire.artifacts.vocabulary_bytes import byte_level_alphabet
from twinfire.protocol.errors import ModelError

ALPHABET = list(byte_level_alphabet())
MERGES = ["1 2", "12 3", "h e", "Ġ t", "a b", "a B", "( a", "' S"]
WORDS = [merge.replace(" ", "") for merge in MERGES]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(folder: Path, pre: str | None, add_bos: bool | None = None) -> Tokenizer:
    builder = GgufBuilder(folder / "t.gguf")
    writer = builder.writer
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = [*ALPHABET, *WORDS, "<s>", "</s>", "<tool>"]
    writer.add_token_list(tokens)
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    return read_gguf_tokenizer(GgufFile(builder.save()))


def entries(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_entry(token_id) for token_id in tokenizer.encode(text, False)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4"]),
        (None, ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
    ],
)
def test_each_pre_tokenizer_cuts_digits_its_own_way(
    tmp_path: Path, pre: str | None, expected: list[str]
) -> None:
    assert entries(byte_level(tmp_path, pre), "1234") == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "x123456", ["x", "123", "4", "5", "6"]),
        ("llama-bpe", "a12123", ["a", "12", "1", "2", "3"]),
        ("gpt-2", "a12123", ["a", "12", "123"]),
        # Only tekken cuts camel case, so only there the merge over the cut is lost.
        ("llama-bpe", "aB", ["aB"]),
        ("tekken", "aB", ["a", "B"]),
        # Only the newer ones take a mark before a word along with it.
        ("gpt-2", "(a", ["(", "a"]),
        ("qwen2", "(a", ["(a"]),
        # Only GPT-2's knows contractions in lower case alone.
        ("gpt-2", "he'S", ["he", "'", "S"]),
        ("qwen2", "he'S", ["he", "'S"]),
    ],
)
def test_merges_stay_within_cuts(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert entries(byte_level(tmp_path, pre), text) == expected


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    qwen2, llama3 = byte_level(tmp_path, "qwen2"), byte_level(tmp_path, "llama-bpe")
    assert qwen2.encode("e\u0301", False) == qwen2.encode("é", False)
    assert llama3.encode("e\u0301", False) != llama3.encode("é", False)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_any_text_survives(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(tmp_path, pre)

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(st.characters(codec="utf-8"), max_size=40))
    def check(text: str) -> None:
        decoded = tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False)
        assert decoded == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)

    check()


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("tekken", None, True),
    ],
)
def test_who_adds_a_bos(tmp_path: Path, pre: str, add_bos: bool | None, expected: bool) -> None:
    tokenizer = byte_level(tmp_path, pre, add_bos)
    assert tokenizer.adds_bos == expected
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == expected
    assert tokenizer.encode("a", False)[0] != tokenizer.bos_token_id


def test_control_and_user_defined_tokens_match_whole(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2")
    assert entries(tokenizer, "a</s><tool>b") == ["a", "</s>", "<tool>", "b"]
    ids = tokenizer.encode("a</s><tool>b", False)
    assert tokenizer.decode(ids) == "a<tool>b"


SPM_PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "aa", "aaaa", "ca", "▁▁"]


def sentencepiece(folder: Path, add_space_prefix: bool | None = None) -> Tokenizer:
    builder = GgufBuilder(folder / "t.gguf")
    writer = builder.writer
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(SPM_PIECES)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(SPM_PIECES))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    return read_gguf_tokenizer(GgufFile(builder.save()))


def naive_sentencepiece(text: str) -> list[str]:
    """Join the neighbours with the best score, leftmost first, until none is left."""
    score = {piece: -float(rank) for rank, piece in enumerate(SPM_PIECES)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        candidates = [
            (-score[left + right], index)
            for index, (left, right) in enumerate(pairwise(pieces))
            if left + right in score
        ]
        if not candidates:
            break
        _, index = heapq.nsmallest(1, candidates)[0]
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    known: list[str] = []
    for piece in pieces:
        known += [piece] if piece in score else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return known


def test_scores_merge_as_sentencepiece_does(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False)

    @settings(max_examples=300, deadline=None)
    @given(text=st.text("abc é", max_size=14))
    def check(text: str) -> None:
        assert entries(tokenizer, text) == naive_sentencepiece(text)
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, False))) == text.encode()

    check()


def test_sentencepiece_prefix_bos_and_byte_fallback(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert entries(tokenizer, "ab") == ["▁ab"]
    assert tokenizer.encode("ab")[0] == 1
    assert entries(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab 👍 c")) == "ab 👍 c"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.special_ids == {0, 1, 2}


def test_an_embedded_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE(dict(zip(ALPHABET, range(256), strict=True)), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    builder = GgufBuilder(tmp_path / "t.gguf")
    builder.writer.add_string("tokenizer.huggingface.json", library.to_str())
    builder.writer.add_token_list(ALPHABET)
    tokenizer = read_gguf_tokenizer(GgufFile(builder.save()))
    assert tokenizer.decode(tokenizer.encode("hi ↯")) == "hi ↯"


def broken(folder: Path, model: str, pre: str, merges: list[str], scores: int) -> GgufFile:
    builder = GgufBuilder(folder / "t.gguf")
    builder.writer.add_tokenizer_model(model)
    builder.writer.add_tokenizer_pre(pre)
    builder.writer.add_token_list(["a", "b"])
    if merges:
        builder.writer.add_token_merges(merges)
    if scores:
        builder.writer.add_token_scores([0.0] * scores)
    builder.writer.add_tensor("t", np.zeros((1, 32), np.float32))
    return GgufFile(builder.save())


@pytest.mark.parametrize(
    ("model", "pre", "merges", "scores", "message"),
    [
        ("t5", "default", [], 0, r"tokenizer\.ggml\.model' is 't5'; supported are gpt2, llama"),
        ("gpt2", "chatglm-bpe", [], 0, "'chatglm-bpe'; supported are codeshell"),
        ("gpt2", "default", ["ab"], 0, "has 'ab', which is not a pair"),
        ("gpt2", "default", ["a c"], 0, "merges are not valid"),
        ("llama", "default", [], 0, "must have one score per token"),
        ("llama", "default", [], 3, "must have one score per token"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(
    tmp_path: Path, model: str, pre: str, merges: list[str], scores: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf_tokenizer(broken(tmp_path, model, pre, merges, scores))


def test_a_file_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    builder = GgufBuilder(tmp_path / "t.gguf")
    builder.writer.add_tokenizer_model("gpt2")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens' is missing"):
        read_gguf_tokenizer(GgufFile(builder.save()))
