"""Small engines over the mock runner, and the naive loop that they are compared with."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from support.mock_runner import MockRunner, mock_logits
from support.numpy_sampling_ops import NumpySamplingOps
from twinfire.artifacts.grammar_compiler import GrammarCompiler
from twinfire.engine.engine import Engine
from twinfire.engine.sampler import Sampler, SampleRow
from twinfire.engine.speculator import Speculator
from twinfire.engine.step_report import GatewayOutput
from twinfire.engine.token_history import TokenHistory
from twinfire.protocol.messages import FinishReason, LogprobRows, Rejected, Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig

VOCAB = 64
SAMPLER = Sampler(NumpySamplingOps())


def mock_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    policy: str = "fcfs",
    enable_prefix_cache: bool = True,
    hash_seed: bytes = b"",
    watermark_blocks: int | None = None,
    grammars: GrammarCompiler | None = None,
    speculator: Speculator | None = None,
    num_lookahead_tokens: int = 0,
) -> tuple[Engine, MockRunner]:
    runner = MockRunner(VOCAB, block_size)
    runner.init_kv(num_blocks)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,  # type: ignore[arg-type]
        enable_prefix_cache=enable_prefix_cache,
        hash_seed=hash_seed,
        watermark_blocks=watermark_blocks,
        num_lookahead_tokens=num_lookahead_tokens,
    )
    engine = Engine(Scheduler(config), runner, SAMPLER, grammars=grammars, speculator=speculator)
    return engine, runner


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[LogprobRows] = field(default_factory=list)


@dataclass
class Collected:
    """Everything that an engine said about one request."""

    answers: dict[int, Answer] = field(default_factory=dict)
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    prompt_logprobs: LogprobRows | None = None
    num_prompt_reports: int = 0
    rejected: Rejected | None = None


class Collector:
    """Steps an engine and sorts what comes out by (gateway, request)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[tuple[str, int], Collected] = {}

    def submit(
        self, request_id: int, prompt: list[int], sampling: SamplingParams, **kw: object
    ) -> None:
        gateway = str(kw.pop("gateway", "g"))
        message = Submit(request_id, pack_ids(prompt), sampling, **kw)  # type: ignore[arg-type]
        self.engine.submit(gateway, message)

    def step(self) -> None:
        for gateway, output in self.engine.step().items():
            self.heard(gateway, output)

    def heard(self, gateway: str, output: GatewayOutput) -> None:
        for prompt in output.prompts:
            record = self.record(gateway, prompt.request_id)
            assert not record.answers, "tokens came before their prompt's report"
            record.num_prompt_reports += 1
            record.cached_tokens = prompt.cached_tokens
            record.computed_tokens = prompt.computed_tokens
            record.prompt_logprobs = prompt.prompt_logprobs
        for rejected in output.rejected:
            self.record(gateway, rejected.request_id).rejected = rejected
        for delta in output.deltas:
            record = self.record(gateway, delta.request_id)
            answer = record.answers.setdefault(delta.choice, Answer())
            assert answer.finish_reason is None, "a choice went on after its end"
            answer.tokens += unpack_ids(delta.tokens)
            answer.finish_reason = delta.finish_reason
            answer.stop_token_id = delta.stop_token_id
            if delta.logprobs is not None:
                answer.logprobs.append(delta.logprobs)

    def record(self, gateway: str, request_id: int) -> Collected:
        return self.requests.setdefault((gateway, request_id), Collected())

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                self.engine.check_integrity()
                assert self.engine.load().kv_blocks_used == 0
                return
            self.step()
            self.engine.check_integrity()
        raise AssertionError(f"requests unfinished after {max_steps} steps")


def naive_answer(prompt: list[int], sampling: SamplingParams, choice: int) -> Answer:
    """Generate one choice alone, recomputing everything for every token."""
    history = TokenHistory(array("I", prompt))
    context = list(prompt)
    answer = Answer()
    while len(answer.tokens) < sampling.max_tokens:
        logits = mock_logits(np.array(context, np.int64), VOCAB)[None]
        row = SampleRow(sampling, choice, len(context), history)
        token_id = SAMPLER.sample(logits, [row])[0].token_id
        history.append(token_id)
        context.append(token_id)
        answer.tokens.append(token_id)
        if token_id in sampling.ending_token_ids:
            answer.finish_reason = "stop"
            answer.stop_token_id = token_id if token_id in sampling.stop_token_ids else None
            return answer
    answer.finish_reason = "length"
    return answer
