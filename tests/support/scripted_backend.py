"""A backend that computes nothing: tokens come from a script, in steps, as a worker sends them."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from support.byte_tokenizer import EOS_ID, VOCAB_SIZE
from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.gateway.backends.request_context import NO_CONTEXT, RequestContext
from twinfire.protocol.errors import TwinfireError, WorkerLost
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    FinishReason,
    LogprobRows,
    PromptDone,
    WorkerInfo,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_floats, pack_ids

Script = Callable[["array[int]", SamplingParams, int], Sequence[int]]
"""(prompt, sampling, choice) to output tokens, without the end token."""

HEAD_ROWS = VOCAB_SIZE + 4
"""The output head is padded beyond the tokenizer's vocabulary, as real ones are."""


def say(text: str) -> Script:
    return lambda prompt, sampling, choice: list(text.encode())


def count_up(prompt: array[int], sampling: SamplingParams, choice: int) -> Sequence[int]:
    """Depends on the seed and the choice, so that choices can be told apart."""
    return list(f"choice {choice} of seed {sampling.seed % 1000}.".encode())


def worker_info(max_model_len: int = 512) -> WorkerInfo:
    return WorkerInfo(
        instance_id="scripted",
        role="mixed",
        pid=1,
        model="scripted",
        architecture="llama",
        dtype="f32",
        vocab_size=HEAD_ROWS,
        max_model_len=max_model_len,
        block_size=32,
        num_kv_blocks=64,
        kv_bytes_per_block=1024,
        weight_bytes=0,
        max_num_seqs=256,
    )


@dataclass
class ScriptedBackend:
    """The knobs may be turned between requests."""

    script: Script = count_up
    tokens_per_step: int = 1
    step_sizes: Sequence[int] = ()
    """Output tokens of each step, over and over, where they differ."""
    drafts_per_step: int = 0
    """Draft tokens of each step; all of a step's tokens but the last are accepted ones."""
    cached_tokens: int = 0
    worker_info: WorkerInfo | None = field(default_factory=worker_info)
    unready_reason: str | None = None
    refusal: TwinfireError | None = None
    """Ends every request before its prompt is done."""
    fails_after: int | None = None
    """Output tokens after which the worker is lost."""
    ends_with: FinishReason | None = None
    """Overrides how choices end."""
    holds_after: int | None = None
    """Output tokens after which nothing comes until `release`; -1 holds the prompt."""

    def __post_init__(self) -> None:
        self.submitted: list[tuple[array[int], SamplingParams]] = []
        self.extras: list[tuple[int, str]] = []
        self.contexts: list[RequestContext] = []
        """(priority, cache_salt) of each request."""
        self.cancelled: list[int] = []
        self.num_running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.holding = asyncio.Event()
        self.released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        prompt: array[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        context: RequestContext = NO_CONTEXT,
    ) -> LinkGeneration:
        if self.worker_info is None:
            raise WorkerLost("no worker")
        self.submitted.append((prompt, sampling))
        self.extras.append((priority, cache_salt))
        self.contexts.append(context)
        run = _Run(self, prompt, sampling)
        task = asyncio.get_running_loop().create_task(run.play())
        run.task = task
        self.num_running += 1
        self.idle.clear()
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return run.generation

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.num_running -= 1
        if not self.num_running:
            self.idle.set()


