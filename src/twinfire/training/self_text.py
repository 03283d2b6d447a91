"""Text that a model makes itself, for learning to predict that model.

Questions are drawn from the model by giving it the opening of a user's turn (Magpie,
arXiv:2406.08464), or put to source files as agents put them: change this, explain this, give me
JSON. The model answers all of them, some at temperature 0 and some above. Drives an engine by token
ids; owns which requests run, and nothing of how.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twinfire.artifacts.chat_template import ChatTemplate
from twinfire.artifacts.tokenizer import Tokenizer
from twinfire.engine.engine import Engine
from twinfire.protocol.errors import ModelError
from twinfire.protocol.messages import Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.training.sample import Sample

Domain = Literal["chat", "edit", "explain", "json"]
DOMAINS: tuple[Domain, ...] = ("chat", "edit", "explain", "json")
DOMAIN_WEIGHTS = (5, 3, 2, 1)
"""How often each is asked for."""

_MARK = "\ue000"
"""Private use: no template holds it."""
_GATEWAY = "self-text"
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.8, 1.0)

_EDITS = (
    "Rewrite this code with every variable renamed to a clearer name.",
    "Add type annotations to this code and give back all of it.",
    "Give back this file unchanged, but with a docstring for each function.",
    "Fix any bug that you see and show the whole corrected code.",
    "Change this code to log its errors instead of raising them. Show the whole file.",
    "Repeat this code exactly, then list what you would improve.",
)
_EXPLANATIONS = (
    "Explain what this code does, step by step.",
    "Summarise this file in three sentences.",
    "Which functions are defined here, and what does each return?",
    "Write a unit test for this code.",
)
_JSON_TASKS = (
    "List the functions of this code as JSON objects with the keys name, arguments and purpose.",
    'Answer with a tool call as JSON: {"name": "edit_file", "arguments": {"path": ..., "old": ..., '
    '"new": ...}} that improves this code.',
    "Describe this file as one JSON object with the keys summary, imports and classes.",
)
_TASKS: dict[Domain, Sequence[str]] = {
    "edit": _EDITS,
    "explain": _EXPLANATIONS,
    "json": _JSON_TASKS,
}


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds on what is made. Tokens."""

    max_question: int = 128
    max_answer: int = 384
    max_material: int = 400
    """Of a source file that is shown."""
    num_at_once: int = 48


@dataclass(slots=True)
class _Job:
    """A request that runs: first for the question where there is none, then for the answer."""

    domain: Domain
    prompt: array[int]
    temperature: float
    asks: bool
    output: list[int] = field(default_factory=list)


class SelfText:
    """Makes samples without an end. `material` are texts to ask about; `seed` decides everything.

    ModelError when the model has no chat template to take turns with.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        material: Sequence[str],
        *,
        seed: int,
        limits: TextLimits | None = None,
    ) -> None:
        if template is None:
            raise ModelError("the model has no chat template, so it cannot ask and answer itself")
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._eos_token_ids = eos_token_ids
        self._material = [text for text in material if text.strip()]
        self._random = random.Random(seed)
        self._limits = limits or TextLimits()
        self._jobs: dict[int, _Job] = {}
        self._num_submitted = 0
        self._opening = self._encode(self._render([_user(_MARK)], False).partition(_MARK)[0])

    def samples(self) -> Iterator[Sample]:
        """Yield samples as they are ready."""
        while True:
            while len(self._jobs) < self._limits.num_at_once:
                self._start()
            for output in self._engine.step().values():
                for delta in output.deltas:
                    self._jobs[delta.request_id].output += unpack_ids(delta.tokens)
                    if delta.finish_reason is not None:
                        job = self._jobs.pop(delta.request_id)
                        sample = self._finish(job, ended=delta.finish_reason == "stop")
                        if sample is not None:
                            yield sample

    def _start(self) -> None:
        (domain,) = self._random.choices(DOMAINS, DOMAIN_WEIGHTS)
        if domain == "chat" or not self._material:
            self._submit(_Job("chat", self._opening, 1.0, asks=True))
            return
        task = self._random.choice(_TASKS[domain])
        question = f"{task}\n\n```python\n{self._excerpt()}\n```"
        self._ask(domain, question)

    def _ask(self, domain: Domain, question: str) -> None:
        prompt = self._encode(self._render([_user(question)], True))
        temperature = self._random.choice(_ANSWER_TEMPERATURES)
        self._submit(_Job(domain, prompt, temperature, asks=False))

    def _excerpt(self) -> str:
        """Return some whole lines of a text."""
        lines = self._random.choice(self._material).splitlines()
        budget = self._random.randrange(80, self._limits.max_material)
        start = self._random.randrange(max(1, len(lines) - 10))
        taken: list[str] = []
        for line in lines[start:]:
            budget -= len(self._encode(line)) + 1
            if budget < 0:
                break
            taken.append(line)
        return "\n".join(taken)

    def _submit(self, job: _Job) -> None:
        limits = self._limits
        sampling = SamplingParams(
            max_tokens=limits.max_question if job.asks else limits.max_answer,
            seed=self._random.getrandbits(63),
            temperature=job.temperature,
            top_p=0.95 if job.asks else 1.0,
            eos_token_ids=self._eos_token_ids,
        )
        self._num_submitted += 1
        self._jobs[self._num_submitted] = job
        self._engine.submit(_GATEWAY, Submit(self._num_submitted, pack_ids(job.prompt), sampling))

    def _finish(self, job: _Job, *, ended: bool) -> Sample | None:
        if not job.asks:
            return Sample([*job.prompt, *job.output], len(job.prompt), job.domain, job.temperature)
        question = self._tokenizer.decode(job.output).strip()
        # A question that never ended is no question, and a short one says nothing.
        if ended and len(question) >= 8:
            self._ask(job.domain, question)
        return None

    def _render(self, messages: list[dict[str, object]], add_generation_prompt: bool) -> str:
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def _encode(self, text: str) -> array[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}
