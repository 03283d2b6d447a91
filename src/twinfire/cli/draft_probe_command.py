"""`twinfire draft probe`: how many drafts of a head its target accepts on a text."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.artifacts.model_store import resolve_model
from twinfire.artifacts.shipped_heads import resolve_draft_head
from twinfire.cli.pull_progress import pull_progress
from twinfire.cli.stage_bars import StageBars
from twinfire.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from twinfire.training.draft_probe import ProbeReport
    from twinfire.training.sample import Sample

_MAX_DRAFTS = 16


def add_probe(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action to `twinfire draft`."""
    probe = actions.add_parser(
        "probe",
        help="measure a head's acceptance on a text",
        description=(
            "Measure how many drafts of a head its target accepts, by position, and whether other "
            "layers of the target than those it is taken to read would serve it better."
        ),
    )
    probe.add_argument("model", nargs="?", default=DEFAULT_ALIAS, help="default: %(default)s")
    probe.add_argument("--head", help="the head's folder; default: the one shipped for the model")
    source = probe.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="a text file, - for standard input")
    source.add_argument(
        "--samples",
        type=Path,
        help="samples that the model wrote (JSON lines, as `draft train` keeps them)",
    )
    probe.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="take each N-th sample; 20 are those that `draft train` never learns from",
    )
    probe.add_argument("--tokens", type=int, default=20_000, help="of text at most")
    probe.add_argument("--layer-tokens", type=int, default=2000, help="to try other layers on")
    probe.add_argument("--drafts", type=int, default=4, help="in a chain")
    probe.add_argument(
        "--aux-layer-ids",
        type=_layer_ids,
        metavar="K,K,K",
        help="layers of the target passed where the head reads, in place of what its file means",
    )
    probe.add_argument("--plot", type=Path, help="draw the curves into this picture")
    probe.add_argument("--threads", type=int, default=1)
    probe.set_defaults(run=probe_head)


def probe_head(args: argparse.Namespace) -> int:
    """Measure and print; InvalidRequest or ModelError say what is wrong."""
    try:
        from twinfire.training.draft_probe import DraftProbe
        from twinfire.training.draft_run import use_threads
    except ImportError:
        raise InvalidRequest(
            "probing needs torch: pip install 'twinfire[train]'", "draft probe"
        ) from None
    from twinfire.training.acceptance_plot import plot_acceptance

    for name, most in (("drafts", _MAX_DRAFTS), ("every", None), ("tokens", None)):
        value = getattr(args, name)
        if value < 1 or (most is not None and value > most):
            limit = "at least 1" if most is None else f"1 to {most}"
            raise InvalidRequest(f"must be {limit}, got {value}", name)
    use_threads(args.threads)
    # Which layers the head's numbers were taken to mean is half of what is asked.
    logging.basicConfig(format="twinfire: %(message)s")
    logging.getLogger("twinfire.artifacts").setLevel(logging.INFO)
    with pull_progress(args.model) as pulled:
        checkpoint = open_checkpoint(resolve_model(args.model, on_progress=pulled).path)
    head = resolve_draft_head(args.head, checkpoint, aux_layer_ids=args.aux_layer_ids)
    samples = _samples(args, checkpoint)
    total = sum(len(sample.tokens) for sample in samples)
    with StageBars() as bars:
        report = DraftProbe(checkpoint, head, args.drafts).measure(
            samples,
            written_by_target=args.samples is not None,
            max_layer_tokens=args.layer_tokens,
            progress=lambda done: bars.update("probe", done, total, ""),
        )
    _print(report)
    if args.plot is not None:
        plot_acceptance(report.by_domain, args.plot)
        print(f"the curves are in {args.plot}")
    return 0


def _samples(args: argparse.Namespace, checkpoint: Checkpoint) -> list[Sample]:
    """Return what to measure on, `--tokens` of it at most; InvalidRequest when there is nothing."""
    import msgspec

    from twinfire.training.draft_probe import MAX_TEXT_TOKENS, text_samples
    from twinfire.training.sample import SampleFile

    if args.samples is None:
        tokens = checkpoint.tokenizer().encode(_read_text(args.text))[: args.tokens]
        samples = text_samples(tokens, args.drafts)
        if not samples:
            raise InvalidRequest(
                f"has {len(tokens)} tokens; {args.drafts + 3} are needed for chains of "
                f"{args.drafts} drafts",
                "text",
            )
        return samples
    if not args.samples.is_file():
        raise InvalidRequest(f"{args.samples} is no file", "samples")
    vocab_size, num_tokens = checkpoint.config.vocab_size, 0
    samples = []
    long_enough = (
        msgspec.structs.replace(sample, tokens=sample.tokens[:MAX_TEXT_TOKENS])
        for sample in SampleFile(args.samples).read()
        if sample.answer_start + args.drafts + 2 < min(len(sample.tokens), MAX_TEXT_TOKENS)
    )
    for number, sample in enumerate(long_enough):
        if number % args.every:
            continue
        highest = max(sample.tokens)
        if highest >= vocab_size or min(sample.tokens) < 0:
            raise InvalidRequest(
                f"{args.samples}: token {highest} is outside the model's vocabulary of "
                f"{vocab_size}",
                "samples",
            )
        samples.append(sample)
        num_tokens += len(sample.tokens)
        if num_tokens >= args.tokens:
            break
    if not samples:
        raise InvalidRequest(f"{args.samples} has no sample that is long enough", "samples")
    return samples


def _print(report: ProbeReport) -> None:
    from twinfire.training.acceptance import acceptance_table

    print(acceptance_table(report.by_domain))
    if not report.by_layers:
        return
    named = {f"after {_listed(layers)}": curve for layers, curve in report.by_layers.items()}
    print("\nby layers of the target that the head reads, the first as its file is understood:")
    print(acceptance_table(named))
    better = report.better_layers()
    if better is not None:
        own = next(iter(report.by_layers))
        print(
            f"twinfire: the head drafts better from layers {_listed(better)} than from "
            f"{_listed(own)}: its file's numbers were taken the wrong way. Write "
            f'"aux_layer_convention" ("layers_passed" or "layer_outputs") into the eagle_config '
            f"of its config.json, or pass --aux-layer-ids {','.join(map(str, better))} to see",
            file=sys.stderr,
        )


def _read_text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}", "text") from None


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no list of numbers such as 2,15,27"
        ) from None


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