class _Run:
    """One request's script, played into a real buffer."""

    def __init__(
        self, backend: ScriptedBackend, prompt: array[int], sampling: SamplingParams
    ) -> None:
        self._backend = backend
        self._prompt = prompt
        self._sampling = sampling
        self._live = set(range(sampling.n))
        self.task: asyncio.Task[None] | None = None
        self.generation = LinkGeneration(sampling.n, self._cancel)

    def _cancel(self, choice: int) -> None:
        self._backend.cancelled.append(choice)
        self._live -= set(self._live) if choice == ALL_CHOICES else {choice}
        if not self._live and self.task is not None:
            self.task.cancel()

    async def play(self) -> None:
        backend, sampling = self._backend, self._sampling
        await self._hold(-1)
        if backend.refusal is not None:
            self.generation.fail(backend.refusal)
            return
        rows = None
        if sampling.prompt_logprobs >= 0:
            rows = scripted_rows(self._prompt[1:], sampling.prompt_logprobs)
        embedding = b"" if sampling.pooling is None else scripted_state(self._prompt)
        done = PromptDone(1, backend.cached_tokens, 0.001, 0.002, rows, embedding=embedding)
        self.generation.put(done)
        outputs = {choice: self._output(choice) for choice in self._live}
        position = 0
        sizes = itertools.cycle(backend.step_sizes or (backend.tokens_per_step,))
        while self._live:
            await asyncio.sleep(0)
            if backend.fails_after is not None and position >= backend.fails_after:
                self.generation.fail(WorkerLost("the worker died"))
                return
            await self._hold(position)
            end = position + next(sizes)
            for choice in sorted(self._live):
                self._step(choice, outputs[choice], position, end)
            position = end

    async def _hold(self, position: int) -> None:
        holds_after = self._backend.holds_after
        if holds_after is not None and position >= holds_after:
            self._backend.holding.set()
            await self._backend.released.wait()

    def _output(self, choice: int) -> list[int]:
        sampling = self._sampling
        output: list[int] = []
        for token in self._backend.script(self._prompt, sampling, choice):
            output.append(token)
            if token in sampling.stop_token_ids:
                return output
        if sampling.ignore_eos:
            output += [ord(".")] * (sampling.max_tokens - len(output))
        elif output[-1:] != [EOS_ID]:
            output.append(EOS_ID)
        return output

    def _step(self, choice: int, output: list[int], start: int, end: int) -> None:
        bound = min(len(output), self._sampling.max_tokens)
        tokens = output[start : min(end, bound)]
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if end >= bound:
            finish = "length"
            last = output[bound - 1] if bound else None
            if last in self._sampling.stop_token_ids:
                finish, stop_token_id = "stop", last
            elif last == EOS_ID and not self._sampling.ignore_eos:
                finish = "stop"
            finish = self._backend.ends_with or finish
            self._live.discard(choice)
        rows = None
        if self._sampling.logprobs >= 0:
            rows = scripted_rows(tokens, self._sampling.logprobs)
        drafted = self._backend.drafts_per_step
        delta = ChoiceDelta(
            1,
            choice,
            pack_ids(tokens),
            finish,
            stop_token_id,
            rows,
            drafted=drafted,
            accepted=min(drafted, max(len(tokens) - 1, 0)),
        )
        self.generation.put(delta)


def scripted_state(prompt: Sequence[int]) -> bytes:
    """Eight numbers that only this prompt has."""
    state = np.random.default_rng(list(prompt)).normal(size=8)
    return state.astype(np.float32).tobytes()


def scripted_logprob(token: int) -> float:
    """What every token's log-probability is here; one of them is impossible."""
    return float("-inf") if token == ord("!") else -0.5 - (token % 8) / 8


def scripted_rows(tokens: Sequence[int], k: int) -> LogprobRows:
    """The drawn token is in the top k only when it is even, so that both cases occur."""
    top_ids: list[int] = []
    for token in tokens:
        others = [candidate for candidate in range(300) if candidate != token]
        row = ([token, *others] if token % 2 == 0 else others)[:k]
        top_ids += [min(candidate, HEAD_ROWS - 1) for candidate in row]
    return LogprobRows(
        k=k,
        token_logprobs=pack_floats(map(scripted_logprob, tokens)),
        ranks=pack_ids(1 if token % 2 == 0 and k else k + 1 for token in tokens),
        top_ids=pack_ids(top_ids),
        top_logprobs=pack_floats([-0.125 * (index % max(k, 1)) for index in range(len(top_ids))]),
    )
