"""What the benchmark of speculation asks for: work that repeats its input, open chat, bad cases.

Candidates are made of Python's own library, the same for the same Python. A model of 135M
parameters cannot write a file again by itself: most of its answers loop. So edits and sessions are
held to their lines by a schema, which leaves to the model which line it changes; free edits are
asked for, too, and those that it does are found out once (`speculation_run.screen`).
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from twinfire.bench.prompt_source import PromptSource, library_paragraphs
from twinfire.bench.request import Api, JsonValue

LEAST = 0.97
"""What no scenario may fall below, of no speculation."""
NUM_CANDIDATES = 96
NUM_RECORDS = 5
LONG_PROMPT_CHARS = 9_000
QUESTIONS = (
    "Why is the sky blue?",
    "How do vaccines work?",
    "What should I pack for a week of hiking?",
    "Explain what a budget is to a teenager.",
    "How do I make a good cup of tea?",
    "What is the difference between weather and climate?",
    "Write a short poem about the sea.",
    "Give me three ideas for a birthday party at home.",
    "Why do cats purr?",
    "How does a bicycle stay upright?",
    "What makes bread rise?",
    "Tell me a short story about a lost key.",
    "How can I sleep better?",
    "What does a lawyer do all day?",
    "Describe a sunset without naming a colour.",
    "How do I ask my boss for a raise?",
    "What is a black hole?",
    "Why do leaves change their colour in autumn?",
    "How do I start to learn the guitar?",
    "What is the use of a compiler?",
    "Write a friendly note to a new neighbour.",
    "How do bees make honey?",
    "What was the industrial revolution?",
    "How do I keep houseplants alive?",
    "What is inflation?",
    "Explain gravity in simple words.",
    "What are the benefits of walking?",
    "How is glass made?",
    "Give me advice for a first job interview.",
    "Why do we dream?",
    "What makes a good friend?",
    "How does the internet find a website?",
    "What can I cook with rice and eggs?",
    "Why is the ocean salty?",
    "How do airplanes fly?",
    "What is a healthy breakfast?",
    "Tell me about the city of Rome.",
    "How do I remove a coffee stain?",
    "What is democracy?",
    "Write the opening line of a mystery novel and go on for a while.",
)
TOPICS = (
    *("rain", "money", "trees", "the moon", "music", "electricity", "magnets", "the heart"),
    *("volcanoes", "elections", "recycling", "trains", "chess", "friendship", "the alphabet"),
    *("bridges", "rivers", "time zones", "maps", "soap", "batteries", "whales", "cameras"),
    *("winter", "courage", "taxes", "libraries", "radio", "windmills", "sleep", "coral reefs"),
)


class Task(msgspec.Struct, frozen=True):
    """One conversation; its later turns see what was answered to the earlier ones."""

    number: int
    turns: tuple[str, ...]
    max_tokens: int
    """Of each answer."""
    temperature: float = 0.0
    ignore_eos: bool = False
    more: dict[str, JsonValue] = {}
    """Further fields of each request."""


class Family(msgspec.Struct, frozen=True):
    """Tasks of one kind."""

    name: str
    make: Callable[[], list[Task]]
    goal_single: float
    """Least ratio to no speculation, one stream, by the best of `goal_methods`."""
    goal_eight: float
    goal_methods: tuple[str, ...] = ("suffix", "hybrid")
    api: Api = "chat"
    least_tokens: int = 1
    """Shorter answers are no work."""
    least_repeated: float = 0.0
    """Share of an answer that must stand in its input: an edit without the file is none."""


def edits() -> list[Task]:
    """Return files of about 400 to 900 tokens to be written again with one name changed."""
    return [
        _line_edit(number, code, _names(code)[:1], max_tokens=2_000)
        for number, code in enumerate(islice(_definitions(0, 1_100, 2_200), NUM_CANDIDATES))
    ]


def sessions() -> list[Task]:
    """Return sessions of three turns, each of which shows the code of the one before again."""
    return [
        _line_edit(number, code, _names(code)[:2], max_tokens=1_000)
        for number, code in enumerate(islice(_definitions(1, 400, 700), NUM_CANDIDATES))
    ]


def free_edits() -> list[Task]:
    """Return short files to be gone on with behind their first lines, held to nothing."""
    tasks = []
    for number, code in enumerate(
        islice(_definitions(2, 500, 1_300, per_file=4), 3 * NUM_CANDIDATES)
    ):
        name = _names(code)[0]
        asked = f"A copy of this file was made.\n\n```python\n{code}\n```\n\nHere is the copy, in "
        asked += f"which only the name `{name}` is another one, `new_{name}`; every line and every "
        asked += "comment is the same:\n\n```python\n" + "\n".join(code.split("\n")[:4]) + "\n"
        tasks.append(Task(number, (asked,), max_tokens=500, more={"stop": ["\n```"]}))
    return tasks


def _line_edit(number: int, code: str, names: Sequence[str], max_tokens: int) -> Task:
    """Ask for each name to be changed in a turn of its own; with two names a third turn checks."""
    lines = [line for line in code.split("\n") if line.strip()]
    keys = [f"line {index}" for index in range(1, len(lines) + 1)]
    given = json.dumps(dict(zip(keys, lines, strict=True)), indent=1)
    turns = [f"The lines of a file:\n{given}\n\nRename `{names[0]}` to `new_{names[0]}`."]
    turns += [f"Now rename `{name}` to `new_{name}`." for name in names[1:]]
    turns += ["Are all names right now? Correct what is wrong."] if names[1:] else []
    properties: dict[str, JsonValue] = {}
    for key, line in zip(keys, lines, strict=True):
        ways = {line: None}
        for name in names:
            ways |= {re.sub(rf"\b{name}\b", f"new_{name}", way): None for way in ways}
        properties[key] = {"type": "string", "enum": list(ways)}
    shown = " Answer with all lines, in the same form."
    return Task(
        number, tuple(turn + shown for turn in turns), max_tokens, more=_held_to(properties)
    )


def _held_to(properties: dict[str, JsonValue]) -> dict[str, JsonValue]:
    form: dict[str, JsonValue] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    schema: dict[str, JsonValue] = {"name": "answer", "schema": form, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def tool_calls() -> list[Task]:
    """Return records that a tool is to be called with, the call held to its schema."""
    chooser = random.Random("tool calls")
    words = sorted({word for text in _sources(20) for word in re.findall(r"\b[a-z]{4,9}\b", text)})
    fields: dict[str, JsonValue] = {
        "id": {"type": "integer"},
        "path": {"type": "string"},
        "owner": {"type": "string"},
        "note": {"type": "string"},
    }
    record = {"type": "object", "properties": fields, "required": list(fields)}
    records = {"type": "array", "minItems": NUM_RECORDS, "maxItems": NUM_RECORDS}
    arguments: dict[str, JsonValue] = {
        "type": "object",
        "properties": {"records": {**records, "items": {**record, "additionalProperties": False}}},
        "required": ["records"],
        "additionalProperties": False,
    }
    more = _held_to({"name": {"type": "string", "enum": ["save_records"]}, "arguments": arguments})
    tasks = []
    for number in range(NUM_CANDIDATES):
        given = [
            {
                "id": chooser.randrange(1_000, 100_000),
                "path": f"src/{'/'.join(chooser.sample(words, 2))}.py",
                "owner": " ".join(chooser.sample(words, 2)),
                "note": " ".join(chooser.sample(words, 8)),
            }
            for _ in range(NUM_RECORDS)
        ]
        lines = "\n".join(json.dumps(one) for one in given)
        asked = f"Records:\n{lines}\n\nCall the tool `save_records` with all {NUM_RECORDS} records,"
        asked += ' exactly as they are: {"name": "save_records", "arguments": {"records": [...]}}'
        tasks.append(Task(number, (asked,), max_tokens=700, more=more))
    return tasks


def chats(temperature: float) -> list[Task]:
    """Return short questions of anything; greedy and sampled tasks share none."""
    questions = (*QUESTIONS, *(f"Tell a child about {topic}." for topic in TOPICS))
    return [
        Task(number, (question,), max_tokens=192, temperature=temperature)
        for number, question in enumerate(questions[1 if temperature else 0 :: 2])
    ]


def long_prompts() -> list[Task]:
    """Return about 3,000 tokens with a short answer."""
    source = PromptSource(library_paragraphs(), "long prompts")
    asked = "\n\nIn one sentence: what is the text above about?"
    return [
        Task(number, (source.take(LONG_PROMPT_CHARS)[:LONG_PROMPT_CHARS] + asked,), max_tokens=24)
        for number in range(16)
    ]


def random_prompts() -> list[Task]:
    """Return letters without sense, answered at temperature 1: nothing can be guessed."""
    chooser = random.Random("random prompts")
    letters = "abcdefghijklmnopqrstuvwxyz"

    def word() -> str:
        return "".join(chooser.choices(letters, k=chooser.randint(2, 7)))

    return [
        Task(
            number,
            (" ".join(word() for _ in range(120)),),
            max_tokens=128,
            temperature=1.0,
            ignore_eos=True,
        )
        for number in range(32)
    ]


FAMILIES = {
    family.name: family
    for family in (
        Family("agent edit", edits, 2.0, 1.2, least_tokens=150),
        Family(
            *("free edit", free_edits, LEAST, LEAST),
            api="completions",
            least_tokens=40,
            least_repeated=0.5,
        ),
        Family("tool-call JSON", tool_calls, 2.0, 1.2, least_tokens=60),
        Family("code session", sessions, 2.0, 1.2, least_tokens=60),
        Family("chat", lambda: chats(0.0), 1.25, LEAST, ("eagle3", "hybrid"), least_tokens=24),
        Family(
            "chat T=0.8", lambda: chats(0.8), 1.25, LEAST, ("eagle3", "hybrid"), least_tokens=24
        ),
        Family("long prompt", long_prompts, LEAST, LEAST),
        Family("random text", random_prompts, LEAST, LEAST),
    )
}


def _sources(count: int | None = None) -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in islice(sorted(folder.glob("*.py")), count):
        yield path.read_text(errors="replace")


def _definitions(share: int, least_chars: int, most_chars: int, per_file: int = 1) -> Iterator[str]:
    """Yield functions and classes of one third of the files, so that no two families share one.

    Each has two names at least that can be changed.
    """
    seen: set[str] = set()
    for text in islice(_sources(), share, None, 3):
        found, lines = 0, text.split("\n")
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or found == per_file:
                continue
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if (
                least_chars <= len(code) <= most_chars
                and code not in seen
                and len(_names(code)) >= 2
            ):
                found += 1
                seen.add(code)
                yield code


def _names(code: str) -> list[str]:
    """Return variables and arguments that are read 1 to 6 times, most frequent first."""
    nodes = list(ast.walk(ast.parse(code)))
    reads = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self", "cls"}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return [name for name, count in reads.most_common() if name in own and count <= 6]
