"""A tokenizer rebuilt from GGUF metadata.

Owns what the format leaves implicit: how text is cut before merging (the regular expressions that
`tokenizer.ggml.pre` names), and the merges of sentencepiece vocabularies, which store scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from twinfire.artifacts.gguf_file import GgufFile
from twinfire.artifacts.tokenizer import Tokenizer
from twinfire.artifacts.tokenizer_files import library_tokenizer
from twinfire.artifacts.vocabulary_bytes import SPACE_MARK
from twinfire.protocol.errors import ModelError

TOKENIZER_MODELS = ("gpt2", "llama")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a byte-level vocabulary cuts text. Without `split`, GPT-2's own expression cuts it."""

    split: str | None = None
    single_digits: bool = False
    compose: bool = False
    """Apply Unicode NFC first."""
    whole_words_first: bool = False
    """A cut that is itself a token is taken without merging."""
    adds_bos: bool = False


_GPT2 = _PreTokenizer()
_SINGLE_DIGITS = _PreTokenizer(single_digits=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, whole_words_first=True, adds_bos=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, compose=True)
_TEKKEN = _PreTokenizer(split=_TEKKEN_SPLIT, whole_words_first=True, adds_bos=True)
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


def read_gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the file's tokenizer; ModelError naming an unsupported model or a broken field."""
    fields = file.fields
    embedded = fields.optional_text("tokenizer.huggingface.json")
    entries = file.strings("tokenizer.ggml.tokens")
    special_tokens = _special_tokens(file, entries)
    if embedded is not None:
        return Tokenizer(
            library_tokenizer(embedded.encode(), fields.source), special_tokens, fields.source
        )
    if not entries:
        raise fields.fault("tokenizer.ggml.tokens", "is missing")
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        library = _byte_level(file, entries, special_tokens)
    elif kind == "llama":
        library = _sentencepiece(file, entries, special_tokens)
    else:
        raise fields.fault(
            "tokenizer.ggml.model", f"is '{kind}'; supported are {', '.join(TOKENIZER_MODELS)}"
        )
    return Tokenizer(library, special_tokens, fields.source)


def gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    """Return the text of each named special token."""
    return _special_tokens(file, file.strings("tokenizer.ggml.tokens"))


def _special_tokens(file: GgufFile, entries: list[str]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    keys = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    for name, key in keys:
        token_id = file.fields.optional_integer(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(entries):
            tokens[f"{name}_token"] = entries[token_id]
    return tokens


def _byte_level(
    file: GgufFile, entries: list[str], special_tokens: dict[str, str]
) -> tokenizers.Tokenizer:
    name = file.fields.optional_text("tokenizer.ggml.pre") or "default"
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise file.fields.fault(
            "tokenizer.ggml.pre", f"is '{name}'; supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    merges = [_pair(file, merge) for merge in file.strings("tokenizer.ggml.merges")]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    library = tokenizers.Tokenizer(
        _bpe(file, vocabulary, merges, ignore_merges=pre.whole_words_first)
    )
    if pre.compose:
        library.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pre.split), "isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=file.fields.flag("tokenizer.ggml.add_space_prefix"),
            use_regex=pre.split is None,
        )
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    _add_tokens(file, library, entries)
    _add_template(file, library, special_tokens, adds_bos=pre.adds_bos)
    return library


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise file.fields.fault("tokenizer.ggml.merges", f"has '{merge}', which is not a pair")
    return left, right


def _sentencepiece(
    file: GgufFile, entries: list[str], special_tokens: dict[str, str]
) -> tokenizers.Tokenizer:
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    library = tokenizers.Tokenizer(
        _bpe(
            file,
            vocabulary,
            _merges_by_score(file, entries),
            unk_token=special_tokens.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    library.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if prefix else spaces
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)
    _add_tokens(file, library, entries)
    _add_template(file, library, special_tokens, adds_bos=True)
    return library


def _merges_by_score(file: GgufFile, entries: list[str]) -> list[tuple[str, str]]:
    """Return the pairs whose join is a piece, best piece first.

    Sentencepiece joins the neighbours that make the piece of the highest score; as a ranked list
    of merges that is every split of every piece into two pieces, ranked by the piece.
    """
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(entries):
        raise file.fields.fault("tokenizer.ggml.scores", "must have one score per token")
    types = _token_types(file, entries)
    pieces = {
        entry: float(score)
        for entry, score, kind in zip(entries, scores.tolist(), types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _bpe(
    file: GgufFile,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    try:
        return models.BPE(
            vocabulary,
            merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:
        # The library raises bare Exception, for instance for a merge of unknown tokens.
        raise ModelError(f"{file.path}: the tokenizer's merges are not valid: {error}") from None


def _token_types(file: GgufFile, entries: list[str]) -> list[int]:
    types = file.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [_NORMAL] * len(entries)
    if len(types) != len(entries):
        raise file.fields.fault("tokenizer.ggml.token_type", "must have one type per token")
    return [int(kind) for kind in types.tolist()]


def _add_tokens(file: GgufFile, library: tokenizers.Tokenizer, entries: list[str]) -> None:
    """Make control and user-defined tokens match whole in the text."""
    control: list[tokenizers.AddedToken] = []
    user_defined: list[tokenizers.AddedToken] = []
    for entry, kind in zip(entries, _token_types(file, entries), strict=True):
        if kind in (_CONTROL, _UNKNOWN) and entry:
            control.append(tokenizers.AddedToken(entry, special=True, normalized=False))
        elif kind == _USER_DEFINED and entry:
            user_defined.append(tokenizers.AddedToken(entry, special=False, normalized=False))
    library.add_special_tokens(control)
    library.add_tokens(user_defined)


def _add_template(
    file: GgufFile,
    library: tokenizers.Tokenizer,
    special_tokens: dict[str, str],
    *,
    adds_bos: bool,
) -> None:
    """Add BOS and EOS around a prompt where the file, or its kind of tokenizer, asks for it."""
    wanted = {
        "bos_token": file.fields.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": file.fields.flag("tokenizer.ggml.add_eos_token"),
    }
    used = {
        name: special_tokens[name] for name, on in wanted.items() if on and name in special_tokens
    }
    if not used:
        return
    parts = [used.get("bos_token"), "$A", used.get("eos_token")]
    library.post_processor = processors.TemplateProcessing(
        single=[part for part in parts if part is not None],
        special_tokens=[(text, library.token_to_id(text)) for text in used.values()],
    )
