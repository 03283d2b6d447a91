"""Prompts that this engine computes for other workers: what can be read, and what stays pinned."""

from __future__ import annotations

from collections.abc import Iterable

from twinfire.engine.hand_off import (
    BlocksComputed,
    HandOffEnded,
    HandOffEvent,
    PromptComputed,
)
from twinfire.engine.request import Request
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import ChoiceDelta, PromptDone
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.scheduler.block_tables import BlockTables
from twinfire.scheduler.sequence import Sequence


class OutgoingPrompts:
    """Announces computed blocks in order and pins them once their prompt is done."""

    def __init__(self, tables: BlockTables, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._events: list[HandOffEvent] = []
        self._announced: dict[HandOffKey, tuple[int, int]] = {}
        # By key: the sequence's epoch and how many of its blocks have been announced in it.
        self._held: dict[HandOffKey, list[int]] = {}

    def __contains__(self, key: HandOffKey) -> bool:
        """Whether the prompt of this key is computed and pinned."""
        return key in self._held

    def take_events(self) -> list[HandOffEvent]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def computed(self, request: Request, sequence: Sequence, num_tokens: int) -> None:
        """Announce the full blocks among the first `num_tokens` tokens of a live sequence."""
        self._announce(request.key, sequence, num_tokens // self._block_size)

    def done(
        self,
        request: Request,
        sequence: Sequence,
        num_tokens: int,
        prompt: PromptDone,
        first: tuple[ChoiceDelta, ...],
        draft_feature: bytes = b"",
    ) -> None:
        """Announce the rest of a prompt of `num_tokens` tokens and pin all of its blocks."""
        num_blocks = -(-num_tokens // self._block_size)
        self._announce(request.key, sequence, num_blocks)
        blocks = sequence.block_ids[:num_blocks]
        self._tables.pin(blocks)
        self._held[request.key] = blocks
        self._announced.pop(request.key, None)
        self._events.append(PromptComputed(request.key, num_blocks, prompt, first, draft_feature))

    def ended(self, request: Request, reason: str, refusal: InvalidRequest | None = None) -> None:
        """A prompt will not be done, with `refusal` because of what its request asks for."""
        self._announced.pop(request.key, None)
        self._events.append(HandOffEnded(request.key, reason, refusal))

    def release(self, key: HandOffKey) -> None:
        """Unpin a prompt's blocks; unknown keys are ignored."""
        blocks = self._held.pop(key, None)
        if blocks is not None:
            self._tables.unpin(blocks)

    def _announce(self, key: HandOffKey, sequence: Sequence, stop: int) -> None:
        epoch, start = self._announced.get(key, (sequence.run_epoch, 0))
        if epoch != sequence.run_epoch:
            start = 0
        if stop > start:
            blocks = sequence.block_ids[start:stop]
            generations = self._generations(blocks)
            self._events.append(BlocksComputed(key, start, tuple(blocks), generations))
        self._announced[key] = sequence.run_epoch, max(start, stop)

    def _generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self._tables.pool.block_generation, block_ids))
