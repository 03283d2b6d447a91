"""Fills one step: running decodes first, then prompts as their turns come, and drafts last."""

from __future__ import annotations

from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.line_up import LineUp
from twinfire.scheduler.newcomers import Newcomers
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.step_plan import Slice, StepDraft


class StepPlanner:
    """Takes blocks and places for what it plans, and preempts the last in rank for the others."""

    def __init__(self, config: SchedulerConfig, tables: BlockTables, line: LineUp) -> None:
        self._config = config
        self._tables = tables
        self._line = line
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache, each prompt once, since the start."""
        self.prefix_hits = 0
        """Those of `prefix_queries` that were found."""

    def plan(self, draft: StepDraft) -> None:
        """Plan what the draft's budget, blocks and places last for."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._line.running:
            remaining = sequence.num_tokens - sequence.num_computed_tokens
            if remaining == 1:
                decoding.append(sequence)
            elif remaining > 1:
                prefilling.append(sequence)
        prefilling.sort(key=self._line.turn)
        for sequence in decoding:
            self._plan_running(draft, sequence)
        most = self._config.max_prompt_tokens_beside_streams
        held = draft.hold_back(most) if decoding and most is not None else 0
        self._plan_prompts(draft, prefilling)
        draft.budget += held
        # Last: a prompt's token is certain to be of use, and drafts that come first in every step
        # would keep prompts waiting for as long as they come.
        self._plan_drafts(draft, decoding)

    def _plan_prompts(self, draft: StepDraft, prefilling: list[Sequence]) -> None:
        """Plan prompts as their turns come, those that have begun and those that wait."""
        newcomers = Newcomers(
            self._config,
            self._tables,
            self._line,
            draft,
            prefilling,
            go_on=lambda sequence: self._plan_running(draft, sequence),
        )
        for sequence in prefilling:
            while (taken := newcomers.take(before=sequence)) is not None:
                newcomers.started(self._start(draft, *taken))
            self._plan_running(draft, sequence)
        while (taken := newcomers.take()) is not None:
            newcomers.started(self._start(draft, *taken))
        newcomers.close()

    def _plan_drafts(self, draft: StepDraft, decoding: list[Sequence]) -> None:
        """Add what is guessed, as far as nobody else needs the tokens and blocks."""
        num_lookahead = self._config.num_lookahead_tokens
        if not (num_lookahead or any(sequence.drafts for sequence in decoding)):
            return
        num_spare = self._line.num_blocks_promised() + self._line.watermark()
        for sequence in decoding:
            drafts, sequence.drafts = sequence.drafts[: draft.budget], ()
            piece = draft.slices.get(sequence)
            if piece is None or draft.preempted:
                continue
            num_wanted = min(piece.end + len(drafts) + num_lookahead, sequence.max_total_tokens)
            if not self._tables.grow(sequence, num_wanted, num_spare):
                num_room = len(sequence.block_ids) * self._config.block_size - piece.end
                drafts = drafts[:num_room]
            if drafts:
                draft.add_drafts(sequence, drafts)

    def _plan_running(self, draft: StepDraft, sequence: Sequence) -> None:
        # One that was preempted for another before it runs no more.
        if draft.budget == 0 or sequence.status is not Status.RUNNING or sequence in draft.slices:
            return
        num_tokens = self._num_tokens_to_plan(draft, sequence)
        while not self._tables.grow(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max(self._line.running, key=self._line.rank)
            draft.withdraw(victim)
            draft.preempted.append(victim)
            self._line.preempt(victim)
            if victim is sequence:
                return
        draft.add(sequence, num_tokens)

    def _start(self, draft: StepDraft, sequence: Sequence, prefix: list[int]) -> Slice:
        self._tables.start(sequence, prefix)
        self._line.run(sequence)
        if sequence.num_cached_tokens is None:
            found = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            sequence.num_cached_tokens = found
            if self._config.enable_prefix_cache and sequence.read_prefix_cache:
                self.prefix_queries += sequence.num_prompt_tokens
                self.prefix_hits += found
        num_tokens = self._num_tokens_to_plan(draft, sequence)
        grown = self._tables.grow(sequence, sequence.num_computed_tokens + num_tokens)
        assert grown, "room was checked before"
        return draft.add(sequence, num_tokens)

    def _num_tokens_to_plan(self, draft: StepDraft, sequence: Sequence) -> int:
        wanted = min(sequence.num_tokens - sequence.num_computed_tokens, draft.budget)
        return min(wanted, self._config.long_prefill_threshold or wanted)
