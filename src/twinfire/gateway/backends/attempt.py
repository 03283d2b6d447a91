"""One try of some choices of a request, on one worker or two.

Owns the route's charge and the request on each link. The first leg to fail ends the try: the other
one is cancelled at once, never waited for. Frames of a try that is over find nobody to tell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twinfire.gateway.backends.backend import Event
from twinfire.gateway.backends.flow_tallies import FailureKind
from twinfire.gateway.backends.link_request import Notice
from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.routing.route import Route, RouteReason
from twinfire.protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, WorkerLost
from twinfire.protocol.messages import (
    ChoiceDelta,
    HandOff,
    HandOffFailed,
    Preempted,
    PrefillProgress,
    PrefixPull,
    PromptDone,
    Reserve,
    Reserved,
    Submit,
)
from twinfire.protocol.tokens import count_ids


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a try ended without success."""

    kind: FailureKind
    error: Exception
    worker: PoolMember
    """Who is to blame, and not to be asked again for this request as long as its link lasts."""

    @property
    def is_final(self) -> bool:
        """Whether another try would fail as well."""
        return self.kind in ("invalid", "deadline")


class AttemptOwner(Protocol):
    """Takes what a try brings."""

    def take_prompt(self, attempt: Attempt, event: PromptDone) -> None:
        """The decode worker has accepted the request."""
        ...

    def take_delta(self, event: ChoiceDelta) -> None:
        """A choice gained something."""
        ...

    def take_preemption(self, attempt: Attempt, event: Preempted) -> None:
        """A choice lost its blocks on the decode worker."""
        ...


