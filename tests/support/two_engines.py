"""Two engines, one of which computes prompts for the other, without the processes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from support.engines import Collector
from support.mock_runner import MockRunner
from support.wire_blocks import exported
from twinfire.cache.kv_group import KvLayout, WireBuffer, WireBytes
from twinfire.engine.draft_runner import DraftRunner
from twinfire.engine.engine import Engine
from twinfire.engine.hand_off import BlocksComputed, HandOffEnded, PromptComputed, Reservation
from twinfire.engine.runner import Runner
from twinfire.engine.sampler import Sampler
from twinfire.engine.step_report import GatewayOutput
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.kernels.step_batch import StepBatch
from twinfire.protocol.messages import HandOff, Peer, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.speculation import parse_speculation
from twinfire.protocol.tokens import pack_ids
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.transfer.shared_blocks import SharedBlocks
from twinfire.worker.kv_memory import WorkerKvMemory
from twinfire.worker.speculation import build_speculator, num_lookahead_tokens

GATEWAY = "g"
DECODE = HandOff(Peer("d", "unix:/d"))


class CountedRunner:
    """A real runner that says how many tokens it has computed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_tokens_computed = 0

    @property
    def draft(self) -> DraftRunner | None:
        return self._runner.draft

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def kv_layout(self) -> KvLayout:
        return self._runner.kv_layout

    @property
    def weight_bytes(self) -> int:
        return self._runner.weight_bytes

    def init_kv(self, num_blocks: int) -> None:
        self._runner.init_kv(num_blocks)

    def populate_kv(self, first: int, count: int) -> None:
        self._runner.populate_kv(first, count)

    def execute(self, batch: StepBatch) -> None:
        self.num_tokens_computed += batch.num_tokens
        self._runner.execute(batch)

    def logits(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        return self._runner.logits(start, stop)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        self._runner.export_blocks(block_ids, into)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        self._runner.import_blocks(block_ids, content)


def real_engine(
    runner: Runner,
    sampling_ops: SamplingOps,
    *,
    num_blocks: int = 64,
    num_batched_tokens: int = 48,
    max_num_seqs: int = 8,
    max_model_len: int = 256,
    speculate: str = "off",
) -> tuple[Engine, CountedRunner]:
    """Return an engine over a runner that has no KV memory yet, and its head where one drafts."""
    counted = CountedRunner(runner)
    counted.init_kv(num_blocks)
    options = parse_speculation(speculate)
    speculator = build_speculator(options, counted, sampling_ops, num_blocks)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        num_lookahead_tokens=num_lookahead_tokens(options),
    )
    sampler = Sampler(sampling_ops)
    return Engine(Scheduler(config), counted, sampler, speculator=speculator), counted


@dataclass
class Transfer:
    """One hand-off under way."""

    reservation: Reservation
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By index in the prompt: block of the prefill engine and its generation."""


class TwoEngines:
    """`collector` holds what the decode engine's gateway heard.

    `drafts` names the heads of prefill and decode engine, as a fingerprint does.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Engine, CountedRunner | MockRunner]],
        drafts: tuple[str, str] = ("", ""),
    ) -> None:
        self.prefill, self.prefill_runner = make()
        self.decode, self.decode_runner = make()
        self._drafts = drafts
        self.collector = Collector(self.decode)
        self.transfers: dict[HandOffKey, Transfer] = {}
        self.ended: list[HandOffEnded] = []
        self.num_blocks_moved = 0

    def submit(
        self, request_id: int, prompt: list[int], sampling: SamplingParams, **more: object
    ) -> bool:
        """Reserve on one and submit to the other; False when there is no room now."""
        message = Submit(
            request_id,
            pack_ids(prompt),
            sampling,
            hand_off=DECODE,
            **more,  # type: ignore[arg-type]
        )
        reservation = self.decode.reserve(GATEWAY, message)
        if reservation is None:
            return False
        self.transfers[reservation.key] = Transfer(reservation)
        self.prefill.submit(GATEWAY, message)
        return True

    def step(self) -> None:
        """One step of each that has work, then whatever can be moved."""
        if self.prefill.has_work:
            for output in self.prefill.step().values():
                assert output.deltas == [], "tokens came from the prefill side"
        self.move()
        if self.decode.has_work:
            self.collector.step()
        self.check()

    def move(self) -> None:
        for event in self.prefill.take_hand_off_events():
            match event:
                case BlocksComputed(key, first, block_ids, generations):
                    blocks = self.transfers[key].blocks
                    for offset, block in enumerate(zip(block_ids, generations, strict=True)):
                        blocks[first + offset] = block
                case PromptComputed():
                    self._adopt(event)
                case HandOffEnded(key):
                    self.ended.append(event)
                    self.decode.release_reservation(key)
                    del self.transfers[key]

    def _adopt(self, event: PromptComputed) -> None:
        transfer = self.transfers.pop(event.key)
        reservation = transfer.reservation
        assert sorted(transfer.blocks) == list(range(event.num_prompt_blocks))
        assert len(reservation.block_ids) == event.num_prompt_blocks
        for index in range(reservation.num_cached_blocks, event.num_prompt_blocks):
            block_id, generation = transfer.blocks[index]
            assert self.prefill.block_generation(block_id) == generation, "a block was reused"
            self._move_block(block_id, reservation.block_ids[index])
        self.num_blocks_moved += event.num_prompt_blocks - reservation.num_cached_blocks
        has_draft_kv = self._drafts[0] == self._drafts[1]
        output = self.decode.adopt(
            event.key,
            event.prompt,
            event.first,
            has_draft_kv=has_draft_kv,
            draft_feature=self.carry(event.draft_feature),
        )
        self.prefill.release_hold(event.key)
        self._heard(output)

    def _move_block(self, remote_id: int, local_id: int) -> None:
        if self._drafts[0] == self._drafts[1]:
            content = exported(self.prefill_runner, [remote_id])
            self.decode_runner.import_blocks([local_id], content)
            return
        prefill, decode = (
            WorkerKvMemory(runner, local_id + remote_id + 1, engine.block_generation, draft)
            for runner, engine, draft in (
                (self.prefill_runner, self.prefill, self._drafts[0]),
                (self.decode_runner, self.decode, self._drafts[1]),
            )
        )
        sent = SharedBlocks(prefill, decode.draft)
        wire = bytearray(sent.bytes_per_block)
        sent.export_blocks([remote_id], wire)
        SharedBlocks(decode, prefill.draft).import_blocks([local_id], wire)

    def carry(self, draft_feature: bytes) -> bytes:
        """Return what arrives of a draft feature."""
        return draft_feature

    def _heard(self, output: GatewayOutput) -> None:
        self.collector.heard(GATEWAY, output)

    def check(self) -> None:
        self.prefill.check_integrity()
        self.decode.check_integrity()

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left; then nothing may be held."""
        for _ in range(max_steps):
            if not (self.prefill.has_work or self.decode.has_work or self.transfers):
                break
            self.step()
        else:
            raise AssertionError(f"requests unfinished after {max_steps} steps")
        for engine in (self.prefill, self.decode):
            assert engine.load().kv_blocks_used == 0
            assert not engine.holds_for_others
