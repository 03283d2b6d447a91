"""A model that asks and answers itself, on the mock model."""

from __future__ import annotations

import itertools

import pytest

from support.byte_tokenizer import END_ID, VOCAB_SIZE, ByteTokenizer, plain_template
from support.engines import SAMPLER
from support.mock_runner import MockRunner
from twinfire.artifacts.chat_template import ChatTemplate
from twinfire.engine.engine import Engine
from twinfire.protocol.errors import ModelError
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.training.sample import Sample
from twinfire.training.self_text import DOMAINS, SelfText, TextLimits

MATERIAL = ["def add(a, b):\n    return a + b\n" * 4, "import os\nprint(os.getcwd())\n" * 5]
LIMITS = TextLimits(max_question=60, max_answer=20, max_material=200, num_at_once=6)


def self_text(seed: int, template: ChatTemplate | None, material: list[str] = MATERIAL) -> SelfText:
    runner = MockRunner(VOCAB_SIZE, 32)
    runner.init_kv(400)
    scheduler = Scheduler(SchedulerConfig(num_blocks=400, max_model_len=1024, block_size=32))
    engine = Engine(scheduler, runner, SAMPLER)
    return SelfText(
        engine,
        ByteTokenizer(),  # type: ignore[arg-type]
        template,
        (END_ID,),
        material,
        seed=seed,
        limits=LIMITS,
    )


def made(seed: int, count: int, material: list[str] = MATERIAL) -> list[Sample]:
    text = self_text(seed, plain_template(), material)
    return list(itertools.islice(text.samples(), count))


def test_prompts_are_whole_conversations_and_answers_follow_them() -> None:
    for sample in made(0, 30):
        prompt = ByteTokenizer().decode(sample.tokens[: sample.answer_start], False)
        assert prompt.startswith("<|start|>user\n")
        assert prompt.endswith("<|end|><|start|>assistant\n")
        answer = sample.tokens[sample.answer_start :]
        assert 0 < len(answer) <= LIMITS.max_answer
        assert END_ID not in answer[:-1]


def test_all_kinds_of_work_come_and_the_seed_decides_them() -> None:
    first = made(1, 60)
    assert {sample.domain for sample in first} >= set(DOMAINS) - {"chat"}
    assert first == made(1, 60)
    assert first != made(2, 60)


def test_work_on_source_files_shows_some_of_them() -> None:
    tokenizer = ByteTokenizer()
    for sample in made(3, 20):
        if sample.domain != "chat":
            prompt = tokenizer.decode(sample.tokens[: sample.answer_start])
            code = prompt.split("```python\n")[1].split("\n```")[0]
            assert code
            assert any(code in text for text in MATERIAL)


def test_without_material_the_model_asks_everything_itself() -> None:
    assert {sample.domain for sample in made(4, 3, [])} == {"chat"}


def test_a_model_without_a_template_cannot_take_turns() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        self_text(0, None)
