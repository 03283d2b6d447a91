"""Random lives of many sequences, checked against a model that needs no scheduler. E4, E7, E33."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.token_server import TokenServer
from twinfire.protocol.errors import InvalidRequest
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status

MAX_MODEL_LEN = 24


@st.composite
def configs(draw) -> SchedulerConfig:
    block_size = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 8))
    return SchedulerConfig(
        # About what one sequence may need: room runs out often.
        num_blocks=max(1, -(-MAX_MODEL_LEN // block_size) + draw(st.integers(-1, 6))),
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 10)),
        long_prefill_threshold=draw(st.none() | st.integers(1, 8)),
        max_prompt_tokens_beside_streams=draw(st.none() | st.integers(1, 4)),
        watermark_blocks=draw(st.none() | st.integers(0, 2)),
        policy=draw(st.sampled_from(["fair", "fcfs", "priority"])),
        num_lookahead_tokens=draw(st.sampled_from([0, 0, 3])),
        enable_prefix_cache=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def requests(draw) -> tuple[list[int], int, dict[str, object]]:
    """Return prompt, max_tokens and options; prompts share beginnings."""
    shared = draw(st.integers(0, 14))
    options = {
        "priority": draw(st.integers(0, 2)),
        "extra": draw(st.sampled_from([b"", b"", b"", b"salt"])),
        "read_prefix_cache": draw(st.sampled_from([True, True, True, False])),
        "num_forks": draw(st.sampled_from([0, 0, 1, 3])),
    }
    own = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    return [7] * shared + own, draw(st.integers(1, 9)), options


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs(), draft_seed=st.none() | st.integers(0, 1000))
    def make(self, config, draft_seed):
        self.server = TokenServer(config, draft_seed)
        self.scheduler = self.server.scheduler
        self.plan = None
        self.submitted: list[Sequence] = []

    def _pick(self, data, sequences: list[Sequence]) -> Sequence | None:
        return data.draw(st.sampled_from(sequences)) if sequences else None

    def _unfinished(self) -> list[Sequence]:
        return [one for one in self.submitted if one.status is not Status.FINISHED]

    @precondition(lambda self: self.scheduler.num_unfinished < 40)
    @rule(requests=st.lists(requests(), min_size=1, max_size=5))
    def submit(self, requests):
        for prompt, max_tokens, options in requests:
            num_unfinished = self.scheduler.num_unfinished
            total = len(prompt) + max_tokens
            config = self.server.config
            fits = total <= MAX_MODEL_LEN and config.blocks_for(total - 1) <= config.num_blocks
            try:
                self.submitted.append(self.server.submit(prompt, max_tokens, **options))
            except InvalidRequest:
                assert not fits
                assert self.scheduler.num_unfinished == num_unfinished
            else:
                assert fits

    @precondition(lambda self: self.plan is None)
    @rule()
    def launch(self):
        self.plan = self.server.launch()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def land(self):
        self.server.land(self.plan)
        self.plan = None

    @precondition(lambda self: self.plan is None)
    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.server.step()

    @rule(data=st.data())
    def abort(self, data):
        sequence = self._pick(data, self._unfinished())
        if sequence is not None:
            assert self.scheduler.abort(sequence.key) is sequence
            assert self.scheduler.abort(sequence.key) is None

    @rule(data=st.data())
    def abort_and_reuse_the_key(self, data):
        sequence = self._pick(data, self._unfinished())
        if sequence is not None and sequence.num_output_tokens == 0:
            self.scheduler.abort(sequence.key)
            again = self.server.child_of(sequence, 0)
            again.key = sequence.key
            self.scheduler.submit(again)
            self.submitted.append(again)

    @rule(data=st.data())
    def preempt(self, data):
        running = [one for one in self._unfinished() if one.status is Status.RUNNING]
        sequence = self._pick(data, running)
        if sequence is not None:
            self.scheduler.preempt(sequence)

    @rule(data=st.data())
    def finish(self, data):
        sequence = self._pick(data, self._unfinished())
        if sequence is not None:
            self.scheduler.finish(sequence)

    @precondition(lambda self: self.plan is None)
    @rule(data=st.data())
    def fork_at_any_time(self, data):
        """Fork without a first token, from a parent in any state."""
        parents = [one for one in self.submitted if one.key[2] == 0]
        parent = self._pick(data, parents)
        if parent is not None:
            child = self.server.child_of(parent, 100 + len(self.submitted))
            self.scheduler.fork(parent, child)
            self.submitted.append(child)

    @invariant()
    def is_consistent(self):
        self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "server"):
            return
        if self.plan is not None:
            self.server.land(self.plan)
        # Choices not yet forked included, each may run alone and in chunks of one token.
        num_choices = 4 * (1 + self.scheduler.num_unfinished)
        self.server.run(max_steps=2 * MAX_MODEL_LEN * num_choices)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.num_blocks_used == 0
        for sequence in self.submitted:
            self.server.check_output(sequence)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
