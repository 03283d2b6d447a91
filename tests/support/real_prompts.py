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
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
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
