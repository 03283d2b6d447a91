"""Runs our task through lm-eval's `local-completions` against a running server.

Prompts go as token ids and come back with `echo` and `logprobs`; lm-eval counts tokens with the
model's own tokenizer, which transformers reads out of the GGUF file.

    pip install 'lm-eval[api]' transformers       # beside Twinfire
    python benchmarks/lm_eval/run.py http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.model_store import resolve_model

HERE = Path(__file__).parent
TASK = "twinfire_facts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--limit", type=int, help="only so many questions")
    arguments = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["OPENAI_API_KEY"] = arguments.api_key
    gguf = resolve_model(DEFAULT_ALIAS).path
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        save_tokenizer(gguf, tokenizer_folder)
        evaluate(arguments, tokenizer_folder)


def save_tokenizer(gguf: Path, folder: str) -> None:
    """Write the tokenizer of a GGUF file in the layout that lm-eval opens."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def evaluate(arguments: argparse.Namespace, tokenizer_folder: str) -> None:
    """Run the task and print lm-eval's own table."""
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from lm_eval import simple_evaluate

    os.chdir(HERE)  # the task names its file relative to itself
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": arguments.model,
            "base_url": f"{arguments.url.rstrip('/')}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": tokenizer_folder,
            "num_concurrent": 4,
        },
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
        limit=arguments.limit,
        bootstrap_iters=0,
    )
    print(make_table(results))


if __name__ == "__main__":
    main()
