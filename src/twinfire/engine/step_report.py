"""What a step means for its requests: tokens, ends, forks and hand-overs, and who hears of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from twinfire.engine.inputs import DrawRow
from twinfire.engine.outgoing_prompts import OutgoingPrompts
from twinfire.engine.request import Choice, Request
from twinfire.engine.request_table import RequestTable
from twinfire.engine.sampler import Sample
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ChoiceDelta,
    FinishReason,
    Preempted,
    PrefillProgress,
    PromptDone,
    Rejected,
)
from twinfire.protocol.tokens import pack_ids
from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import StepPlan


@dataclass(slots=True)
class GatewayOutput:
    """What one step produced for one gateway."""

    prompts: list[PromptDone] = field(default_factory=list)
    deltas: list[ChoiceDelta] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    """Requests that ended because of what they ask for, after whatever they had output."""


Outputs = defaultdict[str, GatewayOutput]
"""By gateway id."""


class StepReporter:
    """Applies the results of steps to the table's requests."""

    def __init__(
        self,
        table: RequestTable,
        outgoing: OutgoingPrompts,
        blocks: BlockTables,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._outgoing = outgoing
        self._blocks = blocks
        self._block_size = block_size
        self._clock = clock

    def expired(self, request: Request, outputs: Outputs) -> None:
        """End a request whose time is over."""
        for choice in request.choices:
            if choice.finish_reason is None:
                delta = _delta(request, choice, [], "timeout")
                if not request.handed_over:
                    outputs[request.gateway_id].deltas.append(delta)
            if choice.sequence is not None:
                self._table.drop(choice.sequence, choice)
        if request.handed_over:
            self._outgoing.ended(request, "the request's time is over")
        self._table.forget_if_finished(request)

    def refused(self, request: Request, error: InvalidRequest, outputs: Outputs) -> None:
        """End a request that cannot go on because of what it asks for."""
        for choice in request.choices:
            choice.finish_reason = choice.finish_reason or "error"
            if choice.sequence is not None:
                self._table.drop(choice.sequence, choice)
        if request.handed_over:
            self._outgoing.ended(request, error.message, error)
        else:
            outputs[request.gateway_id].rejected.append(
                Rejected(request.request_id, error.message, param=error.param, code=error.code)
            )
        self._table.forget_if_finished(request)

    def preempted(self, plan: StepPlan, outputs: Outputs) -> None:
        """Tell which choices have to be computed anew."""
        for sequence in plan.preempted:
            request = self._table.owners[sequence]
            if request.handed_over:
                continue
            found = self._blocks.find_prefix(sequence)
            num_tokens = sequence.num_tokens - len(found) * self._block_size
            outputs[request.gateway_id].preempted += [
                Preempted(request.request_id, choice, num_tokens)
                for choice in request.choices_drawing_from(sequence)
            ]

    def progress(self, plan: StepPlan, outputs: Outputs) -> None:
        """Tell how far the prompts are that were computed on in this step."""
        furthest: dict[Request, int] = {}
        for piece in plan.slices:
            request = self._table.owners.get(piece.sequence)
            if request is None or request.prompt_done or not piece.is_live:
                continue
            furthest[request] = max(piece.end, furthest.get(request, 0))
            if request.handed_over:
                self._outgoing.computed(request, piece.sequence, piece.end)
        for request, num_tokens in furthest.items():
            progress = PrefillProgress(request.request_id, num_tokens)
            outputs[request.gateway_id].progress.append(progress)

    def unsampled(self, plan: StepPlan, outputs: Outputs) -> None:
        """End the requests that wanted their prompt computed and no output."""
        for piece in plan.slices:
            request = self._table.owners[piece.sequence]
            if not piece.reaches_end or request.sampling.max_tokens > 0:
                continue
            prompt = self._prompt_done(request, piece.sequence)
            deltas = [
                _delta(request, choice, [], "length")
                for choice in request.choices
                if choice.finish_reason is None
            ]
            if request.handed_over:
                self._outgoing.done(request, piece.sequence, piece.end, prompt, tuple(deltas))
            else:
                output = outputs[request.gateway_id]
                output.prompts.append(prompt)
                output.deltas += deltas
            self._table.drop(piece.sequence, request.choices[0])
            self._table.forget_if_finished(request)

    def drawn(self, draws: list[DrawRow], samples: list[Sample], outputs: Outputs) -> None:
        """Turn drawn tokens into deltas; fork, hand over and end sequences."""
        refused = _follow_grammars(draws, samples)
        forked: list[tuple[DrawRow, Choice]] = []
        ended: list[tuple[Sequence, Choice]] = []
        handed_over: dict[Sequence, tuple[DrawRow, PromptDone, list[ChoiceDelta]]] = {}
        for draw, sample in zip(draws, samples, strict=True):
            request, choice = draw.request, draw.request.choice(draw.choice)
            parent = draw.piece.sequence
            if request in refused:
                continue
            if not request.prompt_done:
                request.prompt_done = True
                prompt = self._prompt_done(request, parent)
                if request.handed_over:
                    handed_over[parent] = draw, prompt, []
                else:
                    outputs[request.gateway_id].prompts.append(prompt)
            delta = _drawn_delta(request, choice, sample)
            finish_reason = delta.finish_reason
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
            self._table.fork(draw.request, draw.piece.sequence, choice)
        for sequence, (draw, prompt, first) in handed_over.items():
            self._hand_over(draw.request, sequence, draw.piece.end, prompt, first)
        ended.extend(_cancelled_parents(draws))
        for sequence, choice in ended:
            self._table.drop(sequence, choice)
        for request, error in refused.items():
            self.refused(request, error, outputs)
        for request in {draw.request for draw in draws}:
            self._table.forget_if_finished(request)

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
        self._table.drop(sequence, request.choices[0])
        for choice in request.choices:
            choice.finish_reason = choice.finish_reason or "length"

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
            embedding=request.embedding.vector() if request.embedding else b"",
        )


