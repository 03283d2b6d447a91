"""Two engines, one of which computes prompts for the other, without the processes between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from support.engines import Collector
from twinfire.engine.engine import Engine
from twinfire.engine.hand_off import BlocksComputed, HandOffEnded, PromptComputed, Reservation
from twinfire.engine.runner import Runner
from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.messages import HandOff, Peer, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids

GATEWAY = "g"
DECODE = HandOff(Peer("d", "unix:/d"))


@dataclass
class Transfer:
    """One hand-off under way."""

    reservation: Reservation
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By index in the prompt: block of the prefill engine and its generation."""
    moved: int = 0


class TwoEngines:
    """`collector` holds what the decode engine's gateway heard."""

    def __init__(self, make: Callable[[], tuple[Engine, Runner]]) -> None:
        self.prefill, self.prefill_runner = make()
        self.decode, self.decode_runner = make()
        self.collector = Collector(self.decode)
        self.transfers: dict[HandOffKey, Transfer] = {}
        self.ended: list[HandOffEnded] = []
        self.num_computed_on_prefill = 0
        self.num_prompt_tokens_on_decode = 0

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
            content = self.prefill_runner.export_blocks([block_id])
            self.decode_runner.import_blocks([reservation.block_ids[index]], content)
        self.num_computed_on_prefill += event.prompt.computed_tokens
        output = self.decode.adopt(event.key, event.prompt, event.first)
        self.prefill.release_hold(event.key)
        self._heard(output)

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
