"""Runs our task through lm-eval's `local-completions` against a running server.

Prompts go as text and come back with `echo` and `logprobs`, so that lm-eval needs no tokenizer.
`pip install 'lm-eval[api]' transformers`, then `python benchmarks/lm_eval/run.py http://127.0.0.1:8000`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

HERE = Path(__file__).parent
TASK = "twinfire_facts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, help="only so many questions")
    arguments = parser.parse_args()

    os.chdir(HERE)  # the task names its file relative to itself
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["OPENAI_API_KEY"] = arguments.api_key
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": arguments.model,
            "base_url": f"{arguments.url.rstrip('/')}/v1/completions",
            "tokenizer_backend": "none",
            "tokenized_requests": False,
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
