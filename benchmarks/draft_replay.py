"""What drafters guess of real text, and what they cost, with no model in the way.

Texts whose continuation is known are replayed: each step takes the tokens that a step of the model
would have accepted. Steps cost virtual time, by a curve over their rows, so that the chosen lengths
can be judged too. Sources of the standard library, edited, quoted in tool calls, or as they stand.

    python benchmarks/draft_replay.py [--out benchmarks/results/draft-replay.md]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import sysconfig
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinfire.artifacts.aliases import DEFAULT_ALIAS
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.model_store import resolve_model
from twinfire.engine.drafters.draft_lengths import DraftLengths
from twinfire.engine.drafters.drafter import Draft, DraftContext
from twinfire.engine.drafters.make_drafter import make_drafter
from twinfire.engine.drafters.step_costs import StepCosts
from twinfire.protocol.speculation import parse_speculation

MAX_DRAFTS = 16
METHODS = ("ngram", "ngram:min_match=3", "suffix", "suffix:min_match=2", "suffix:tree_tokens=0")
CURVES = {"3 % a row": 0.03, "12 % a row": 0.12}
LONG_PROMPT = 100_000


@dataclass(frozen=True, slots=True)
class Text:
    prompt: array[int]
    output: array[int]
    prediction: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    speed: float
    tokens_per_step: float
    us_per_token: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer = open_checkpoint(resolve_model(DEFAULT_ALIAS).path).tokenizer()

    def encode(text: str) -> array[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    files = [text for text in library_texts() if len(text) > 20_000]
    kinds = {
        "edited file": edited_files(files, encode),
        "edited file, predicted": edited_files(files, encode, is_predicted=True),
        "tool calls": tool_calls(files, encode),
        "code that goes on": continued(files, encode),
        "prose that goes on": continued(docstrings(files), encode),
    }
    lines = [
        f"Drafts of at most {MAX_DRAFTS} tokens, replayed on real text; speed is that of virtual "
        "steps over the same without guessing, first one stream, then eight.",
        "",
        "    python benchmarks/draft_replay.py",
        "",
        "| text | method | "
        + " | ".join(f"speed at {name}" for name in CURVES)
        + " | tokens a step, one stream | CPU µs a token |",
        "|---|---|" + "---|" * (len(CURVES) + 2),
    ]
    for name, texts in kinds.items():
        for method in METHODS:
            alone = [replay(texts, method, share, 1) for share in CURVES.values()]
            beside = [replay(texts, method, share, 8) for share in CURVES.values()]
            speeds = " | ".join(
                f"{one.speed:.2f}, {eight.speed:.2f}"
                for one, eight in zip(alone, beside, strict=True)
            )
            lines.append(
                f"| {name} | {method} | {speeds} | {alone[0].tokens_per_step:.2f} "
                f"| {alone[0].us_per_token:.0f} |"
            )
    lines += ["", f"A prompt of {LONG_PROMPT:,} tokens of code, then a token a step:", ""]
    lines += [
        "| method | longest call ms | all of indexing ms | later call µs |",
        "|---|---|---|---|",
    ]
    lines += [long_prompt(files, encode, method) for method in ("ngram", "suffix")]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if args.out is not None:
        args.out.write_text(text)


def replay(texts: Sequence[Text], method: str, row_share: float, batch: int) -> Replay:
    """Run the texts through one drafter, `batch` at a time; a step checks what seems to pay."""
    costs = StepCosts()
    costs.calibrate(lambda rows: 1.0 + row_share * (rows - 1), 256)
    lengths = DraftLengths(costs, MAX_DRAFTS)
    drafter = make_drafter(parse_speculation(method), lengths.calibration, None)
    waiting = [(context_of(text, number), text.output) for number, text in enumerate(texts)]
    running: list[tuple[DraftContext, array[int]]] = []
    took, python_s, num_steps, num_tokens, off = 0.0, 0.0, 0, 0, 0.0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        for context, output in running:
            left = len(output) - (len(context.tokens) - context.num_prompt_tokens)
            context.limit = min(MAX_DRAFTS, left - 1)
        started_s = time.process_time()
        drafts = drafter.propose([context for context, _ in running])
        chosen = lengths.choose(drafts, 0)
        python_s += time.process_time() - started_s
        took += costs.seconds(len(running) + sum(chosen))
        num_steps += len(running)
        still = []
        for (context, output), draft, length in zip(running, drafts, chosen, strict=True):
            new = accept(context, output, draft, length, lengths)
            num_tokens += new
            off += new * costs.seconds(len(running)) / len(running)
            if len(context.tokens) - context.num_prompt_tokens < len(output):
                still.append((context, output))
            else:
                drafter.ended(context)
        running = still
    return Replay(off / took, num_tokens / num_steps, python_s / num_tokens * 1e6)


def context_of(text: Text, number: int) -> DraftContext:
    prompt = array("I", text.prompt)
    return DraftContext(("replay", number, 0), prompt, len(prompt), "", text.prediction)


def accept(
    context: DraftContext, output: array[int], draft: Draft, length: int, lengths: DraftLengths
) -> int:
    """Append what a step would draw, tell the verdict, and return how many tokens it was."""
    done = len(context.tokens) - context.num_prompt_tokens
    num_accepted = 0
    while num_accepted < length and draft.token_ids[num_accepted] == output[done + num_accepted]:
        num_accepted += 1
    new = output[done : done + num_accepted + 1]
    judged = min(len(new), len(draft.token_ids))
    is_next_right = judged > num_accepted and draft.token_ids[num_accepted] == new[-1]
    lengths.note_verdict(draft.source, draft.confidences[:judged], num_accepted + is_next_right)
    context.tokens.extend(new)
    return len(new)


def long_prompt(files: Sequence[str], encode: Callable[[str], array[int]], method: str) -> str:
    tokens = array("I")
    for text in files:
        tokens.extend(encode(text))
        if len(tokens) > LONG_PROMPT + 100:
            break
    lengths = DraftLengths(StepCosts(), MAX_DRAFTS)
    drafter = make_drafter(parse_speculation(method), lengths.calibration, None)
    context = DraftContext(("replay", 0, 0), tokens[:LONG_PROMPT], LONG_PROMPT, limit=MAX_DRAFTS)
    calls_ms: list[float] = []
    for token in tokens[LONG_PROMPT : LONG_PROMPT + 100]:
        started_s = time.process_time()
        drafter.propose([context])
        calls_ms.append((time.process_time() - started_s) * 1e3)
        context.tokens.append(token)
    later_ms = sorted(calls_ms)[len(calls_ms) // 2]
    indexing_ms = sum(one for one in calls_ms[:10])
    return f"| {method} | {max(calls_ms):.1f} | {indexing_ms:.1f} | {later_ms * 1e3:.0f} |"


def library_texts() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]


def docstrings(files: Sequence[str]) -> list[str]:
    found = (doc for text in files for doc in re.findall(r'"""(.*?)"""', text, re.DOTALL))
    return [doc for doc in found if len(doc) > 1_500]


def edited_files(
    files: Sequence[str], encode: Callable[[str], array[int]], *, is_predicted: bool = False
) -> list[Text]:
    """A part of a file, to be written again with one name changed."""
    chooser = random.Random(0)
    texts = []
    for _ in range(12):
        whole = chooser.choice(files)
        start = whole.index("\n", chooser.randrange(len(whole) - 5_000)) + 1
        part = whole[start : start + 4_000]
        names = Counter(re.findall(r"\b[a-z_]{4,}\b", part)).most_common(12)
        name = chooser.choice(names[2:])[0]
        asked = f"Rewrite this file and rename {name} to the_{name}:\n{part}\n\nHere it is:\n"
        edited = re.sub(rf"\b{name}\b", f"the_{name}", part)
        texts.append(Text(encode(asked), encode(edited), encode(part) if is_predicted else ()))
    return texts


def tool_calls(files: Sequence[str], encode: Callable[[str], array[int]]) -> list[Text]:
    """Two calls after a session of six, of the same tools with other arguments."""
    chooser = random.Random(0)
    words = [word for text in files[:20] for word in re.findall(r"[a-z]{5,}", text)]

    def some(count: int) -> str:
        return " ".join(chooser.sample(words, count))

    def call() -> str:
        name = chooser.choice(("read_file", "search", "run_tests", "edit_file"))
        arguments = {
            "read_file": {"path": f"/src/{some(1)}/{some(1)}.py", "offset": 20, "limit": 200},
            "search": {"query": some(3), "path": "/src", "max_results": 20},
            "run_tests": {"target": f"tests/test_{some(1)}.py", "verbose": True},
            "edit_file": {"path": f"/src/{some(1)}.py", "old": some(5), "new": some(5)},
        }
        return (
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments[name]})}\n</tool_call>"
        )

    def turn() -> str:
        answer = f"<tool_response>\n{some(30)}\n</tool_response>"
        return f"<|im_start|>assistant\n{call()}<|im_end|>\n<|im_start|>user\n{answer}<|im_end|>\n"

    return [
        Text(
            encode("".join(turn() for _ in range(6)) + "<|im_start|>assistant\n"),
            encode(f"{call()}\n{call()}<|im_end|>"),
        )
        for _ in range(40)
    ]


def continued(texts: Sequence[str], encode: Callable[[str], array[int]]) -> list[Text]:
    """Text as it stands, of which the first part is the prompt."""
    chooser = random.Random(0)
    found = []
    for whole in chooser.sample(list(texts), 20):
        start = chooser.randrange(max(1, len(whole) - 8_000))
        tokens = encode(whole[start : start + 4_000])
        half = len(tokens) // 2
        found.append(Text(tokens[:half], tokens[half : half + 400]))
    return found


if __name__ == "__main__":
    main()
