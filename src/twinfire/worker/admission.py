"""How a request reaches the engine: at once, or after the prefix that another worker holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import ALL_CHOICES, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.scheduler.prompt_turn import PromptTurn
from twinfire.transfer.prefix_pull import PrefixPuller

Refused = Callable[[str, Submit, InvalidRequest], None]


class SubmitEngine(Protocol):
    """Where requests go."""

    @property
    def is_starved(self) -> bool:
        """Whether the last step computed nothing for want of blocks, though requests wait."""
        ...

    def turn(self, num_uncached: int) -> PromptTurn:
        """Return the turn of a prompt that comes now with so many tokens to compute."""
        ...

    def submit(
        self,
        gateway_id: str,
        message: Submit,
        *,
        pulled_blocks: int = 0,
        turn: PromptTurn | None = None,
    ) -> None:
        """Queue a request; InvalidRequest when it can never run here."""
        ...

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice, or all of them; unknown ids are ignored."""
        ...

    def release_hold(self, key: HandOffKey) -> None:
        """Unpin what was computed for a hand-off; unknown keys are ignored."""
        ...


class Admission:
    """Submits requests; `refused` hears of those that the engine does not take."""

    def __init__(self, engine: SubmitEngine, puller: PrefixPuller | None, refused: Refused) -> None:
        self._engine = engine
        self._puller = puller
        self._refused = refused
        self._cancelled_choices: dict[tuple[str, int], list[int]] = {}
        """Of requests whose prefix is on its way."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their prefix."""
        return len(self._cancelled_choices)

    def submit(self, gateway_id: str, submit: Submit, turn: PromptTurn | None = None) -> None:
        """Give a request to the engine, now or when its prefix has come.

        `turn` is the one that it has been waiting with.
        """
        pull = submit.pull
        # Who wants the prompt's own log-probabilities needs every token of it computed.
        if self._puller is None or pull is None or submit.sampling.prompt_logprobs >= 0:
            self._to_engine(gateway_id, submit, 0, turn)
            return
        self._cancelled_choices[gateway_id, submit.request_id] = []
        self._puller.begin(
            gateway_id, submit, pull, lambda num: self._to_engine(gateway_id, submit, num, turn)
        )

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of them, whether the engine has the request or not."""
        waiting = self._cancelled_choices.get((gateway_id, request_id))
        if waiting is None:
            self._engine.cancel(gateway_id, request_id, choice)
        elif choice == ALL_CHOICES:
            del self._cancelled_choices[gateway_id, request_id]
            assert self._puller is not None
            self._puller.cancel(gateway_id, request_id)
        else:
            waiting.append(choice)

    @property
    def is_starved(self) -> bool:
        """Whether the engine finds no blocks for what waits."""
        return self._engine.is_starved

    def turn(self, num_uncached: int) -> PromptTurn:
        """Return the turn of a prompt that comes now with so many tokens to compute."""
        return self._engine.turn(num_uncached)

    def release_hold(self, key: HandOffKey) -> None:
        """Unpin what was computed for a hand-off."""
        self._engine.release_hold(key)

    def gateway_lost(self, gateway_id: str) -> None:
        """Drop what waits for a prefix; the engine is told by others."""
        for owner, request_id in list(self._cancelled_choices):
            if owner == gateway_id:
                self.cancel(owner, request_id, ALL_CHOICES)

    def _to_engine(
        self, gateway_id: str, submit: Submit, num_pulled: int, turn: PromptTurn | None
    ) -> None:
        cancelled = self._cancelled_choices.pop((gateway_id, submit.request_id), [])
        try:
            self._engine.submit(gateway_id, submit, pulled_blocks=num_pulled, turn=turn)
        except InvalidRequest as error:
            self._refused(gateway_id, submit, error)
            return
        for choice in cancelled:
            self._engine.cancel(gateway_id, submit.request_id, choice)
