"""The smallest step loop over a real scheduler and the token model: submit, step, fork, finish."""

from __future__ import annotations

import random
from collections.abc import Iterable

from support.token_model import VOCAB_SIZE, TokenModel, draw, naive_tokens, token_array
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.step_plan import StepPlan


class TokenServer:
    """Runs sequences to their `max_total_tokens` and checks each plan and each output."""

    def __init__(self, config: SchedulerConfig, draft_seed: int | None = None) -> None:
        """With a `draft_seed` sequences are given drafts, the first of them right ones."""
        self._draft_random = random.Random(draft_seed) if draft_seed is not None else None
        self.config = config
        self.scheduler = Scheduler(config)
        self.model = TokenModel(config.num_blocks, config.block_size)
        self.finished: list[Sequence] = []
        self.plans: list[StepPlan] = []
        self._num_requests = 0
        self._forks_due: dict[Sequence, int] = {}

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        extra: bytes = b"",
        read_prefix_cache: bool = True,
        num_forks: int = 0,
    ) -> Sequence:
        """Queue a request of `1 + num_forks` choices and return choice 0."""
        tokens = token_array(prompt)
        self._num_requests += 1
        sequence = Sequence(
            key=("gateway", self._num_requests, 0),
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            max_total_tokens=len(tokens) + max_tokens,
            priority=priority,
            cache_extra=extra,
            read_prefix_cache=read_prefix_cache,
        )
        self.scheduler.submit(sequence)
        self._forks_due[sequence] = num_forks
        return sequence

    def step(self) -> StepPlan:
        """Schedule, compute and commit one step."""
        plan = self.launch()
        self.land(plan)
        return plan

    def launch(self) -> StepPlan:
        """Schedule a step and check the plan."""
        for sequence in self.scheduler.decoding() if self._draft_random else ():
            sequence.drafts = self._drafts(sequence, self._draft_random)
        streams = set(self.scheduler.decoding())
        plan = self.scheduler.schedule()
        self._check(plan, streams - set(plan.preempted))
        self.plans.append(plan)
        return plan

    def land(self, plan: StepPlan) -> None:
        """Compute and commit a plan; fork and finish what it completes."""
        drawn = self.model.execute(plan)
        self.scheduler.commit(plan, drawn)
        for sequence in drawn:
            if sequence.status is Status.RUNNING:
                self._fork_after_first_token(sequence)
                self.finish_if_complete(sequence)

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left and return how often; AssertionError beyond `max_steps`."""
        for num_steps in range(max_steps + 1):
            if self.scheduler.num_unfinished == 0:
                self.scheduler.check_integrity()
                return num_steps
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"{self.scheduler.num_unfinished} sequences after {max_steps} steps")

    def finish_if_complete(self, sequence: Sequence) -> None:
        """Finish a sequence that has all its tokens, and check them."""
        if sequence.num_tokens == sequence.max_total_tokens:
            self.scheduler.finish(sequence)
            self.finished.append(sequence)
            self.check_output(sequence)

    def check_output(self, sequence: Sequence) -> None:
        """Compare a sequence's tokens with those of a loop without scheduler and blocks."""
        prompt = sequence.tokens[: sequence.num_prompt_tokens].tolist()
        expected = naive_tokens(
            prompt, sequence.key[2], sequence.num_output_tokens, sequence.cache_extra
        )
        assert sequence.tokens.tolist() == expected, f"{sequence.key} has wrong tokens"

    def _drafts(self, sequence: Sequence, chance: random.Random) -> tuple[int, ...]:
        num_drafts = min(chance.randrange(6), sequence.max_total_tokens - sequence.num_tokens - 1)
        num_right = chance.randrange(num_drafts + 1) if num_drafts > 0 else 0
        tokens = naive_tokens(
            sequence.tokens.tolist(), sequence.key[2], num_right, sequence.cache_extra
        )[sequence.num_tokens :]
        return (*tokens, *(chance.randrange(VOCAB_SIZE) for _ in range(num_drafts - num_right)))

    def _fork_after_first_token(self, parent: Sequence) -> None:
        first_value = self.model.last_prompt_value(parent)
        for choice in range(1, self._forks_due.pop(parent, 0) + 1):
            child = self.child_of(parent, choice)
            child.tokens.append(draw(first_value, choice))
            self.scheduler.fork(parent, child)
            self.finish_if_complete(child)

    def child_of(self, parent: Sequence, choice: int) -> Sequence:
        """Return another choice of the parent's request, with no output yet."""
        return Sequence(
            key=(*parent.key[:2], choice),
            tokens=parent.tokens[: parent.num_prompt_tokens],
            num_prompt_tokens=parent.num_prompt_tokens,
            max_total_tokens=parent.max_total_tokens,
            priority=parent.priority,
            cache_extra=parent.cache_extra,
            read_prefix_cache=parent.read_prefix_cache,
        )

    def _check(self, plan: StepPlan, streams: set[Sequence]) -> None:
        planned = {piece.sequence for piece in plan.slices}
        assert len(planned) == len(plan.slices), "a sequence is planned twice"
        assert not planned & set(plan.preempted), "a preempted sequence is planned"
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(planned) <= self.config.max_num_seqs
        assert plan.slices or self.scheduler.num_unfinished == 0, "no progress"
        for piece in plan.slices:
            sequence = piece.sequence
            assert sequence.status is Status.RUNNING
            assert piece.is_live
            assert piece.num_tokens >= 1
            assert piece.start == sequence.num_computed_tokens
            assert piece.known_end <= sequence.num_tokens
            assert not piece.drafts or piece.known_end == sequence.num_tokens
            assert piece.end < sequence.max_total_tokens or not piece.drafts
        of_prompts = sum(p.num_tokens for p in plan.slices if p.sequence not in streams)
        most = self.config.max_prompt_tokens_beside_streams
        if streams and most is not None:
            # What is withdrawn from a stream that is preempted is planned anew.
            assert of_prompts <= most + len(plan.preempted), "prompts take more than their part"
            assert streams <= planned, "a stream was skipped"
            if of_prompts >= most:
                return
        if plan.num_tokens < self.config.max_num_batched_tokens:
            assert self.scheduler.num_running == len(planned), "a running sequence was skipped"
