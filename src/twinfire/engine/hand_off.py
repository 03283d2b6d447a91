"""What an engine tells and is told of hand-offs between workers; values only, no sockets.

On the prefill side a request with `Submit.hand_off` computes its prompt, draws the first token of
every choice and stops: its blocks stay pinned as a `Hold` until `Engine.release_hold`. On the
decode side `Engine.reserve` takes blocks for a prompt, somebody fills them, and `Engine.adopt`
turns them into running choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import ChoiceDelta, PromptDone
from twinfire.protocol.peer_messages import HandOffKey


@dataclass(frozen=True, slots=True)
class BlocksComputed:
    """Blocks of a prompt that others may read from now on, in the order of the prompt.

    Reported for full blocks after each step, cached ones first, and for the partly filled last one
    with the end. Begins again at block 0 when the prompt was preempted.
    """

    key: HandOffKey
    first_block: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The prompt is done; every block has been reported and stays pinned."""

    key: HandOffKey
    num_prompt_blocks: int
    prompt: PromptDone
    first: tuple[ChoiceDelta, ...]
    """One per choice, with what ended it where its first token did."""
    draft_feature: bytes = b""
    """As `Commit.draft_feature`."""


@dataclass(frozen=True, slots=True)
class HandOffEnded:
    """The request was cancelled or ended by a fault before its prompt was done."""

    key: HandOffKey
    reason: str
    refusal: InvalidRequest | None = None
    """What of the request itself is wrong, where that ended it: it must not be tried again."""


HandOffEvent = BlocksComputed | PromptComputed | HandOffEnded


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for a prompt that another worker computes."""

    key: HandOffKey
    block_ids: tuple[int, ...]
    """Of the whole prompt, the partly filled last one included."""
    num_cached_blocks: int
    """Leading ones that are filled already."""


@dataclass(frozen=True, slots=True)
class PrefixImport:
    """Blocks taken for a prefix that another worker holds; unknown to the cache until finished."""

    import_id: int
    first_block: int
    """Index in the prefix of the first one that is missing here."""
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockHold:
    """Cached blocks pinned for another worker to read."""

    hold_id: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
