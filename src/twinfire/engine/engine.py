"""The step loop: schedule, run, draw, report.

Joins scheduler, runner and sampler for many gateways' requests. Synchronous and single-threaded:
the worker calls `step` while there is work and everything else between steps. Knows no sockets.
A prompt may be computed here for another worker (`outgoing_prompts`) or by another worker for here
(`incoming_prompts`); either way the same sequences run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

import numpy as np

from twinfire.cache.block_hash import cache_extra_key
from twinfire.engine.deadlines import Deadlines
from twinfire.engine.hand_off import HandOffEvent, Reservation
from twinfire.engine.incoming_prompts import IncomingPrompts
from twinfire.engine.inputs import DrawRow, PackedStep, pack_step
from twinfire.engine.load_meter import LoadMeter
from twinfire.engine.outgoing_prompts import OutgoingPrompts
from twinfire.engine.prefix_exchange import PrefixExchange
from twinfire.engine.request import Choice, Request
from twinfire.engine.request_checks import check_request
from twinfire.engine.runner import Runner
from twinfire.engine.sampler import Sample, Sampler, SampleRow
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    FinishReason,
    Load,
    Preempted,
    PrefillProgress,
    PromptDone,
    Submit,
)
from twinfire.protocol.peer_messages import HandOffKey
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
    progress: list[PrefillProgress] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)


class Engine:
    """Serves requests by token ids. Errors of a request are InvalidRequest; any other is a bug."""

    prefixes: PrefixExchange
    """Cached blocks that are exchanged with other workers."""

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
        self._outgoing = OutgoingPrompts(scheduler.tables, scheduler.config.block_size)
        self._incoming = IncomingPrompts(scheduler)
        self._deadlines = Deadlines()
        self._meter = LoadMeter()
        self._newest_ids: dict[str, int] = {}
        self._num_steps = 0
        self._last_step_tokens = 0
        self.prefixes = PrefixExchange(scheduler)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def holds_for_others(self) -> bool:
        """Whether blocks are kept for other workers to read or to fill."""
        return self._scheduler.tables.num_pinned > 0 or len(self._incoming) > 0

    def submit(self, gateway_id: str, message: Submit, *, pulled_blocks: int = 0) -> None:
        """Queue a request; InvalidRequest when it can never run here.

        `pulled_blocks` of its prompt have just come from another worker.
        """
        request = self._checked_request(gateway_id, message)
        request.num_pulled_tokens = pulled_blocks * self._scheduler.config.block_size
        # Choices without output fork from the first one's prompt.
        own = request.choices if request.resumed else request.choices[:1]
        sequences = [self._sequence(request, choice) for choice in own]
        for index, sequence in enumerate(sequences):
            try:
                self._scheduler.submit(sequence)
            except InvalidRequest:
                for submitted in sequences[:index]:
                    self._scheduler.finish(submitted)
                raise
        for choice, sequence in zip(own, sequences, strict=True):
            choice.sequence = sequence
            self._owners[sequence] = request
        self._admit(request, message)

    def reserve(self, gateway_id: str, message: Submit) -> Reservation | None:
        """Take the blocks of a prompt that another worker computes.

        None while there is no room; InvalidRequest when there can never be.
        """
        request = self._checked_request(gateway_id, message)
        return self._incoming.reserve(request, self._sequence(request, request.choices[0]))

    def release_reservation(self, key: HandOffKey) -> None:
        """Free reserved blocks; unknown keys are ignored."""
        self._incoming.release(key)

    def adopt(
        self, key: HandOffKey, prompt: PromptDone, first: Series[ChoiceDelta]
    ) -> GatewayOutput:
        """Go on from reserved blocks, filled, and the first token of every choice.

        Returns what its gateway is to hear at once. Choices that are not among `first` have been
        cancelled. KeyError when there is no such reservation.
        """
        request, parent = self._incoming.take(key)
        request.handed_over = False
        self._requests[key.gateway_id, key.request_id] = request
        self._owners[parent] = request
        request.prompt_done = True
        lead = request.choices[0]
        lead.sequence = parent
        for choice in request.choices:
            choice.finish_reason = "cancelled"
        going_on: list[Choice] = []
        for delta in first:
            choice = request.choice(delta.choice)
            choice.finish_reason = delta.finish_reason
            for token_id in unpack_ids(delta.tokens):
                choice.history.append(token_id)
            if choice.finish_reason is None:
                going_on.append(choice)
        for choice in going_on:
            if choice is not lead:
                self._fork(request, parent, choice)
        if lead.finish_reason is None:
            self._scheduler.append(parent, lead.history.output[-1])
        else:
            self._drop(parent, lead)
        self._forget_if_finished(request)
        return GatewayOutput(prompts=[prompt], deltas=list(first))

    def take_hand_off_events(self) -> list[HandOffEvent]:
        """Return what happened to prompts for other workers since the last call."""
        return self._outgoing.take_events()

    def release_hold(self, key: HandOffKey) -> None:
        """Unpin what was computed for another worker; unknown keys are ignored."""
        self._outgoing.release(key)

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of a request and free its blocks; unknown ids are ignored."""
        request = self._requests.get((gateway_id, request_id))
        if request is None:
            return
        for one in request.choices_named(None if choice == ALL_CHOICES else choice):
            if one.finish_reason is None:
                one.finish_reason = "cancelled"
        # Before the prompt is done, the first choice's sequence computes it for the others.
        shared = not (request.finished or request.prompt_done or request.resumed)
        for one in () if shared else request.choices:
            if one.sequence is not None and one.finish_reason is not None:
                self._drop(one.sequence, one)
        if request.finished and request.handed_over:
            self._outgoing.ended(request, "the request was cancelled")
        self._forget_if_finished(request)

    def cancel_gateway(self, gateway_id: str) -> None:
        """Stop everything of a gateway that is gone."""
        for owner, request_id in list(self._requests):
            if owner == gateway_id:
                self.cancel(gateway_id, request_id)

    def step(self) -> dict[str, GatewayOutput]:
        """Compute one step and return what each gateway gained."""
        outputs: dict[str, GatewayOutput] = defaultdict(GatewayOutput)
        started_s = self._clock()
        self._end_expired(started_s, outputs)
        plan = self._scheduler.schedule()
        self._num_steps += 1
        self._last_step_tokens = plan.num_tokens
        self._report_preempted(plan, outputs)
        if not plan.slices:
            return outputs
        self._note_first_scheduled(plan)
        packed = pack_step(plan, self._owners, self._runner.kv_layout.block_size)
        self._runner.execute(packed.batch)
        samples = self._draw(packed.draws)
        self._score_prompts(packed)
        self._scheduler.commit(plan, _own_tokens(packed.draws, samples))
        self._report_progress(plan, outputs)
        self._finish_unsampled_prompts(plan, outputs)
        self._report(packed.draws, samples, outputs)
        self._meter.note(plan.num_tokens, len(plan.slices), self._clock() - started_s)
        return outputs

    def load(self, gateway_id: str | None = None) -> Load:
        """Return the state after the last step, for one gateway or for any."""
        scheduler = self._scheduler
        pinned = scheduler.tables.num_pinned
        handing_over = sum(request.handed_over for request in self._requests.values())
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
            prefill_tokens_waiting=scheduler.num_prefill_tokens_waiting,
            kv_blocks_held=pinned + scheduler.num_blocks_reserved,
            hand_offs_open=handing_over + self._outgoing.num_open + len(self._incoming),
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_s=self._meter.decode_step_s,
            last_charge=self._newest_ids.get(gateway_id, 0) if gateway_id is not None else 0,
        )

    def take_cache_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the block hashes that can be found since the last call, and those that cannot."""
        return self._scheduler.pool.take_changes()

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that can be found."""
        return self._scheduler.pool.findable_hashes()

    def block_generation(self, block_id: int) -> int:
        """Return the number that rises whenever a block is handed out."""
        return self._scheduler.pool.block_generation(block_id)

    def clear_prefix_cache(self) -> None:
        """Make cached blocks that nobody uses unfindable."""
        self._scheduler.pool.forget_free()

    def check_integrity(self) -> None:
        """AssertionError when blocks, sequences and requests do not agree."""
        self._scheduler.check_integrity()
        for request in self._requests.values():
            assert not request.finished, "a finished request is still listed"
        for sequence, request in self._owners.items():
            assert request.choice(sequence.key[2]).sequence is sequence
            assert not request.finished, "a finished request holds a sequence"
        unowned = self._scheduler.num_unfinished - len(self._owners)
        assert unowned == len(self._incoming), "a sequence belongs to no request"

    def _checked_request(self, gateway_id: str, message: Submit) -> Request:
        outputs = [unpack_ids(output) for output in message.outputs]
        prompt = unpack_ids(message.prompt)
        check_request(message, prompt, outputs, self._runner.vocab_size)
        request = Request(gateway_id, message, self._clock())
        if (gateway_id, message.request_id) in self._requests or request.key in self._incoming:
            raise InvalidRequest(f"request {message.request_id} is already running")
        return request

    def _admit(self, request: Request, message: Submit) -> None:
        key = request.gateway_id, request.request_id
        self._requests[key] = request
        self._newest_ids[request.gateway_id] = request.request_id
        if message.timeout_s is not None:
            self._deadlines.add(key, request.arrival_s, message.timeout_s)

    def _sequence(self, request: Request, choice: Choice) -> Sequence:
        sampling = request.sampling
        return Sequence(
            key=(request.gateway_id, request.request_id, choice.index),
            tokens=request.prompt + choice.history.output,
            num_prompt_tokens=len(request.prompt),
            max_total_tokens=len(request.prompt) + sampling.max_tokens,
            priority=request.priority,
            cache_extra=cache_extra_key(salt=request.cache_salt),
            read_prefix_cache=sampling.prompt_logprobs < 0,
        )

    def _end_expired(self, now_s: float, outputs: dict[str, GatewayOutput]) -> None:
        for key, arrival_s in self._deadlines.expired(now_s):
            request = self._requests.get(key)
            if request is None or request.arrival_s != arrival_s:
                continue
            for choice in request.choices:
                if choice.finish_reason is None:
                    delta = self._delta(request, choice, [], "timeout")
                    if not request.handed_over:
                        outputs[request.gateway_id].deltas.append(delta)
                if choice.sequence is not None:
                    self._drop(choice.sequence, choice)
            if request.handed_over:
                self._outgoing.ended(request, "the request's time is over")
            self._forget_if_finished(request)

    def _report_preempted(self, plan: StepPlan, outputs: dict[str, GatewayOutput]) -> None:
        for sequence in plan.preempted:
            request = self._owners[sequence]
            if request.handed_over:
                continue
            found = self._scheduler.tables.find_prefix(sequence)
            num_cached = len(found) * self._scheduler.config.block_size
            outputs[request.gateway_id].preempted.append(
                Preempted(request.request_id, sequence.key[2], sequence.num_tokens - num_cached)
            )

    def _report_progress(self, plan: StepPlan, outputs: dict[str, GatewayOutput]) -> None:
        """Tell how far the prompts are that were computed on in this step."""
        for piece in plan.slices:
            request = self._owners.get(piece.sequence)
            if request is None or request.prompt_done or not piece.is_live:
                continue
            progress = PrefillProgress(request.request_id, piece.end)
            outputs[request.gateway_id].progress.append(progress)
            if request.handed_over:
                self._outgoing.computed(request, piece.sequence, piece.end)

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
                history=draw.request.choice(draw.choice).history,
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
            if not piece.reaches_end or request.sampling.max_tokens > 0:
                continue
            prompt = self._prompt_done(request, piece.sequence)
            deltas = [
                self._delta(request, choice, [], "length")
                for choice in request.choices
                if choice.finish_reason is None
            ]
            if request.handed_over:
                self._outgoing.done(request, piece.sequence, piece.end, prompt, tuple(deltas))
            else:
                output = outputs[request.gateway_id]
                output.prompts.append(prompt)
                output.deltas += deltas
            self._drop(piece.sequence, request.choices[0])
            self._forget_if_finished(request)

    def _report(
        self, draws: list[DrawRow], samples: list[Sample], outputs: dict[str, GatewayOutput]
    ) -> None:
        """Turn drawn tokens into deltas; fork, hand over and end sequences."""
        forked: list[tuple[DrawRow, Choice]] = []
        ended: list[tuple[Sequence, Choice]] = []
        handed_over: dict[Sequence, tuple[DrawRow, PromptDone, list[ChoiceDelta]]] = {}
        for draw, sample in zip(draws, samples, strict=True):
            request, choice = draw.request, draw.request.choice(draw.choice)
            parent = draw.piece.sequence
            if not request.prompt_done:
                request.prompt_done = True
                prompt = self._prompt_done(request, parent)
                if request.handed_over:
                    handed_over[parent] = draw, prompt, []
                else:
                    outputs[request.gateway_id].prompts.append(prompt)
            choice.history.append(sample.token_id)
            finish_reason, stop_token_id = _finish(request, choice, sample.token_id)
            delta = self._delta(
                request, choice, [sample.token_id], finish_reason, stop_token_id, sample
            )
            if request.handed_over:
                handed_over[parent][2].append(delta)
                continue
            outputs[request.gateway_id].deltas.append(delta)
            if choice.sequence is None and finish_reason is None:
                forked.append((draw, choice))
            elif choice.sequence is not None and finish_reason is not None:
                ended.append((choice.sequence, choice))
        # Forks share the parent's blocks, so the parent is dropped after them.
        for draw, choice in forked:
            self._fork(draw.request, draw.piece.sequence, choice)
        for sequence, (draw, prompt, first) in handed_over.items():
            self._hand_over(draw.request, sequence, draw.piece.end, prompt, first)
        ended.extend(_cancelled_parents(draws))
        for sequence, choice in ended:
            self._drop(sequence, choice)
        for request in {draw.request for draw in draws}:
            self._forget_if_finished(request)

    def _hand_over(
        self,
        request: Request,
        sequence: Sequence,
        num_tokens: int,
        prompt: PromptDone,
        first: list[ChoiceDelta],
    ) -> None:
        """End a request whose prompt is done here; its blocks stay pinned."""
        self._outgoing.done(request, sequence, num_tokens, prompt, tuple(first))
        self._drop(sequence, request.choices[0])
        for choice in request.choices:
            choice.finish_reason = choice.finish_reason or "length"

    def _fork(self, request: Request, parent: Sequence, choice: Choice) -> None:
        child = self._sequence(request, choice)
        choice.sequence = child
        self._owners[child] = request
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
        num_cached = sequence.num_cached_tokens or 0
        return PromptDone(
            request_id=request.request_id,
            cached_tokens=num_cached,
            computed_tokens=sequence.num_prompt_tokens - num_cached,
            pulled_tokens=min(request.num_pulled_tokens, num_cached),
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
    choices = [(sequence, request.choice(sequence.key[2])) for sequence, request in parents.items()]
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
