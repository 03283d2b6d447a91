"""`twinfire chat`: talk to any OpenAI-compatible server in the terminal, or through a pipe.

Owns the options. The conversation is in `chat_session`, reading and showing in `chat_terminal`;
both are imported only when the command runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from twinfire.bench.target import DEFAULT_TIMEOUT_S, Target
from twinfire.cli.bench_options import (
    api_key_of,
    checked_url,
    not_negative_float,
    not_negative_int,
    positive_float,
    positive_int,
)

DEFAULT_URL = "http://127.0.0.1:8000"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `chat`."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to any OpenAI-compatible server",
        description="Talk to any OpenAI-compatible server. At the prompt, /help lists commands. "
        "With a pipe as standard input, all of it is one message and the answer goes to "
        "standard output.",
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL")
    parser.add_argument("--model", help="model id (default: the first of /v1/models)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--api-key-file", type=Path, help="file that holds the key")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=positive_int, help="longest answer")
    parser.add_argument("--temperature", type=not_negative_float)
    parser.add_argument("--top-p", type=positive_float)
    parser.add_argument("--seed", type=not_negative_int)
    parser.add_argument(
        "--lines", action="store_true", help="with a pipe: each line is a message of its own"
    )
    parser.add_argument("--timeout", type=positive_float, default=DEFAULT_TIMEOUT_S)
    parser.set_defaults(run=run_chat)


def run_chat(args: argparse.Namespace) -> int:
    """Chat until the input ends; 1 when a piped message was not answered."""
    from twinfire.cli.chat_session import ChatSession, Sampling
    from twinfire.cli.chat_terminal import ChatTerminal

    target = Target(
        url=checked_url(args.url),
        model=args.model,
        api_key=api_key_of(args),
        timeout_s=args.timeout,
    )
    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    session = ChatSession(sampling, args.system)
    with ChatTerminal(target, session) as terminal:
        if sys.stdin.isatty():
            return terminal.interact()
        return terminal.answer_pipe(sys.stdin, each_line=args.lines)
