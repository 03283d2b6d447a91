"""The step loop: schedule, run, draw, report.

Joins scheduler, runner and sampler for many gateways' requests. Synchronous and single-threaded:
the worker calls `step` while there is work and everything else between steps. Knows no sockets.
A prompt may be computed here for another worker (`outgoing_prompts`) or by another worker for here
(`incoming_prompts`); either way the same sequences run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Series

import numpy as np

from twinfire.artifacts.grammar_compiler import GrammarCompiler
from twinfire.engine.deadlines import Deadlines
from twinfire.engine.hand_off import HandOffEvent, Reservation
from twinfire.engine.incoming_prompts import IncomingPrompts
from twinfire.engine.inputs import PackedStep, pack_step
from twinfire.engine.load_meter import LoadMeter
from twinfire.engine.outgoing_prompts import OutgoingPrompts
from twinfire.engine.prefix_exchange import PrefixExchange
from twinfire.engine.request import Choice, Request
from twinfire.engine.request_checks import (
    check_first_tokens,
    check_first_tokens_match,
    check_request,
    check_task,
)
from twinfire.engine.request_table import RequestTable
from twinfire.engine.runner import Runner
from twinfire.engine.sampler import Sampler
from twinfire.engine.speculator import Speculator
from twinfire.engine.step_report import GatewayOutput, Outputs, StepReporter
from twinfire.engine.verifier import Gain, Verifier
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    Load,
    PromptDone,
    Submit,
)
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.tokens import unpack_ids
from twinfire.scheduler.prompt_turn import PromptTurn
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import StepPlan

_PROMPT_ROWS_AT_ONCE = 64
"""Rows of prompt logits held at a time: 64 rows of 150k float32 are 38 MB."""


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
        *,
        grammars: GrammarCompiler | None = None,
        embeds: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        """Without `grammars` requests that have one are refused, without `speculator` none drafted.

        An engine that `embeds` takes nothing but prompts to be pooled, any other none of them.
        """
        self._embeds = embeds
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._verifier = Verifier(sampler)
        self._clock = clock
        self._grammars = grammars
        self._speculator = speculator
        self._table = RequestTable(scheduler)
        self._outgoing = OutgoingPrompts(scheduler.tables, scheduler.config.block_size)
        self._reporter = StepReporter(
            self._table, self._outgoing, scheduler.tables, scheduler.config.block_size, clock
        )
        self._incoming = IncomingPrompts(scheduler)
        self._deadlines = Deadlines()
        self._meter = LoadMeter()
        self._num_steps = 0
        self._last_step_tokens = 0
        self.prefixes = PrefixExchange(scheduler)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, reserved ones not counted."""
        return len(self._table) > 0

    @property
    def holds_for_others(self) -> bool:
        """Whether blocks are kept for other workers to read or to fill."""
        return self._scheduler.tables.num_pinned > 0 or len(self._incoming) > 0

    @property
    def is_starved(self) -> bool:
        """Whether the last step computed nothing for want of blocks, though requests wait.

        Others hold them: prompts that they read, and prompts that they are to send.
        """
        return self._last_step_tokens == 0 and self._scheduler.num_waiting > 0

    def turn(self, num_uncached: int) -> PromptTurn:
        """Return the turn of a prompt that comes now with so many tokens to compute."""
        return self._scheduler.turn(num_uncached)

    def submit(
        self,
        gateway_id: str,
        message: Submit,
        *,
        pulled_blocks: int = 0,
        turn: PromptTurn | None = None,
    ) -> None:
        """Queue a request; InvalidRequest when it can never run here.

        `pulled_blocks` of its prompt have just come from another worker. `turn` is the one that it
        had while it waited elsewhere on this worker.
        """
        request = self._checked_request(gateway_id, message)
        if request.key in self._outgoing:
            raise InvalidRequest(f"attempt {message.attempt} has been computed already")
        request.turn = turn
        request.num_pulled_tokens = pulled_blocks * self._scheduler.config.block_size
        if self._follow_grammar(request):
            self._table.submit(request)
        else:
            self._table.hold(request)
        self._note_deadline(request)

    def reserve(self, gateway_id: str, message: Submit) -> Reservation | None:
        """Take the blocks of a prompt that another worker computes.

        None while there is no room or its grammar is being compiled: what was made of `message` is
        kept for the next try, until `release_reservation`. InvalidRequest when it can never run.
        """
        key = HandOffKey(gateway_id, message.request_id, message.attempt)
        waiting = self._incoming.waiting(key)
        if waiting is None:
            request = self._checked_request(gateway_id, message)
            waiting = request, self._table.sequence(request, request.choices[0])
        else:
            self._refuse_if_running(waiting[0])
        if not self._follow_grammar(waiting[0]):
            self._incoming.wait(*waiting)
            return None
        return self._incoming.reserve(*waiting)

    def release_reservation(self, key: HandOffKey) -> None:
        """Free reserved blocks, or give up waiting for some; unknown keys are ignored."""
        self._incoming.release(key)

    def adopt(
        self,
        key: HandOffKey,
        prompt: PromptDone,
        first: Series[ChoiceDelta],
        *,
        has_draft_kv: bool = True,
        draft_feature: bytes = b"",
    ) -> GatewayOutput:
        """Go on from reserved blocks, filled, and the first token of every choice.

        Returns what its gateway is to hear at once. Choices that are not among `first` have been
        cancelled. Without `has_draft_kv` the blocks have nothing for a draft head here, which then
        leaves the request to other drafters; with `draft_feature` (as `Commit`'s) it drafts from
        the first step on. KeyError when there is no such reservation; InvalidRequest, with nothing
        changed, when this cannot be what was reserved for.
        """
        request = self._incoming.request(key)
        check_first_tokens(first, [one.index for one in request.choices], self._runner.vocab_size)
        self._refuse_if_running(request)
        check_first_tokens_match(request, first)
        parent = self._incoming.take(key)
        request.handed_over = False
        self._table.add(request, parent)
        self._note_deadline(request)
        request.prompt_done = True
        lead = request.choices[0]
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
                self._table.fork(request, parent, choice)
        if lead.finish_reason is None:
            self._scheduler.extend(parent, lead.history.output)
        else:
            self._table.drop(parent, lead)
        if self._speculator is not None:
            adopted = [one.sequence for one in going_on if one.sequence is not None]
            if has_draft_kv:
                self._speculator.expect(adopted, draft_feature, self._scheduler.tables)
            else:
                self._speculator.leave_without_head(adopted)
        self._table.forget_if_finished(request)
        return GatewayOutput(prompts=[prompt], deltas=list(first))

    def take_hand_off_events(self) -> list[HandOffEvent]:
        """Return what happened to prompts for other workers since the last call."""
        return self._outgoing.take_events()

    def release_hold(self, key: HandOffKey) -> None:
        """Unpin what was computed for another worker; unknown keys are ignored."""
        self._outgoing.release(key)

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of a request and free its blocks; unknown ids are ignored."""
        request = self._table.get((gateway_id, request_id))
        if request is None:
            return
        for one in request.choices_named(None if choice == ALL_CHOICES else choice):
            if one.finish_reason is None:
                one.finish_reason = "cancelled"
        # Before the prompt is done, the first choice's sequence computes it for the others.
        shared = not (request.finished or request.prompt_done or request.resumed)
        for one in () if shared else request.choices:
            if one.sequence is not None and one.finish_reason is not None:
                self._table.drop(one.sequence, one)
        if request.finished and request.handed_over:
            self._outgoing.ended(request, "the request was cancelled")
        self._table.forget_if_finished(request)

    def cancel_gateway(self, gateway_id: str) -> None:
        """Stop everything of a gateway that is gone."""
        for request_id in self._table.ids_of(gateway_id):
            self.cancel(gateway_id, request_id)

    def step(self) -> dict[str, GatewayOutput]:
        """Compute one step and return what each gateway gained."""
        outputs: Outputs = defaultdict(GatewayOutput)
        started_s = self._clock()
        self._end_expired(started_s, outputs)
        self._submit_held(outputs)
        if self._speculator is not None:
            self._scheduler.seat_arrivals()
            self._speculator.propose(self._scheduler, self._table.owners)
        plan = self._scheduler.schedule()
        self._num_steps += 1
        self._last_step_tokens = plan.num_tokens
        self._reporter.preempted(plan, outputs)
        if not plan.slices:
            return outputs
        self._note_first_scheduled(plan)
        computing_s = self._clock()
        packed = pack_step(plan, self._table.owners, self._runner.kv_layout.block_size)
        self._runner.execute(packed.batch)
        gains = self._draw(packed)
        self._score_prompts(packed)
        for rows in packed.pooled_rows:
            rows.states.take(self._runner.logits(rows.first_row, rows.first_row + rows.count))
        self._scheduler.commit(plan, _own_tokens(gains))
        draft_features: Mapping[Sequence, bytes] = {}
        if self._speculator is not None:
            elapsed_s = self._clock() - computing_s
            draft_features = self._speculator.computed(plan, gains, elapsed_s)
        self._reporter.progress(plan, outputs)
        self._reporter.unsampled(plan, outputs)
        self._reporter.gained(gains, outputs, draft_features)
        if self._speculator is not None:
            self._speculator.leave_ended()
        self._meter.note(plan, self._clock() - started_s)
        return outputs

    def load(self) -> Load:
        """Return the state after the last step; what is the worker's own to count stays 0."""
        scheduler = self._scheduler
        pinned = scheduler.tables.num_pinned
        return Load(
            step=self._num_steps,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._table.held),
            kv_blocks_used=scheduler.num_blocks_used,
            kv_blocks_total=scheduler.num_blocks_total,
            step_tokens=self._last_step_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prefill_tokens_waiting=scheduler.num_prefill_tokens_waiting,
            kv_blocks_held=min(pinned + scheduler.num_blocks_reserved, scheduler.num_blocks_used),
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_s=self._meter.decode_step_s,
            drafted=self._speculator.num_drafted if self._speculator is not None else (),
            accepted=self._speculator.num_accepted if self._speculator is not None else (),
        )

    def take_cache_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the block hashes that can be found since the last call, and those that cannot."""
        return self._scheduler.pool.take_changes()

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that can be found."""
        return self._scheduler.pool.findable_hashes()

    @property
    def num_blocks_handed_out(self) -> int:
        """Blocks of the lowest ids of which some have been used since the start."""
        return self._scheduler.pool.num_handed_out

    def block_generation(self, block_id: int) -> int:
        """Return the number that rises whenever a block is handed out."""
        return self._scheduler.pool.block_generation(block_id)

    def clear_prefix_cache(self) -> None:
        """Make cached blocks that nobody uses unfindable."""
        self._scheduler.pool.forget_free()

    def check_integrity(self) -> None:
        """AssertionError when blocks, sequences and requests do not agree."""
        self._scheduler.check_integrity()
        self._table.check_integrity()

    def _checked_request(self, gateway_id: str, message: Submit) -> Request:
        outputs = [unpack_ids(output) for output in message.outputs]
        prompt = unpack_ids(message.prompt)
        check_request(message, prompt, outputs, self._runner.vocab_size)
        check_task(message, embeds=self._embeds)
        request = Request(gateway_id, message, prompt, outputs, self._clock())
        self._refuse_if_running(request)
        if request.key in self._incoming:
            raise InvalidRequest(f"request {message.request_id} is already reserved for")
        return request

    def _follow_grammar(self, request: Request) -> bool:
        """Hold a request to its grammar, if any; False until that is compiled."""
        grammar = request.sampling.grammar
        if grammar is None:
            return True
        if self._grammars is None:
            raise InvalidRequest("this worker serves no grammars", "grammar")
        compiled = self._grammars.find(grammar)
        if compiled is None:
            return False
        request.follow_grammar(compiled)
        return True

    def _submit_held(self, outputs: Outputs) -> None:
        """Queue the requests whose grammars have been compiled."""
        for request in self._table.held:
            try:
                if self._follow_grammar(request):
                    self._table.submit(request)
            except InvalidRequest as error:
                self._reporter.refused(request, error, outputs)

    def _refuse_if_running(self, request: Request) -> None:
        if (request.gateway_id, request.request_id) in self._table:
            raise InvalidRequest(f"request {request.request_id} is already running")

    def _note_deadline(self, request: Request) -> None:
        if request.timeout_s is not None:
            key = request.gateway_id, request.request_id
            self._deadlines.add(key, request.arrival_s, request.timeout_s)

    def _end_expired(self, now_s: float, outputs: Outputs) -> None:
        for key, arrival_s in self._deadlines.expired(now_s):
            request = self._table.get(key)
            if request is not None and request.arrival_s == arrival_s:
                self._reporter.expired(request, outputs)

    def _note_first_scheduled(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            request = self._table.owners[piece.sequence]
            if request.first_scheduled_s is None:
                request.first_scheduled_s = self._clock()

    def _draw(self, packed: PackedStep) -> list[Gain]:
        if not packed.draws:
            return []
        return self._verifier.draw(self._runner.logits(0, packed.num_draw_rows), packed.draws)

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


def _own_tokens(gains: Series[Gain]) -> dict[Sequence, list[int]]:
    """Return the tokens that each planned sequence drew for itself, not for its forks."""
    return {
        gain.rows.piece.sequence: gain.token_ids for gain in gains if gain.is_own and gain.token_ids
    }