def _delta(
    request: Request,
    choice: Choice,
    tokens: list[int],
    finish_reason: FinishReason | None,
    stop_token_id: int | None = None,
    sample: Sample | None = None,
    *,
    ends_with_text: bool = False,
) -> ChoiceDelta:
    choice.finish_reason = finish_reason
    return ChoiceDelta(
        request_id=request.request_id,
        choice=choice.index,
        tokens=pack_ids(tokens),
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        logprobs=sample.logprobs if sample else None,
        ends_with_text=ends_with_text,
    )


def _cancelled_parents(draws: list[DrawRow]) -> list[tuple[Sequence, Choice]]:
    """Return sequences whose own choice was cancelled while they computed the prompt for others."""
    parents = {draw.piece.sequence: draw.request for draw in draws}
    choices = [(sequence, request.choice(sequence.key[2])) for sequence, request in parents.items()]
    return [
        (sequence, choice) for sequence, choice in choices if choice.finish_reason == "cancelled"
    ]


def _follow_grammars(draws: list[DrawRow], samples: list[Sample]) -> dict[Request, InvalidRequest]:
    """Advance the choices' grammars by what was drawn; return the requests that cannot go on."""
    refused: dict[Request, InvalidRequest] = {}
    for draw, sample in zip(draws, samples, strict=True):
        request, grammar = draw.request, draw.request.choice(draw.choice).grammar
        if grammar is None:
            continue
        if sample.is_dead_end:
            # An output that is complete ends where nothing can be added, for whatever reason.
            if not grammar.may_end:
                refused[request] = _dead_end(request, grammar.failure)
        elif sample.token_id not in request.ending_token_ids and not grammar.accept(
            sample.token_id
        ):
            refused[request] = _dead_end(request, grammar.failure)
    return refused


def _dead_end(request: Request, failure: str) -> InvalidRequest:
    if failure:
        return InvalidRequest(f"the output could not be held to its grammar: {failure}")
    sampling = request.sampling
    limits = {
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "logit_bias": bool(sampling.logit_bias),
        "bad_words": bool(sampling.bad_words),
        "min_tokens": sampling.min_tokens > 0,
        "stop_token_ids": bool(sampling.stop_token_ids),
    }
    named = [name for name, is_set in limits.items() if is_set]
    return InvalidRequest(
        "the grammar and " + (", ".join(named) or "the vocabulary") + " leave no token to draw",
        param=named[0] if named else None,
    )


def _drawn_delta(request: Request, choice: Choice, sample: Sample) -> ChoiceDelta:
    """Record a choice's drawn token; return what it gained."""
    if sample.is_dead_end:
        return _delta(request, choice, [], "stop", ends_with_text=True)
    token_id = sample.token_id
    choice.history.append(token_id)
    finish_reason: FinishReason | None = None
    stop_token_id, ends_with_text = None, False
    if token_id in request.ending_token_ids:
        finish_reason = "stop"
        stop_token_id = token_id if token_id in request.sampling.stop_token_ids else None
    elif choice.grammar is not None and choice.grammar.is_done:
        finish_reason, ends_with_text = "stop", True
    elif choice.history.num_output >= request.sampling.max_tokens:
        finish_reason = "length"
    return _delta(
        request,
        choice,
        [token_id],
        finish_reason,
        stop_token_id,
        sample,
        ends_with_text=ends_with_text,
    )
