"""The tokenizer wrapper, and the default model's against transformers' own reading of it."""

from __future__ import annotations

import threading
import time
from array import array
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from support.checkpoint_files import write_json
from support.default_model import default_model_path
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.tokenizer import Tokenizer
from twinfire.artifacts.tokenizer_files import read_tokenizer
from twinfire.artifacts.vocabulary_bytes import byte_level_alphabet
from twinfire.protocol.errors import InvalidRequest, ModelError

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2024; we've 1234567 reasons.",
    "  leading and trailing  \n\n\t tabs\r\n",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2}  # naïve\n",
    "日本語のテキストと中文，还有한국어。",
    "👍🏽 family 👨‍👩‍👧‍👦 flags 🇩🇪 and ﷽",
    "Ünïcödé e\u0301 \u200b zero\u00a0width ½ Ⅻ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|>y <|im_start| > <|IM_END|>",
    "\x00\x01\x7f control \ufeff bom",
    "a" * 3000,
]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return open_checkpoint(default_model_path()).tokenizer()


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    path = default_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Its GGUF reader leaves out that this family cuts every digit (and ½, Ⅻ) off by itself.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(
    ours: Tokenizer, reference: PreTrainedTokenizerBase, text: str
) -> None:
    ids = ours.encode(text)
    assert ids.typecode == "I"
    assert ids.tolist() == reference.encode(text)
    assert ours.decode(ids) == reference.decode(ids.tolist(), skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_encodes_as_transformers_does(
    ours: Tokenizer, reference: PreTrainedTokenizerBase, text: str
) -> None:
    ids = ours.encode(text)
    assert ids.tolist() == reference.encode(text)
    # The family's vocabulary lacks a few bytes that begin no assigned character.
    known = {content for content in ours.vocabulary if len(content) == 1}
    expected = b"".join(bytes([byte]) for byte in text.encode() if bytes([byte]) in known)
    assert b"".join(map(ours.token_bytes, ids)) == expected


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=20))
def test_token_bytes_add_up_to_the_decoded_text(ours: Tokenizer, ids: list[int]) -> None:
    joined = b"".join(map(ours.token_bytes, ids)).decode("utf-8", errors="replace")
    assert ours.decode(ids, skip_special_tokens=False) == joined


def test_facts_of_the_default_model(ours: Tokenizer) -> None:
    assert ours.vocab_size == 49_152
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.special_ids == frozenset(range(17))
    assert not ours.adds_bos
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    (space_hello,) = ours.encode(" Hello")
    assert ours.token_entry(space_hello) == "ĠHello"
    assert ours.token_text(space_hello) == " Hello"
    assert ours.token_id("ĠHello") == space_hello
    assert len(ours.vocabulary) == 49_152


def test_ids_outside_the_vocabulary_are_no_text(ours: Tokenizer) -> None:
    hello = ours.encode("Hello").tolist()
    assert ours.decode([-1, *hello, 49_152, 2**31, 2**32, 2**70]) == "Hello"
    assert ours.token_bytes(2**40) == b""
    assert ours.token_bytes(-1) == b""
    assert ours.token_entry(49_152) is None


def test_lone_surrogates_are_the_requests_fault(ours: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        ours.encode("a\ud800b")


def test_encoding_lets_other_threads_run(ours: Tokenizer) -> None:
    text = "many words and 12345 numbers, again and again. " * 12_000
    ids: list[array[int]] = []
    encoder = threading.Thread(target=lambda: ids.append(ours.encode(text)))
    turns_taken_s: list[float] = []
    encoder.start()
    while encoder.is_alive():
        turns_taken_s.append(time.perf_counter())
    encoder.join()
    assert len(ids[0]) > 100_000
    # With the GIL held throughout, this thread would get a handful of turns.
    assert len(turns_taken_s) > 1000


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer of single bytes with a BOS, and settings that must not take effect."""
    library = tokenizers.Tokenizer(
        models.BPE({**byte_level_alphabet(), "<s>": 256, "</s>": 257}, [])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    library.enable_truncation(3)
    library.enable_padding(length=8)
    return library


def test_a_folders_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_json(
        tmp_path / "tokenizer_config.json",
        {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None},
    )
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.encode("abcdef").tolist() == [256, *b"abcdef"]
    assert tokenizer.encode("abcdef", add_special_tokens=False).tolist() == list(b"abcdef")
    assert tokenizer.adds_bos
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    # Named in the configuration only, hence special all the same.
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a</s>", add_special_tokens=False).tolist() == [97, 257]
    assert tokenizer.decode([256, 97, 257]) == "a"
    assert tokenizer.vocabulary[:256] == tuple(bytes([byte]) for byte in range(256))


def test_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a valid tokenizer"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_without_token_bytes_is_refused(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"decoder \(WordPiece\) is not supported"):
        Tokenizer(library, {}, "somewhere")
