"""Real text as prompts: documentation and sources of the standard library on this machine."""

from __future__ import annotations

import random
import sysconfig
from array import array
from collections.abc import Sequence
from pathlib import Path

from twinfire.artifacts.tokenizer import Tokenizer


def real_prompts(tokenizer: Tokenizer, lengths: Sequence[int], seed: int = 0) -> list[array[int]]:
    """Return one prompt of each length in tokens, from places chosen by `seed`."""
    texts = _library_texts()
    chooser = random.Random(seed)
    prompts: list[array[int]] = []
    for length in lengths:
        while True:
            text = chooser.choice(texts)
            start = chooser.randrange(max(1, len(text) - 8 * length))
            ids = tokenizer.encode(text[start : start + 8 * length], add_special_tokens=False)
            if len(ids) >= length:
                prompts.append(ids[:length])
                break
    return prompts


def real_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of 20 to 2,000 characters, from places chosen by `seed`."""
    texts = [text for text in _library_texts() if text]
    chooser = random.Random(seed)
    chosen: list[str] = []
    for _ in range(count):
        text, length = chooser.choice(texts), chooser.randrange(20, 2000)
        start = chooser.randrange(max(1, len(text) - length))
        chosen.append(text[start : start + length])
    return chosen


def _library_texts() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
