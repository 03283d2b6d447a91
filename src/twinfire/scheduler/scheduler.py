"""Decides which tokens of which sequences are computed in the next step.

There are no phases: a sequence runs while it has uncomputed tokens. Running sequences come first,
decodes before prompt chunks, then waiting ones while tokens, blocks and places last. When blocks
run out the last in rank is preempted, which is as if it had ended and been submitted anew. Never
holds blocks for a waiting sequence, never touches tensors; not thread-safe.
"""

from __future__ import annotations

from collections import abc

from twinfire.cache.block_pool import BlockPool
from twinfire.scheduler.arrivals import Arrivals
from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.prefixes_in_flight import PrefixesInFlight
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.size_limit import check_can_ever_fit
from twinfire.scheduler.step_plan import Slice, StepDraft, StepPlan
from twinfire.scheduler.waiting_queue import Rank, WaitingQueue, rank_of

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
        # A dict with no values: a set in the order of admission.
        self._running: dict[Sequence, None] = {}
        self._arrivals = Arrivals()
        self._waiting = WaitingQueue(config.policy)
        self._plan_in_flight: StepPlan | None = None
        self._num_arrivals = 0
        self.num_preemptions = 0
        """Since the start."""
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache, each prompt once, since the start."""
        self.prefix_hits = 0
        """Those of `prefix_queries` that were found."""

    @property
    def pool(self) -> BlockPool:
        """The KV blocks, for reading."""
        return self._tables.pool

    @property
    def tables(self) -> BlockTables:
        """The blocks of sequences and those pinned for others."""
        return self._tables

    @property
    def num_running(self) -> int:
        """Sequences that are computed or may be with the next step."""
        return len(self._running)

    @property
    def num_blocks_reserved(self) -> int:
        """Blocks of prompts that somebody else computes, shared ones counted for each."""
        return sum(len(sequence.block_ids) for sequence in self._arrivals.reserved)

    @property
    def num_prefill_tokens_waiting(self) -> int:
        """Uncomputed tokens of sequences that have more than their next one to compute."""
        running = (sequence.num_tokens - sequence.num_computed_tokens for sequence in self._running)
        waiting = sum(sequence.num_tokens for sequence in self._waiting)
        return waiting + sum(count for count in running if count > 1)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to run, preempted ones included."""
        return len(self._waiting)

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

    def get(self, key: Key) -> Sequence | None:
        """Return the unfinished sequence of this key, None if there is none."""
        return self._sequences.get(key)

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence. InvalidRequest, naming need and limit, if it could never run."""
        check_can_ever_fit(sequence, self.config)
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
        self._tables.extend_hashes(sequence)
        self._enlist(sequence)
        self._waiting.push(sequence)

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
            del self._running[sequence]
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._arrivals.remove(sequence)
        if sequence.status is not Status.RESERVED:
            del self._sequences[sequence.key]
        sequence.status = Status.FINISHED
        sequence.run_epoch += 1
        self._tables.release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, to be computed anew with its output so far."""
        assert sequence.status is Status.RUNNING, f"{sequence.key} is not running"
        del self._running[sequence]
        sequence.status = Status.WAITING
        sequence.run_epoch += 1
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._tables.release(sequence)
        self._waiting.push(sequence)

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
        is_alone = not (self._running or self._arrivals)
        if not self._tables.fits(sequence, prefix, self.num_spare_blocks(is_alone=is_alone)):
            return False
        self._num_arrivals += 1
        sequence.arrival = self._num_arrivals
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
        first = self._waiting.peek()
        num_for_first = self._tables.num_missing(first) if first is not None else 0
        watermark = 0 if is_alone else self.config.watermark
        return self._num_blocks_promised() + num_for_first + watermark

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
        child.arrival = parent.arrival
        child.num_cached_tokens = parent.num_cached_tokens
        child.block_hashes = parent.block_hashes[: length // self.config.block_size]
        self._tables.extend_hashes(child)
        self._enlist(child)
        is_ready = parent.status is Status.READY
        num_spare = self._num_blocks_promised() + self._watermark()
        if not (is_ready or self._has_place()) or not self._tables.share(parent, child, num_spare):
            self._waiting.push(child)
        elif is_ready:
            self._arrivals.ready(child)
        else:
            self._run(child)

    def schedule(self) -> StepPlan:
        """Return the next step's work, to be committed unless it is empty.

        It is empty only when no sequence has uncomputed tokens, or none can have the blocks that
        it needs because they are held for other workers.
        """
        assert self._plan_in_flight is None, "the last plan was not committed"
        draft = StepDraft(self.config.max_num_batched_tokens)
        while self._has_place() and (arrived := self._arrivals.pop_ready()) is not None:
            self._run(arrived)
        self._plan_running(draft)
        # What was just taken from one sequence must not go to a newcomer.
        if not draft.preempted:
            self._plan_waiting(draft)
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
            num_computed_tokens = piece.end
            drawn = new_tokens.get(sequence)
            if drawn:
                sequence.tokens.extend(drawn)
                # The last token drawn is never computed; with drafts, neither are those rejected.
                num_computed_tokens = min(num_computed_tokens, sequence.num_tokens - 1)
            self._tables.advance(sequence, num_computed_tokens)
        self._tables.end_step()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, blocks and counts agree."""
        listed = {*self._running, *self._waiting, *self._arrivals.waiting_for_a_place}
        assert listed == set(self._sequences.values()), "a sequence is nowhere or unknown"
        assert len(self._running) <= self.config.max_num_seqs, "too many sequences run"
        self._arrivals.check_integrity()
        for key, sequence in self._sequences.items():
            assert sequence.key == key
            assert (sequence.status is Status.RUNNING) == (sequence in self._running)
            assert (sequence.status is Status.WAITING) == (sequence in self._waiting)
            assert sequence.num_computed_tokens <= sequence.num_tokens
        for sequence in self._waiting:
            assert sequence.num_computed_tokens == 0, f"{sequence.key} waits with computed tokens"
        self._tables.check_integrity([*self._sequences.values(), *self._arrivals.reserved])
        if not (self._sequences or self._arrivals.reserved) and self._plan_in_flight is None:
            held = self.pool.num_used - self._tables.num_pinned
            assert held == 0, f"{held} blocks are held by nobody"

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._running[sequence] = None

    def _plan_running(self, draft: StepDraft) -> None:
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            remaining = sequence.num_tokens - sequence.num_computed_tokens
            if remaining == 1:
                decoding.append(sequence)
            elif remaining > 1:
                prefilling.append(sequence)
        prefilling.sort(key=self._rank)
        for sequence in (*decoding, *prefilling):
            if draft.budget == 0:
                break
            if sequence.status is Status.RUNNING:  # Not preempted for one before it.
                self._plan_one_running(draft, sequence)

    def _plan_one_running(self, draft: StepDraft, sequence: Sequence) -> None:
        num_tokens = self._num_tokens_to_plan(draft, sequence)
        while not self._tables.grow(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max(self._running, key=self._rank)
            draft.withdraw(victim)
            draft.preempted.append(victim)
            self.preempt(victim)
            if victim is sequence:
                return
        draft.add(sequence, num_tokens)

    def _plan_waiting(self, draft: StepDraft) -> None:
        if not (self._waiting and draft.budget and self._has_place()):
            return
        in_flight = PrefixesInFlight(self._tables.cache)
        for piece in draft.slices.values():
            in_flight.add(piece)
        num_promised = self._num_blocks_promised()
        delayed: list[Sequence] = []
        while draft.budget and self._has_place(len(delayed)):
            sequence = self._waiting.peek()
            if sequence is None:
                break
            if self.config.enable_prefix_cache and in_flight.help(sequence):
                self._waiting.remove(sequence)
                delayed.append(sequence)
                continue
            # Looked up anew at each attempt: blocks found by a failed one may be gone.
            prefix = self._tables.find_prefix(sequence)
            if not self._tables.fits(sequence, prefix, num_promised + self._watermark()):
                break
            self._waiting.remove(sequence)
            in_flight.add(self._start(draft, sequence, prefix))
            num_promised += self._tables.num_missing(sequence)
        for sequence in delayed:
            self._waiting.push(sequence)

    def _start(self, draft: StepDraft, sequence: Sequence, prefix: list[int]) -> Slice:
        self._tables.start(sequence, prefix)
        self._run(sequence)
        if sequence.num_cached_tokens is None:
            found = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            sequence.num_cached_tokens = found
            if self.config.enable_prefix_cache and sequence.read_prefix_cache:
                self.prefix_queries += sequence.num_prompt_tokens
                self.prefix_hits += found
        num_tokens = self._num_tokens_to_plan(draft, sequence)
        grown = self._tables.grow(sequence, sequence.num_computed_tokens + num_tokens)
        assert grown, "room was checked before"
        return draft.add(sequence, num_tokens)

    def _num_tokens_to_plan(self, draft: StepDraft, sequence: Sequence) -> int:
        wanted = min(sequence.num_tokens - sequence.num_computed_tokens, draft.budget)
        return min(wanted, self.config.long_prefill_threshold or wanted)

    def _num_blocks_promised(self) -> int:
        """Return the blocks that running sequences still lack for the prompts they have begun."""
        return sum(self._tables.num_missing(sequence) for sequence in self._running)

    def _watermark(self) -> int:
        # Whatever was accepted can run alone.
        return self.config.watermark if self._running else 0

    def _has_place(self, num_promised: int = 0) -> bool:
        return len(self._running) + num_promised < self.config.max_num_seqs

    def _rank(self, sequence: Sequence) -> Rank:
        return rank_of(sequence, self.config.policy)

    def _enlist(self, sequence: Sequence) -> None:
        assert sequence.key not in self._sequences, f"{sequence.key} exists already"
        self._sequences[sequence.key] = sequence
