"""What a step means for its requests: tokens, ends, forks and hand-overs, and who hears of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from twinfire.engine.outgoing_prompts import OutgoingPrompts
from twinfire.engine.request import Choice, Request
from twinfire.engine.request_table import RequestTable
from twinfire.engine.verifier import Gain
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
                delta = _delta(request, choice, "timeout")
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
            furthest[request] = max(piece.known_end, furthest.get(request, 0))
            if request.handed_over:
                self._outgoing.computed(request, piece.sequence, piece.known_end)
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
                _delta(request, choice, "length")
                for choice in request.choices
                if choice.finish_reason is None
            ]
            if request.handed_over:
                self._outgoing.done(request, piece.sequence, piece.known_end, prompt, tuple(deltas))
            else:
                output = outputs[request.gateway_id]
                output.prompts.append(prompt)
                output.deltas += deltas
            self._table.drop(piece.sequence, request.choices[0])
            self._table.forget_if_finished(request)

    def gained(
        self, gains: Series[Gain], outputs: Outputs, draft_features: Mapping[Sequence, bytes]
    ) -> None:
        """Turn drawn tokens into deltas; fork, hand over and end sequences.

        `draft_features` go with those handed over, where a draft head has followed them.
        """
        forked: list[Gain] = []
        ended: list[tuple[Sequence, Choice]] = []
        handed_over: dict[Sequence, tuple[Gain, PromptDone, list[ChoiceDelta]]] = {}
        refused = {gain.request: gain.refusal for gain in gains if gain.refusal is not None}
        for gain in gains:
            request, choice, parent = gain.request, gain.choice, gain.rows.piece.sequence
            choice.finish_reason = gain.finish_reason
            if request in refused and not (gain.token_ids and request.prompt_done):
                continue
            if not request.prompt_done:
                request.prompt_done = True
                prompt = self._prompt_done(request, parent)
                if request.handed_over:
                    handed_over[parent] = gain, prompt, []
                else:
                    outputs[request.gateway_id].prompts.append(prompt)
            delta = _gained_delta(gain)
            if request.handed_over:
                handed_over[parent][2].append(delta)
                continue
            outputs[request.gateway_id].deltas.append(delta)
            if request in refused:
                continue
            if choice.sequence is None and choice.finish_reason is None:
                forked.append(gain)
            elif choice.sequence is not None and choice.finish_reason is not None:
                ended.append((choice.sequence, choice))
        # Forks share the parent's blocks, so the parent is dropped after them.
        for gain in forked:
            self._table.fork(gain.request, gain.rows.piece.sequence, gain.choice)
        for sequence, (gain, prompt, first) in handed_over.items():
            feature = draft_features.get(sequence, b"")
            num_tokens = gain.rows.piece.known_end
            self._hand_over(gain.request, sequence, num_tokens, prompt, first, feature)
        ended.extend(_cancelled_parents(gains))
        for sequence, choice in ended:
            self._table.drop(sequence, choice)
        for request, error in refused.items():
            self.refused(request, error, outputs)
        for request in {gain.request for gain in gains}:
            self._table.forget_if_finished(request)

    def _hand_over(
        self,
        request: Request,
        sequence: Sequence,
        num_tokens: int,
        prompt: PromptDone,
        first: list[ChoiceDelta],
        draft_feature: bytes,
    ) -> None:
        """End a request whose prompt is done here; its blocks stay pinned."""
        self._outgoing.done(request, sequence, num_tokens, prompt, tuple(first), draft_feature)
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


def _delta(request: Request, choice: Choice, finish_reason: FinishReason) -> ChoiceDelta:
    """End a choice without a token."""
    choice.finish_reason = finish_reason
    return ChoiceDelta(
        request_id=request.request_id,
        choice=choice.index,
        tokens=b"",
        finish_reason=finish_reason,
        stop_token_id=None,
        logprobs=None,
    )


def _gained_delta(gain: Gain) -> ChoiceDelta:
    return ChoiceDelta(
        request_id=gain.request.request_id,
        choice=gain.choice.index,
        tokens=pack_ids(gain.token_ids),
        finish_reason=gain.finish_reason,
        stop_token_id=gain.stop_token_id,
        logprobs=gain.logprobs(),
        ends_with_text=gain.ends_with_text,
        drafted=len(gain.rows.piece.drafts),
        accepted=gain.num_accepted,
    )


def _cancelled_parents(gains: Series[Gain]) -> list[tuple[Sequence, Choice]]:
    """Return sequences whose own choice was cancelled while they computed the prompt for others."""
    parents = {gain.rows.piece.sequence: gain.request for gain in gains}
    choices = [(sequence, request.choice(sequence.key[2])) for sequence, request in parents.items()]
    return [
        (sequence, choice) for sequence, choice in choices if choice.finish_reason == "cancelled"
    ]
