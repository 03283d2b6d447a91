"""One choice of one request, as the scheduler sees it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from twinfire.scheduler.prompt_turn import PromptTurn


class Status(Enum):
    """Where a sequence is. Preempted sequences are WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    """Holds blocks for a prompt that somebody else computes."""
    READY = "ready"
    """Holds blocks with a computed prompt and waits for a place to run."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and KV of one choice.

    `tokens` is prompt + output. A sequence needs work while `num_computed_tokens < num_tokens`:
    prompt chunks, decoding, cache hits and resumption after preemption are all this one case.
    """

    key: tuple[str, int, int]
    """(gateway id, request id, choice): unique among live sequences."""
    tokens: array[int]
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt plus the output that the request may reach; bounds the blocks it can ever need."""
    priority: int = 0
    cache_extra: bytes = b""
    """Tagged extra key of the block hashes (tenant salt, adapter)."""
    read_prefix_cache: bool = True

    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the full blocks of `tokens`, extended as they fill; survives preemption."""
    run_epoch: int = 0
    """Raised by preemption and abort; results of an older epoch are dropped."""
    drafts: tuple[int, ...] = ()
    """Guesses at what comes after `tokens`, for the next step alone; dropped where no room is."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    num_preemptions: int = 0
    arrival: int = 0
    """Order of submission, set by the scheduler."""
    turn: PromptTurn | None = None
    """Since when it waits, and for how many tokens; set by the scheduler where nobody has."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt_tokens
