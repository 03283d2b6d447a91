"""Who runs and who waits to: places, ranks, turns, and the blocks that have been promised."""

from __future__ import annotations

from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.prompt_turn import PromptClock
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence, Status
from twinfire.scheduler.waiting_queue import Rank, WaitingQueue, rank_of, turn_of


class LineUp:
    """Sequences that run, in the order of admission, and those that wait."""

    def __init__(self, config: SchedulerConfig, tables: BlockTables, clock: PromptClock) -> None:
        self._config = config
        self._tables = tables
        # A dict with no values: a set that keeps its order.
        self.running: dict[Sequence, None] = {}
        self.waiting = WaitingQueue(config.policy, clock)
        self.num_preemptions = 0
        """Since the start."""

    def has_place(self, num_promised: int = 0) -> bool:
        """Return whether one more may run beside those that run and so many others."""
        return len(self.running) + num_promised < self._config.max_num_seqs

    def run(self, sequence: Sequence) -> None:
        """Let a sequence run that is nowhere else."""
        sequence.status = Status.RUNNING
        self.running[sequence] = None

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, without its blocks."""
        assert sequence.status is Status.RUNNING, f"{sequence.key} is not running"
        del self.running[sequence]
        sequence.status = Status.WAITING
        sequence.run_epoch += 1
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._tables.release(sequence)
        self.waiting.push(sequence)

    def rank(self, sequence: Sequence) -> Rank:
        """Return a sequence's place among those that hold blocks: lower is preempted later."""
        return rank_of(sequence, self._config.policy)

    def turn(self, sequence: Sequence) -> Rank:
        """Return a sequence's place among prompts now: lower is computed earlier."""
        return turn_of(sequence, self._config.policy)

    def num_blocks_promised(self) -> int:
        """Return the blocks that running sequences still lack for the prompts they have begun."""
        return sum(self._tables.num_missing(sequence) for sequence in self.running)

    def watermark(self) -> int:
        """Return the blocks to leave free when another begins."""
        # Whatever was accepted can run alone.
        return self._config.watermark if self.running else 0
