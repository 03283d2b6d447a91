"""The step loop: schedule, run, draw, report.

Joins scheduler, runner and sampler for many gateways' requests. Synchronous and single-threaded:
the worker calls `step` while there is work and everything else between steps. Knows no sockets.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twinfire.cache.block_hash import cache_extra_key
from twinfire.engine.inputs import DrawRow, PackedStep, pack_step
from twinfire.engine.request import Choice, Request
from twinfire.engine.runner import Runner
from twinfire.engine.sampler import Sample, Sampler, SampleRow
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    FinishReason,
    Load,
    PromptDone,
    Submit,
)
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import StepPlan

_PROMPT_ROWS_AT_ONCE = 64
"""Rows of prompt logits held at a time: 64 rows of 150k float32 are 38 MB."""


@dataclass(slots=True)
class GatewayOutput:
    """What one step produced for one gateway."""

    prompts: list[PromptDone] = field(default_factory=list)
    deltas: list[ChoiceDelta] = field(default_factory=list)


class Engine:
    """Serves requests by token ids. Errors of a request are InvalidRequest; any other is a bug."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._clock = clock
        self._requests: dict[tuple[str, int], Request] = {}
        self._owners: dict[Sequence, Request] = {}
        self._num_steps = 0
        self._last_step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def submit(self, gateway_id: str, message: Submit) -> None:
        """Queue a request; InvalidRequest when it can never run here."""
        sampling = message.sampling
        prompt = unpack_ids(message.prompt)
        self._validate(message, len(prompt), max(prompt, default=0))
        if (gateway_id, message.request_id) in self._requests:
            raise InvalidRequest(f"request {message.request_id} is already running")
        request = Request(gateway_id, message.request_id, prompt, sampling, self._clock())
        sequence = self._sequence(
            request, 0, message.priority, cache_extra_key(salt=message.cache_salt)
        )
        self._scheduler.submit(sequence)
        self._requests[gateway_id, message.request_id] = request
        self._owners[sequence] = request
        request.choices[0].sequence = sequence

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of a request and free its blocks; unknown ids are ignored."""
        request = self._requests.get((gateway_id, request_id))
        if request is None:
            return
        named = request.choices if choice == ALL_CHOICES else request.choices[choice:][:1]
        for one in named:
            if one.finish_reason is None:
                one.finish_reason = "cancelled"
        # Before the prompt is done, choice 0's sequence computes it for the other choices.
        for one in request.choices if request.finished or request.prompt_done else ():
            if one.sequence is not None and one.finish_reason is not None:
                self._drop(one.sequence, one)
        self._forget_if_finished(request)

    def cancel_gateway(self, gateway_id: str) -> None:
        """Stop everything of a gateway that is gone."""
        for owner, request_id in list(self._requests):
            if owner == gateway_id:
                self.cancel(gateway_id, request_id)

    def step(self) -> dict[str, GatewayOutput]:
        """Compute one step and return what each gateway gained."""
        plan = self._scheduler.schedule()
        self._num_steps += 1
        self._last_step_tokens = plan.num_tokens
        outputs: dict[str, GatewayOutput] = defaultdict(GatewayOutput)
        if not plan.slices:
            return outputs
        self._note_first_scheduled(plan)
        packed = pack_step(plan, self._owners, self._runner.kv_layout.block_size)
        self._runner.execute(packed.batch)
        samples = self._draw(packed.draws)
        self._score_prompts(packed)
        self._scheduler.commit(plan, _own_tokens(packed.draws, samples))
        self._finish_unsampled_prompts(plan, outputs)
        self._report(packed.draws, samples, outputs)
        return outputs

    def load(self) -> Load:
        """Return the state after the last step."""
        scheduler = self._scheduler
        return Load(
            step=self._num_steps,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_blocks_used=scheduler.num_blocks_used,
            kv_blocks_total=scheduler.num_blocks_total,
            step_tokens=self._last_step_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def check_integrity(self) -> None:
        """AssertionError when blocks, sequences and requests do not agree."""
        self._scheduler.check_integrity()
        for request in self._requests.values():
            assert not request.finished, "a finished request is still listed"
        for sequence, request in self._owners.items():
            assert request.choices[sequence.key[2]].sequence is sequence
            assert not request.finished, "a finished request holds a sequence"

    def _validate(self, message: Submit, prompt_len: int, largest_id: int) -> None:
        if prompt_len == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        vocab_size = self._runner.vocab_size
        sampling = message.sampling
        named_ids = {
            "prompt": (largest_id,),
            "logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias),
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "bad_words": tuple(token_id for word in sampling.bad_words for token_id in word),
        }
        for param, ids in named_ids.items():
            outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
            if outside:
                raise InvalidRequest(
                    f"{param}: token id {outside[0]} is not in the vocabulary of {vocab_size}",
                    param=param,
                )

    def _sequence(self, request: Request, choice: int, priority: int, extra: bytes) -> Sequence:
        sampling = request.sampling
        return Sequence(
            key=(request.gateway_id, request.request_id, choice),
            tokens=request.prompt[:],
            num_prompt_tokens=len(request.prompt),
            max_total_tokens=len(request.prompt) + sampling.max_tokens,
            priority=priority,
            cache_extra=extra,
            read_prefix_cache=sampling.prompt_logprobs < 0,
        )

    def _note_first_scheduled(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            request = self._owners[piece.sequence]
            if request.first_scheduled_s is None:
                request.first_scheduled_s = self._clock()

    def _draw(self, draws: list[DrawRow]) -> list[Sample]:
        if not draws:
            return []
        rows = [
            SampleRow(
                params=draw.request.sampling,
                choice=draw.choice,
                position=draw.piece.end,
                history=draw.request.choices[draw.choice].history,
            )
            for draw in draws
        ]
        return self._sampler.sample(self._runner.logits(0, len(rows)), rows)

    def _score_prompts(self, packed: PackedStep) -> None:
        for rows in packed.prompt_rows:
            targets = np.frombuffer(rows.request.prompt, np.uint32).astype(np.int64)
            for offset in range(0, rows.count, _PROMPT_ROWS_AT_ONCE):
                count = min(_PROMPT_ROWS_AT_ONCE, rows.count - offset)
                first_row, first_token = rows.first_row + offset, rows.first_token + offset
                scores = self._sampler.score(
                    self._runner.logits(first_row, first_row + count),
                    targets[first_token : first_token + count],
                    rows.request.sampling.prompt_logprobs,
                )
                rows.request.add_prompt_logprobs(scores, count)

    def _finish_unsampled_prompts(self, plan: StepPlan, outputs: dict[str, GatewayOutput]) -> None:
        """End the requests that wanted their prompt computed and no output."""
        for piece in plan.slices:
            request = self._owners[piece.sequence]
            if piece.reaches_end and request.sampling.max_tokens == 0:
                output = outputs[request.gateway_id]
                output.prompts.append(self._prompt_done(request, piece.sequence))
                for choice in request.choices:
                    if choice.finish_reason is None:
                        output.deltas.append(self._delta(request, choice, [], "length"))
                self._drop(piece.sequence, request.choices[0])
                self._forget_if_finished(request)

    def _report(
        self, draws: list[DrawRow], samples: list[Sample], outputs: dict[str, GatewayOutput]
    ) -> None:
        """Turn drawn tokens into deltas; fork and end sequences."""
        forked: list[tuple[DrawRow, Choice]] = []
        ended: list[tuple[Sequence, Choice]] = []
        for draw, sample in zip(draws, samples, strict=True):
            request, choice = draw.request, draw.request.choices[draw.choice]
            output = outputs[request.gateway_id]
            parent = draw.piece.sequence
            if not request.prompt_done:
                request.prompt_done = True
                output.prompts.append(self._prompt_done(request, parent))
            choice.history.append(sample.token_id)
            finish_reason, stop_token_id = _finish(request, choice, sample.token_id)
            output.deltas.append(
                self._delta(
                    request, choice, [sample.token_id], finish_reason, stop_token_id, sample
                )
            )
            if choice.sequence is None and finish_reason is None:
                forked.append((draw, choice))
            elif choice.sequence is not None and finish_reason is not None:
                ended.append((choice.sequence, choice))
        # Forks share the parent's blocks, so the parent is dropped after them.
        for draw, choice in forked:
            self._fork(draw, choice)
        ended.extend(_cancelled_parents(draws))
        for sequence, choice in ended:
            self._drop(sequence, choice)
        for request in {draw.request for draw in draws}:
            self._forget_if_finished(request)

    def _fork(self, draw: DrawRow, choice: Choice) -> None:
        parent = draw.piece.sequence
        child = self._sequence(draw.request, choice.index, parent.priority, parent.cache_extra)
        child.tokens.append(choice.history.output[0])
        choice.sequence = child
        self._owners[child] = draw.request
        self._scheduler.fork(parent, child)

    def _drop(self, sequence: Sequence, choice: Choice) -> None:
        choice.sequence = None
        if self._owners.pop(sequence, None) is not None:
            self._scheduler.abort(sequence.key)

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished:
            self._requests.pop((request.gateway_id, request.request_id), None)

    def _prompt_done(self, request: Request, sequence: Sequence) -> PromptDone:
        started_s = request.first_scheduled_s
        assert started_s is not None, "a prompt was computed that was never scheduled"
        return PromptDone(
            request_id=request.request_id,
            cached_tokens=sequence.num_cached_tokens or 0,
            queue_s=started_s - request.arrival_s,
            prefill_s=self._clock() - started_s,
            prompt_logprobs=request.prompt_logprobs(),
        )

    def _delta(
        self,
        request: Request,
        choice: Choice,
        tokens: list[int],
        finish_reason: FinishReason | None,
        stop_token_id: int | None = None,
        sample: Sample | None = None,
    ) -> ChoiceDelta:
        choice.finish_reason = finish_reason
        return ChoiceDelta(
            request_id=request.request_id,
            choice=choice.index,
            tokens=pack_ids(tokens),
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            logprobs=sample.logprobs if sample else None,
        )


def _own_tokens(draws: list[DrawRow], samples: list[Sample]) -> dict[Sequence, list[int]]:
    """Return the token that each planned sequence drew for itself, not for its forks."""
    return {
        draw.piece.sequence: [sample.token_id]
        for draw, sample in zip(draws, samples, strict=True)
        if draw.choice == draw.piece.sequence.key[2]
    }


def _cancelled_parents(draws: list[DrawRow]) -> list[tuple[Sequence, Choice]]:
    """Return sequences whose own choice was cancelled while they computed the prompt for others."""
    parents = {draw.piece.sequence: draw.request for draw in draws}
    choices = [
        (sequence, request.choices[sequence.key[2]]) for sequence, request in parents.items()
    ]
    return [
        (sequence, choice) for sequence, choice in choices if choice.finish_reason == "cancelled"
    ]


def _finish(
    request: Request, choice: Choice, token_id: int
) -> tuple[FinishReason | None, int | None]:
    if token_id in request.ending_token_ids:
        own = token_id if token_id in request.sampling.stop_token_ids else None
        return "stop", own
    if choice.history.num_output >= request.sampling.max_tokens:
        return "length", None
    return None, None
