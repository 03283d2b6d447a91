"""Decides which tokens of which sequences are computed in the next step.

There are no phases: a sequence runs while it has uncomputed tokens. Decodes come first, then
prompts as their turns come, begun or waiting, while tokens, blocks and places last. When blocks run
out the last in rank is preempted, which is as if it had ended and been submitted anew. Never holds
blocks for a waiting sequence, never touches tensors; not thread-safe.
"""

from __future__ import annotations

import math
from collections import abc

from twinfire.cache.block_pool import BlockPool
from twinfire.scheduler.arrivals import Arrivals
from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.line_up import LineUp
from twinfire.scheduler.prompt_turn import PromptClock, PromptTurn
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.size_limit import check_can_ever_fit
from twinfire.scheduler.step_plan import StepDraft, StepPlan
from twinfire.scheduler.step_planner import StepPlanner

Key = tuple[str, int, int]


class Scheduler:
    """Sequences of one worker. Each step is `schedule`, the model, `commit`, in this order.

    `submit`, `abort`, `preempt` and `finish` may be called at any time. Between `schedule` and
    `commit`, the blocks of the step in flight are freed on commit and its result is dropped.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._tables = BlockTables(config)
        self._sequences: dict[Key, Sequence] = {}
        self._arrivals = Arrivals()
        self._clock = PromptClock()
        self._line = LineUp(config, self._tables, self._clock)
        self._planner = StepPlanner(config, self._tables, self._line)
        self._plan_in_flight: StepPlan | None = None
        self._num_arrivals = 0

    @property
    def pool(self) -> BlockPool:
        """The KV blocks, for reading."""
        return self._tables.pool

    @property
    def tables(self) -> BlockTables:
        """The blocks of sequences and those pinned for others."""
        return self._tables

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._line.num_preemptions

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache, each prompt once, since the start."""
        return self._planner.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Those of `prefix_queries` that were found."""
        return self._planner.prefix_hits

    @property
    def num_running(self) -> int:
        """Sequences that are computed or may be with the next step."""
        return len(self._line.running)

    @property
    def num_blocks_reserved(self) -> int:
        """Blocks of prompts that somebody else computes, shared ones counted for each."""
        return sum(len(sequence.block_ids) for sequence in self._arrivals.reserved)

    @property
    def num_prefill_tokens_waiting(self) -> int:
        """Uncomputed tokens of sequences that have more than their next one to compute."""
        running = (
            sequence.num_tokens - sequence.num_computed_tokens for sequence in self._line.running
        )
        waiting = sum(sequence.num_tokens for sequence in self._line.waiting)
        return waiting + sum(count for count in running if count > 1)

    @property
    def num_prompt_tokens_next(self) -> int:
        """Tokens of `num_prefill_tokens_waiting` that the next step may reach, of any budget.

        Of those that wait only the first is looked at: the others begin with it or after it.
        """
        num_running = sum(
            count
            for sequence in self._line.running
            if (count := sequence.num_tokens - sequence.num_computed_tokens) > 1
        )
        first = self._line.waiting.peek()
        if first is None or not self._line.has_place():
            return num_running
        prefix = self._tables.find_prefix(first)
        num_spare = self._line.num_blocks_promised() + self._line.watermark()
        if not self._tables.fits(first, prefix, num_spare):
            return num_running
        return num_running + first.num_tokens - len(prefix) * self.config.block_size

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to run, preempted ones included."""
        return len(self._line.waiting)

    @property
    def num_unfinished(self) -> int:
        """Sequences submitted or adopted and neither finished nor aborted."""
        return len(self._sequences)

    @property
    def num_blocks_used(self) -> int:
        """KV blocks that someone holds; cached content that nobody holds does not count."""
        return self.pool.num_used

    @property
    def num_blocks_total(self) -> int:
        """KV blocks that exist."""
        return self.pool.num_blocks

    def decoding(self) -> list[Sequence]:
        """Return the running sequences that only their next token is to be computed of."""
        return [
            sequence
            for sequence in self._line.running
            if sequence.num_tokens - sequence.num_computed_tokens == 1
        ]

    def get(self, key: Key) -> Sequence | None:
        """Return the unfinished sequence of this key, None if there is none."""
        return self._sequences.get(key)

    def turn(self, num_uncached: int) -> PromptTurn:
        """Return the turn of a prompt that comes now with so many tokens to compute."""
        return PromptTurn(self._clock, num_uncached if self.config.policy == "fair" else math.inf)

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence. InvalidRequest, naming need and limit, if it could never run."""
        check_can_ever_fit(sequence, self.config)
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        self._tables.extend_hashes(sequence)
        if sequence.turn is None:
            sequence.turn = self.turn(self._tables.num_uncached(sequence))
        self._enlist(sequence)
        self._line.waiting.push(sequence)

    def abort(self, key: Key) -> Sequence | None:
        """Finish the sequence of this key wherever it is; None if there is none."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks; no effect on one that is finished."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            del self._line.running[sequence]
        elif sequence.status is Status.WAITING:
            self._line.waiting.remove(sequence)
        else:
            self._arrivals.remove(sequence)
        if sequence.status is not Status.RESERVED:
            del self._sequences[sequence.key]
        sequence.status = Status.FINISHED
        sequence.run_epoch += 1
        self._tables.release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, to be computed anew with its output so far."""
        self._line.preempt(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Take blocks for all tokens of a sequence that somebody else computes.

        Its cached prefix is reused. It is not known by its key before `adopt`. False, with nothing
        changed, while there is no room beside what others need first; InvalidRequest if it could
        never run.
        """
        check_can_ever_fit(sequence, self.config)
        self._tables.extend_hashes(sequence)
        prefix = self._tables.find_prefix(sequence)
        # With nothing else here even the last block may be taken: it would never fit otherwise.
        is_alone = not (self._line.running or self._arrivals)
        if not self._tables.fits(sequence, prefix, self.num_spare_blocks(is_alone=is_alone)):
            return False
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        sequence.turn = self.turn(sequence.num_tokens)
        self._tables.start(sequence, prefix)
        grown = self._tables.grow(sequence, sequence.num_tokens)
        assert grown, "room was checked before"
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._arrivals.reserve(sequence)
        return True

    def adopt(self, sequence: Sequence) -> None:
        """Take a reserved sequence as computed, its blocks being filled; it runs from now on.

        Only now can its blocks be found. Call it between `commit` and `schedule`.
        """
        self._enlist(sequence)
        self._arrivals.filled(sequence)
        self._tables.advance(sequence, sequence.num_tokens)

    def extend(self, sequence: Sequence, output: abc.Sequence[int]) -> None:
        """Add what an adopted sequence lacks of `output`, of which its blocks hold a part."""
        sequence.tokens.extend(output[sequence.num_output_tokens :])
        self._tables.extend_hashes(sequence)

    def num_spare_blocks(self, *, is_alone: bool = False) -> int:
        """Return the blocks to leave when somebody takes some who has not waited for them here.

        They are for running sequences to grow into and for the first that waits: a stream that was
        preempted must not find its room taken each time there is some.
        """
        first = self._line.waiting.peek()
        num_for_first = self._tables.num_missing(first) if first is not None else 0
        watermark = 0 if is_alone else self.config.watermark
        return self._line.num_blocks_promised() + num_for_first + watermark

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add another choice after the parent's prompt, possibly with a first token of its own.

        Call it between `commit` and `schedule`. The child shares the computed prompt and runs at
        once if the parent still holds it and places and blocks last; else it waits, ranked with its
        parent. After a parent that was adopted and has no place yet, it waits for one like it does.
        """
        assert self._plan_in_flight is None, "fork between schedule and commit"
        length = parent.num_prompt_tokens
        assert child.num_prompt_tokens == length, "a child has its parent's prompt"
        assert child.tokens[:length] == parent.tokens[:length], "a child has its parent's prompt"
        assert child.cache_extra == parent.cache_extra, "a child shares its parent's cache"
        check_can_ever_fit(child, self.config)
        child.arrival, child.turn = parent.arrival, parent.turn
        child.num_cached_tokens = parent.num_cached_tokens
        child.block_hashes = parent.block_hashes[: length // self.config.block_size]
        self._tables.extend_hashes(child)
        self._enlist(child)
        is_ready = parent.status is Status.READY
        num_spare = self._line.num_blocks_promised() + self._line.watermark()
        if not (is_ready or self._line.has_place()) or not self._tables.share(
            parent, child, num_spare
        ):
            self._line.waiting.push(child)
        elif is_ready:
            self._arrivals.ready(child)
        else:
            self._line.run(child)

    def seat_arrivals(self) -> None:
        """Let adopted sequences run as far as there are places; `schedule` does so, too."""
        while self._line.has_place() and (arrived := self._arrivals.pop_ready()) is not None:
            self._line.run(arrived)

    def schedule(self) -> StepPlan:
        """Return the next step's work, to be committed unless it is empty.

        It is empty only when no sequence has uncomputed tokens, or none can have the blocks that
        it needs because they are held for other workers.
        """
        assert self._plan_in_flight is None, "the last plan was not committed"
        draft = StepDraft(self.config.max_num_batched_tokens)
        self.seat_arrivals()
        self._planner.plan(draft)
        plan = StepPlan(slices=list(draft.slices.values()), preempted=draft.preempted)
        if plan.slices:
            plan.block_copies = self._tables.begin_step()
            self._plan_in_flight = plan
        return plan

    def commit(self, plan: StepPlan, new_tokens: abc.Mapping[Sequence, abc.Sequence[int]]) -> None:
        """Record that a plan was computed and which tokens were drawn after its slices.

        Results of sequences that were preempted, aborted or finished meanwhile are dropped.
        """
        if not plan.slices:
            return
        assert plan is self._plan_in_flight, "only the plan in flight can be committed"
        self._plan_in_flight = None
        for piece in plan.slices:
            if not piece.is_live:
                continue
            sequence = piece.sequence
            num_computed_tokens = piece.known_end
            if piece.start < sequence.num_prompt_tokens:
                self._clock.now += piece.known_end - piece.start
            drawn = new_tokens.get(sequence)
            if drawn:
                sequence.tokens.extend(drawn)
                # The last token drawn is never computed; with drafts, neither are those rejected.
                num_computed_tokens = min(piece.end, sequence.num_tokens - 1)
            self._tables.advance(sequence, num_computed_tokens)
        self._tables.end_step()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, blocks and counts agree."""
        listed = {*self._line.running, *self._line.waiting, *self._arrivals.waiting_for_a_place}
        assert listed == set(self._sequences.values()), "a sequence is nowhere or unknown"
        assert len(self._line.running) <= self.config.max_num_seqs, "too many sequences run"
        self._arrivals.check_integrity()
        for key, sequence in self._sequences.items():
            assert sequence.key == key
            assert (sequence.status is Status.RUNNING) == (sequence in self._line.running)
            assert (sequence.status is Status.WAITING) == (sequence in self._line.waiting)
            assert sequence.num_computed_tokens <= sequence.num_tokens
        for sequence in self._line.waiting:
            assert sequence.num_computed_tokens == 0, f"{sequence.key} waits with computed tokens"
        self._tables.check_integrity([*self._sequences.values(), *self._arrivals.reserved])
        if not (self._sequences or self._arrivals.reserved) and self._plan_in_flight is None:
            held = self.pool.num_used - self._tables.num_pinned
            assert held == 0, f"{held} blocks are held by nobody"

    def _enlist(self, sequence: Sequence) -> None:
        assert sequence.key not in self._sequences, f"{sequence.key} exists already"
        self._sequences[sequence.key] = sequence
