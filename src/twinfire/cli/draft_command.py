"""`twinfire draft`: draft heads for speculative decoding, made for a model of your own."""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.model_store import resolve_model
from twinfire.cli.byte_size import parse_byte_size
from twinfire.cli.draft_probe_command import add_probe
from twinfire.cli.pull_progress import pull_progress
from twinfire.cli.stage_bars import StageBars
from twinfire.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from twinfire.training.sample import SampleFile

SAMPLES_FILE = "samples.jsonl"
_SAVE_EVERY = 16


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command and its actions."""
    parser = subparsers.add_parser("draft", help="make and measure draft heads")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    train = actions.add_parser(
        "train",
        help="train an EAGLE-3 head",
        description=(
            "Train an EAGLE-3 head for a model. Everything is kept in the work folder: the same "
            "command goes on where it was stopped."
        ),
    )
    train.add_argument("model", nargs="?", default=DEFAULT_ALIAS, help="default: %(default)s")
    train.add_argument(
        "--data",
        default="self",
        help="self: the model asks and answers; else a file of samples (JSON lines)",
    )
    train.add_argument("--work", type=Path, required=True, help="folder of the run")
    train.add_argument("--out", type=Path, required=True, help="folder of the finished head")
    train.add_argument("--tokens", type=int, default=1_000_000, help="of text to make")
    train.add_argument(
        "--material",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of source files that the model is asked about",
    )
    train.add_argument("--draft-vocab-size", type=int, default=8192)
    train.add_argument("--epochs", type=int, default=3)
    train.add_argument("--passes", type=int, default=4, help="drafts in a chain")
    train.add_argument("--learning-rate", type=float, default=1e-3)
    train.add_argument("--threads", type=int, default=1)
    train.add_argument("--minutes", type=float, help="stop after this time, to go on later")
    train.add_argument("--kv-cache-memory", type=parse_byte_size, default=1 << 30)
    train.add_argument("--seed", type=int, default=0)
    train.set_defaults(run=train_head)
    add_probe(actions)


def train_head(args: argparse.Namespace) -> int:
    """Run every stage that is not done; InvalidRequest or ModelError say what is wrong."""
    try:
        from twinfire.training.draft_run import DraftRun, RunSettings, use_threads
    except ImportError:
        raise InvalidRequest(
            "training needs torch: pip install 'twinfire[train]'", "draft train"
        ) from None
    from rich.console import Console

    from twinfire.artifacts.checkpoint import open_checkpoint
    from twinfire.training.acceptance import acceptance_table
    from twinfire.training.acceptance_plot import plot_acceptance
    from twinfire.training.draft_trainer import TrainSettings
    from twinfire.training.sample import SampleFile

    deadline_s = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    use_threads(args.threads)
    with pull_progress(args.model) as report:
        path = resolve_model(args.model, on_progress=report).path
    checkpoint = open_checkpoint(path)
    settings = RunSettings(
        draft_vocab_size=args.draft_vocab_size,
        train=TrainSettings(
            num_passes=args.passes,
            num_epochs=args.epochs,
            learning_rate=args.learning_rate,
            seed=args.seed,
        ),
    )
    with StageBars() as bars:
        if args.data == "self":
            samples = SampleFile(args.work / SAMPLES_FILE)
            if not _make_text(args, path, samples, bars.update, deadline_s):
                return 0
        else:
            samples = SampleFile(Path(args.data))
        run = DraftRun(checkpoint, list(samples.read()), args.work, settings, bars.update)
        result = run.run(args.out, lambda: deadline_s is not None and time.monotonic() > deadline_s)
    plot_acceptance(result.acceptance, args.out / "acceptance.png")
    (args.out / "acceptance.md").write_text(acceptance_table(result.acceptance) + "\n")
    console = Console()
    console.print(
        f"{result.num_samples} texts, {result.num_tokens} tokens, step {result.num_steps}"
    )
    console.print(acceptance_table(result.acceptance), markup=False)
    console.print(f"the head is in {args.out}")
    return 0


def _make_text(
    args: argparse.Namespace,
    path: Path,
    samples: SampleFile,
    progress: Callable[[str, int, int, str], None],
    deadline_s: float | None,
) -> bool:
    """Let the model write until there is enough; returns whether there is."""
    num_tokens, wanted = samples.num_tokens(), int(args.tokens)
    if num_tokens >= wanted:
        return True
    from twinfire.artifacts.checkpoint import open_checkpoint
    from twinfire.protocol.startup_stages import StartupStages
    from twinfire.protocol.worker_config import WorkerConfig
    from twinfire.training.sample import Sample
    from twinfire.training.self_text import SelfText
    from twinfire.worker.build import build_engine

    checkpoint = open_checkpoint(path)
    config = WorkerConfig(
        model_path=str(path),
        served_name=path.name,
        socket_path="",
        threads=args.threads,
        kv_cache_bytes=args.kv_cache_memory,
        max_model_len=min(2048, checkpoint.config.max_position),
        enable_prefix_caching=False,
    )
    engine = build_engine(config, lambda *_: None, StartupStages()).engine
    text = SelfText(
        engine,
        checkpoint.tokenizer(),
        checkpoint.chat_template(),
        checkpoint.config.eos_token_ids,
        [file.read_text(errors="replace") for file in sorted(args.material.glob("*.py"))],
        # Going on with the seed of the beginning would make the beginning again.
        seed=args.seed + num_tokens,
    )
    pending: list[Sample] = []
    for sample in text.samples():
        pending.append(sample)
        num_tokens += len(sample.tokens)
        enough = num_tokens >= wanted
        too_late = deadline_s is not None and time.monotonic() > deadline_s
        if enough or too_late or len(pending) == _SAVE_EVERY:
            samples.append(pending)
            pending = []
            progress("text", num_tokens, wanted, "")
        if enough or too_late:
            return enough
    raise AssertionError("a model never stops writing")