class Attempt:
    """A try under way. It is also what the decode worker's link talks to."""

    def __init__(
        self,
        owner: AttemptOwner,
        route: Route,
        decode: PoolMember,
        prefill: PoolMember | None,
        choices: Iterable[int],
    ) -> None:
        self.ended: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        """What it failed of; None when every choice has ended or is not wanted any more."""
        self.route = route
        self.decode = decode
        self.prefill = prefill
        self.sent_s = 0.0
        """On the monotonic clock."""
        self._owner = owner
        self._live = set(choices)
        self._request_id = 0
        self._number = 0
        self._has_deadline = False
        self._prefill_is_open = False

    @property
    def reason(self) -> RouteReason:
        """Why the prompt is computed where it is."""
        fell_away = self.prefill is None and self.route.prefill is not None
        return "no_prefill_worker" if fell_away else self.route.reason

    def start(self, submit: Submit, pull: PrefixPull | None) -> None:
        """Send each leg what it has to do; `submit` is without hand-off and pull."""
        self._request_id, self._number = submit.request_id, submit.attempt
        self._has_deadline = submit.timeout_s is not None
        self.sent_s = time.monotonic()
        prefill = self.prefill
        try:
            if prefill is None:
                self.decode.link.send_request(msgspec.structs.replace(submit, pull=pull), self)
                return
            assert self.decode.info.peer is not None, "it was chosen to receive KV"
            self.decode.link.send_request(Reserve(submit, prefill.instance_id), self)
        except WorkerLost as error:
            self._fail(error, self.decode)
            return
        hand_off = HandOff(self.decode.info.peer, self.route.num_to_compute)
        self._prefill_is_open = True
        try:
            # The prediction is of use only where tokens are drafted.
            prefill.link.send_request(
                msgspec.structs.replace(submit, hand_off=hand_off, pull=pull, prediction=b""),
                _PrefillLeg(self),
            )
        except WorkerLost as error:
            self._fail(error, prefill)

    def cancel_choice(self, choice: int, *, is_complete: bool) -> None:
        """Stop one choice; the try is over with the last."""
        if choice not in self._live:
            return
        self._live.discard(choice)
        if not self._live:
            self._end(None, finished=is_complete)
            return
        self.decode.link.cancel(self._request_id, choice)
        if self.prefill is not None and self._prefill_is_open:
            self.prefill.link.cancel(self._request_id, choice)

    def abandon(self) -> None:
        """Stop all of it, whatever it is at."""
        self._live.clear()
        self._end(None, finished=False)

    def all_choices_ended(self) -> bool:
        """Whether the decode worker has nothing more to say."""
        return not self._live

    def put(self, event: Event) -> None:
        """The decode worker has accepted the request, or a choice has gained something."""
        if type(event) is ChoiceDelta:
            if event.choice not in self._live:
                return
            if event.finish_reason is not None:
                if event.finish_reason == "cancelled":
                    self._fail(WorkerLost("the worker gave the request up"), self.decode)
                    return
                self._live.discard(event.choice)
            self.route.charge.decode_tokens(count_ids(event.tokens))
            self._owner.take_delta(event)
            if not self._live and not self.ended.done():
                self.decode.link.forget(self._request_id)
                self._end(None, finished=True)
        elif isinstance(event, PromptDone) and not self.ended.done():
            if self.prefill is not None:
                self.prefill.link.forget(self._request_id)
                self._prefill_is_open = False
            self.route.charge.decode_started(event.cached_tokens)
            self._owner.take_prompt(self, event)

    def note(self, notice: Notice) -> None:
        """The decode worker says how it gets on."""
        match notice:
            case PrefillProgress(num_computed_tokens=num_computed):
                self.route.charge.prefill_progress(num_computed)
            case Reserved(attempt=number) if number == self._number:
                self.route.charge.decode_reserved()
            case HandOffFailed():
                self.fail_hand_off(notice)
            case Preempted(choice=choice) if choice in self._live:
                self._owner.take_preemption(self, notice)

    def fail(self, error: Exception) -> None:
        """The decode worker is lost or refuses."""
        self._fail(error, self.decode)

    def note_prefill(self, notice: Notice) -> None:
        """The prefill worker says how it gets on."""
        match notice:
            case PrefillProgress(num_computed_tokens=num_computed):
                self.route.charge.prefill_progress(num_computed)
            case HandOffFailed():
                self.fail_hand_off(notice)

    def fail_prefill(self, error: Exception) -> None:
        """The prefill worker is lost or refuses; after the commit nobody needs it."""
        if self.prefill is not None and self._prefill_is_open:
            self._fail(error, self.prefill)

    def fail_hand_off(self, notice: HandOffFailed) -> None:
        """The workers could not hand the prompt over; who computed it is not asked again."""
        if notice.attempt != self._number or self.prefill is None:
            return
        if not notice.retry and self._has_deadline:
            self._fail(DeadlineExceeded(notice.message), self.prefill)
        else:
            message = f"the prompt could not be handed over: {notice.message}"
            self._end(Failure("hand_off", WorkerLost(message), self.prefill))

    def _fail(self, error: Exception, worker: PoolMember) -> None:
        self._end(Failure(_kind(error, worker), error, worker))

    def _end(self, failure: Failure | None, *, finished: bool = False) -> None:
        if self.ended.done():
            return
        self.ended.set_result(failure)
        self._live.clear()
        self.decode.link.cancel(self._request_id)
        if self.prefill is not None:
            self.prefill.link.cancel(self._request_id)
        self.route.charge.release(finished=finished)


class _PrefillLeg:
    """What the prefill worker's link talks to."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def all_choices_ended(self) -> bool:
        """Its part ends with the commit, which the decode worker tells."""
        return False

    def put(self, event: Event) -> None:
        """First tokens come from the decode worker, once it has the blocks."""

    def note(self, notice: Notice) -> None:
        """Pass it on."""
        self._attempt.note_prefill(notice)

    def fail(self, error: Exception) -> None:
        """Pass it on."""
        self._attempt.fail_prefill(error)


def _kind(error: Exception, worker: PoolMember) -> FailureKind:
    if isinstance(error, InvalidRequest):
        return "invalid"
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    if isinstance(error, Overloaded):
        return "busy"
    return "refused" if worker.link.is_open else "worker_lost"
