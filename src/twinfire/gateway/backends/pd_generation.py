"""One request over a cluster: whatever happens to workers, its consumer sees one stream.

Each token is recorded as it passes, so that a choice can go on elsewhere exactly where it stopped:
sampling depends on seed, choice and position alone. Owns the branches and the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from twinfire.cache.block_hash import cache_extra_key
from twinfire.gateway.backends.attempt import Attempt, Failure
from twinfire.gateway.backends.backend import Event, Take
from twinfire.gateway.backends.branch import Blame, Branch
from twinfire.gateway.backends.cluster_pool import ClusterPool
from twinfire.gateway.backends.cluster_request import ClusterRequest
from twinfire.gateway.backends.generation import LinkGeneration
from twinfire.gateway.backends.route_record import FirstTokenTimes, RouteRecord
from twinfire.gateway.routing.route import Route
from twinfire.protocol.errors import InvalidRequest, Overloaded, WorkerLost
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    Fingerprint,
    Preempted,
    PromptDone,
)

HAND_OVER_TOKENS = 512
"""A preempted choice with fewer tokens to compute anew stays where it is."""
MAX_HAND_OVERS = 4
"""Per request: workers that are short of room everywhere must not pass it around for ever."""


class PdGeneration:
    """A `Generation`. Belongs to the event loop's thread."""

    def __init__(self, pool: ClusterPool, request: ClusterRequest) -> None:
        self.record = RouteRecord()
        self.fingerprint: Fingerprint | None = None
        """What the worker of the first output computes."""
        self.has_prompt = False
        """Whether the consumer has been told that the prompt is done."""
        self._pool = pool
        self._request = request
        self._buffer = LinkGeneration(request.sampling.n, self._cancelled)
        self._branches: dict[int, Branch] = {}
        """By choice; those that have ended are absent."""
        self._submitted_s = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None
        if request.context.deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_at(request.context.deadline_s, self._expire)
        self._pursue(range(request.sampling.n), Blame())

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate the events, once."""
        return aiter(self._buffer)

    def offer_to(self, take: Take) -> None:
        """Let `take` have each event before it is kept, whenever none is kept."""
        self._buffer.offer_to(take)

    def cancel(self, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of them, whatever they are at."""
        self._buffer.cancel(choice)

    def take_prompt(self, attempt: Attempt, event: PromptDone) -> None:
        """The decode worker has accepted the request: from here on it is answered."""
        self._observe_transfer(attempt, event)
        if self.has_prompt:
            return
        self.has_prompt = True
        self.fingerprint = attempt.decode.info.fingerprint
        self._record_first_token(attempt, event)
        self._buffer.put(event)

    def take_delta(self, event: ChoiceDelta) -> None:
        """Record what a choice gained, and pass it on."""
        self._request.outputs[event.choice].extend(event.tokens)
        if event.finish_reason is not None:
            self._forget(event.choice)
        self._buffer.put(event)

    def take_preemption(self, attempt: Attempt, event: Preempted) -> None:
        """Hand a choice over anew if computing it again would hold up the decode worker."""
        self._pool.tallies.num_preemptions += 1
        branch = self._branches.get(event.choice)
        if branch is None or event.num_tokens <= HAND_OVER_TOKENS:
            return
        if self.record.num_hand_overs >= MAX_HAND_OVERS:
            return
        route = self._route_anew(branch, event.choice)
        if route is None:
            return
        self.record.num_hand_overs += 1
        self._pool.tallies.num_hand_overs += 1
        blame = branch.blame.copy()
        branch.cancel_choice(event.choice, is_complete=False)
        self._pursue([event.choice], blame, route)

    def attempt_begins(self, branch: Branch) -> None:
        """Count a try."""
        self.record.num_attempts += 1
        self._pool.tallies.num_attempts += 1

    def attempt_failed(self, branch: Branch, failure: Failure) -> None:
        """Count a failure, and the choices that go on elsewhere after it."""
        self._pool.tallies.failures[failure.kind] += 1
        if self.has_prompt:
            self.record.num_resumes += len(branch.live)
            self._pool.tallies.num_resumes += len(branch.live)

    def split(self, branch: Branch) -> None:
        """Pursue each choice of a branch by itself."""
        for choice in sorted(branch.live):
            self._pursue([choice], branch.blame.copy())

    def branch_failed(self, branch: Branch, error: Exception) -> None:
        """End the whole request with what one of its choices failed of."""
        self._end_branches()
        self._buffer.fail(error)

    def _pursue(self, choices: range | list[int], blame: Blame, route: Route | None = None) -> None:
        branch = Branch(self, self._pool, self._request, choices, blame, route)
        for choice in choices:
            self._branches[choice] = branch

    def _cancelled(self, choice: int) -> None:
        if choice == ALL_CHOICES:
            self._end_branches()
            return
        branch = self._branches.get(choice)
        self._forget(choice)
        if branch is not None:
            # A single choice is stopped because its text is complete.
            branch.cancel_choice(choice, is_complete=True)

    def _forget(self, choice: int) -> None:
        branch = self._branches.pop(choice, None)
        if branch is not None:
            branch.live.discard(choice)
        if not self._branches:
            self._forget_deadline()

    def _end_branches(self) -> None:
        branches = set(self._branches.values())
        self._branches.clear()
        self._forget_deadline()
        for branch in branches:
            branch.abandon()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        waits_for_first = not self.record.num_attempts
        if waits_for_first and any(branch.is_queued for branch in self._branches.values()):
            # The queue ends it, and can say when to come back.
            return
        self._pool.tallies.failures["deadline"] += 1
        self._buffer.expire()

    def _route_anew(self, branch: Branch, choice: int) -> Route | None:
        """Return a route by way of a prefill worker, None where there is none to be had now."""
        request, chain = self._request, self._pool.chain()
        hashes: list[bytes] = []
        if chain is not None:
            extra = cache_extra_key(salt=request.cache_salt)
            chain.extend(hashes, request.tokens_so_far([choice]), extra)
        asked = branch.route_request(None, [choice], hashes, branch.blame.all_blamed)
        with contextlib.suppress(WorkerLost, Overloaded, InvalidRequest):
            route = self._pool.router.route(asked)
            if route.prefill is not None:
                return route
            route.charge.release(finished=False)
        return None

    def _record_first_token(self, attempt: Attempt, event: PromptDone) -> None:
        record, hand_off = self.record, event.hand_off
        record.decode = attempt.decode.instance_id
        record.prefill = attempt.prefill.instance_id if attempt.prefill else None
        record.reason = attempt.reason
        record.cached_tokens = event.cached_tokens
        record.pulled_tokens = event.pulled_tokens
        record.hand_off = hand_off
        self._pool.tallies.pulled_tokens += event.pulled_tokens
        branch = next(iter(self._branches.values()), None)
        queue_s = branch.queue_s if branch is not None else 0.0
        reserve_s = min(hand_off.reserve_wait_s, event.queue_s) if hand_off else 0.0
        accept_s = hand_off.accept_s if hand_off else 0.0
        transfer_s = hand_off.transfer_s if hand_off else 0.0
        now_s = time.monotonic()
        at_workers_s = event.queue_s + event.prefill_s + transfer_s + accept_s
        record.first_token = FirstTokenTimes(
            gateway_queue_s=queue_s,
            lost_s=attempt.sent_s - self._submitted_s - queue_s,
            prefill_queue_s=event.queue_s - reserve_s,
            prefill_s=event.prefill_s,
            transfer_s=transfer_s,
            decode_queue_s=reserve_s + accept_s,
            first_decode_s=now_s - attempt.sent_s - at_workers_s,
        )

    def _observe_transfer(self, attempt: Attempt, event: PromptDone) -> None:
        hand_off = event.hand_off
        if hand_off is None or attempt.prefill is None:
            return
        self._pool.hand_overs.succeeded(attempt.prefill.instance_id, attempt.decode.instance_id)
        tallies = self._pool.tallies
        tallies.num_hand_offs += 1
        tallies.moved_blocks += hand_off.num_blocks
        tallies.moved_bytes += hand_off.num_bytes
        tallies.transfer_s += hand_off.transfer_s
        info = attempt.decode.info
        in_one_step = hand_off.num_blocks * info.block_size <= info.max_num_batched_tokens
        if in_one_step and hand_off.num_bytes and hand_off.transfer_s > 0:
            # Of longer prompts most has moved before it is measured.
            self._pool.router.observe_transfer(hand_off.num_bytes, hand_off.transfer_s)
