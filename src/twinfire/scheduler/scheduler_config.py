"""The limits that a scheduler works under, checked once when they are stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from twinfire.cache.kv_group import BLOCK_SIZE

Policy = Literal["fair", "fcfs", "priority"]

_BLOCKS_PER_WATERMARK_BLOCK = 100


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker. ValueError, naming field and limit, when they contradict each other."""

    num_blocks: int
    """KV blocks that exist."""
    max_model_len: int
    """Tokens, prompt and output together, that a sequence may have."""
    block_size: int = BLOCK_SIZE
    """Tokens in a block, for hashing and for memory alike."""
    max_num_seqs: int = 256
    """Sequences running at once."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in a step; at least `max_num_seqs`, so that no decode ever skips one."""
    long_prefill_threshold: int | None = None
    """Prompt tokens of one sequence computed in a step; None leaves only the step's own budget."""
    max_prompt_tokens_beside_streams: int | None = None
    """Prompt tokens of all sequences in a step that has a stream's next token; None: no limit."""
    watermark_blocks: int | None = None
    """Blocks that admission leaves for running sequences to grow into; None is 1 % of all."""
    policy: Policy = "fair"
    """Whose prompt goes first: who has waited longest for its length (`PromptTurn`), the earliest
    arrival, or the lowest `priority` and then the earliest."""
    enable_prefix_cache: bool = True
    """Whether computed blocks are found again by their content."""
    num_lookahead_tokens: int = 0
    """Room that a drafter wants after what a step computes, given where blocks are to spare."""
    hash_seed: bytes = b""
    """Shared by the workers that exchange block hashes; empty draws one at random."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "long_prefill_threshold",
            "max_prompt_tokens_beside_streams",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.watermark_blocks is not None and self.watermark_blocks < 0:
            raise ValueError(f"watermark_blocks is {self.watermark_blocks}; it must be at least 0")
        if self.num_lookahead_tokens < 0:
            raise ValueError(
                f"num_lookahead_tokens is {self.num_lookahead_tokens}; it must be at least 0"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(
                f"policy is {self.policy!r}; it must be one of {', '.join(get_args(Policy))}"
            )

    @property
    def watermark(self) -> int:
        """`watermark_blocks`, resolved."""
        if self.watermark_blocks is not None:
            return self.watermark_blocks
        return self.num_blocks // _BLOCKS_PER_WATERMARK_BLOCK

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
