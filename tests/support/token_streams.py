"""One seed, one stream: the default model's tokens alone, batched, chunked and preempted."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from support.default_model import default_model_path
from support.real_prompts import real_prompts
from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.engine.engine import Engine
from twinfire.engine.runner import Runner
from twinfire.engine.sampler import Sampler
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.protocol.messages import Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig

LoadRunner = Callable[[Checkpoint], Runner]


class Served:
    """The default model, with engines of different limits over the same weights."""

    def __init__(self, load: LoadRunner, sampling_ops: SamplingOps, max_model_len: int) -> None:
        self.load = load
        self.sampling_ops = sampling_ops
        self.max_model_len = max_model_len
        self.checkpoint: Checkpoint = open_checkpoint(default_model_path())
        self.tokenizer = self.checkpoint.tokenizer()

    def engine(self, *, num_blocks: int, num_batched_tokens: int, num_seqs: int) -> Engine:
        runner = self.load(self.checkpoint)
        runner.init_kv(num_blocks)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            enable_prefix_cache=False,
        )
        return Engine(Scheduler(config), runner, Sampler(self.sampling_ops))


def params(index: int, max_tokens: int) -> SamplingParams:
    """Half of the requests greedy, half drawn, some with penalties or a nucleus."""
    return SamplingParams(
        max_tokens=max_tokens,
        seed=index,
        temperature=0.0 if index % 2 else 0.8,
        top_p=0.9 if index % 3 == 0 else 1.0,
        frequency_penalty=0.3 if index % 5 == 0 else 0.0,
        ignore_eos=True,
    )


def together(engine: Engine, prompts: list[array[int]], max_tokens: int) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.submit("g", Submit(index, pack_ids(prompt), params(index, max_tokens)))
    return streams(engine, len(prompts))


def one_by_one(engine: Engine, prompts: list[array[int]], max_tokens: int) -> list[list[int]]:
    answers = []
    for index, prompt in enumerate(prompts):
        engine.submit("g", Submit(index, pack_ids(prompt), params(index, max_tokens)))
        answers.append(streams(engine, len(prompts))[index])
    return answers


def streams(engine: Engine, count: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(count)]
    while engine.has_work:
        for output in engine.step().values():
            for delta in output.deltas:
                tokens[delta.request_id] += unpack_ids(delta.tokens)
    return tokens


def assert_one_stream_per_seed(
    load: LoadRunner, sampling_ops: SamplingOps, lengths: list[int], max_tokens: int
) -> None:
    longest = (max(lengths) + max_tokens + 31) // 32 * 32
    served = Served(load, sampling_ops, max_model_len=longest)
    prompts = real_prompts(served.tokenizer, lengths)
    wide = served.engine(num_blocks=4096, num_batched_tokens=2048, num_seqs=16)
    alone = one_by_one(wide, prompts, max_tokens)
    assert together(wide, prompts, max_tokens) == alone, "batched"
    chunked = served.engine(num_blocks=4096, num_batched_tokens=24, num_seqs=4)
    assert together(chunked, prompts, max_tokens) == alone, "chunked"
    just_one = served.max_model_len // 32
    tight = served.engine(num_blocks=just_one, num_batched_tokens=512, num_seqs=16)
    assert together(tight, prompts, max_tokens) == alone, "preempted"
    assert tight.load().preemptions > 0, "nothing was preempted"
