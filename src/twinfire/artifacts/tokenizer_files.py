"""The tokenizer of a Hugging Face folder: `tokenizer.json` and the names in its companions.

Owns where the names of special tokens are looked up. Token ids come from `tokenizer.json` alone.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from twinfire.artifacts.fields import Fields, read_json_fields
from twinfire.artifacts.tokenizer import SPECIAL_TOKEN_NAMES, Tokenizer
from twinfire.protocol.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer; ModelError naming the file that is missing or broken."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(
            f"{path} is missing; a tokenizer in another format (tokenizer.model, vocab.json) must "
            "be saved as tokenizer.json first"
        )
    library = library_tokenizer(path.read_bytes(), str(path))
    special_tokens = read_special_tokens(folder)
    _mark_special(library, special_tokens)
    return Tokenizer(library, special_tokens, str(path))


def library_tokenizer(content: bytes, source: str) -> tokenizers.Tokenizer:
    """Parse the content of a `tokenizer.json`; ModelError when it is not valid."""
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:
        # The library raises bare Exception for whatever it cannot parse.
        raise ModelError(f"{source} is not a valid tokenizer: {error}") from None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the text of each named special token that the folder's files give."""
    tokens: dict[str, str] = {}
    for file_name in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
        path = folder / file_name
        if path.is_file():
            fields = read_json_fields(path)
            for name in SPECIAL_TOKEN_NAMES:
                text = _token_text(fields, name)
                if text is not None:
                    tokens[name] = text
    return tokens


def _token_text(fields: Fields, name: str) -> str | None:
    """Return a token given as a string or as an object with its content."""
    if isinstance(fields.raw(name), dict):
        described = fields.nested(name)
        return described.text("content") if described is not None else None
    return fields.optional_text(name)


def _mark_special(library: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
    """Make the named tokens special where `tokenizer.json` only has them as plain entries."""
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    plain = [
        tokenizers.AddedToken(text, special=True, normalized=False)
        for text in dict.fromkeys(special_tokens.values())
        if text not in added and library.token_to_id(text) is not None
    ]
    library.add_special_tokens(plain)
