"""A tiny random model that a server can serve: with a tokenizer of one token a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from support.checkpoint_files import HF_CONFIG, write_json, write_model_folder

NUM_SPECIAL = 3
MAX_POSITION = 2048


def write_text_model(folder: Path, **changed: Any) -> None:
    """Write the tiny model and its tokenizer; changes are those of its configuration."""
    write_model_folder(folder, **{"max_position_embeddings": MAX_POSITION, **changed})
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    for spare in range(len(vocabulary), HF_CONFIG["vocab_size"]):
        vocabulary[f"Ġspare{spare}"] = spare
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": False,
            "chat_template": (
                "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
            ),
        },
    )
