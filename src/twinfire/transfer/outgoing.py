"""One hand-off on the prefill side: what is known of it and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from twinfire.protocol.messages import Peer, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.tokens import count_ids
from twinfire.scheduler.prompt_turn import PromptTurn


class Stage(Enum):
    """Where an outgoing hand-off is."""

    QUEUED = auto()
    OPEN = auto()
    """The decode worker is asked for blocks."""
    COMPUTING = auto()
    COMMITTED = auto()


@dataclass(slots=True)
class Outgoing:
    """`peer` is the decode worker."""

    key: HandOffKey
    submit: Submit
    peer: Peer
    deadline_s: float | None
    num_uncached: int
    """Tokens that are to be computed."""
    turn: PromptTurn
    stage: Stage = Stage.QUEUED
    opened_s: float = 0.0
    block_ids: dict[int, int] = field(default_factory=dict)
    """By index in the prompt, those that have been announced."""
    cancelled_choices: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the decode worker knows of it."""
        return self.stage is not Stage.QUEUED

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return count_ids(self.submit.prompt)
