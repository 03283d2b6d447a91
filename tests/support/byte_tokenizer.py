"""A tokenizer whose tokens are the 256 bytes and a few control tokens: no files, no surprises."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence

from twinfire.artifacts.chat_template import DEFAULT_TEMPLATE, ChatTemplate

SPECIAL_TEXTS = ("<|bos|>", "<|eos|>", "<|start|>", "<|end|>")
BOS_ID, EOS_ID, START_ID, END_ID = range(256, 260)
VOCAB_SIZE = 260

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_TEXTS)) + ")")


class ByteTokenizer:
    """Ids below 256 are bytes; the others are control tokens, recognised in text."""

    special_tokens: Mapping[str, str] = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    vocab_size = VOCAB_SIZE
    special_ids = frozenset(range(256, VOCAB_SIZE))

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        ids = array("I", [BOS_ID] if add_special_tokens else [])
        for piece in _SPECIAL.split(text):
            if piece in SPECIAL_TEXTS:
                ids.append(256 + SPECIAL_TEXTS.index(piece))
            else:
                ids.extend(piece.encode())
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (
            token
            for token in ids
            if token < VOCAB_SIZE and not (skip_special_tokens and token in self.special_ids)
        )
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes((token_id,))
        return SPECIAL_TEXTS[token_id - 256].encode() if token_id < VOCAB_SIZE else b""


def plain_template(source: str = PLAIN_TEMPLATE) -> ChatTemplate:
    return ChatTemplate({DEFAULT_TEMPLATE: source}, ByteTokenizer.special_tokens)
