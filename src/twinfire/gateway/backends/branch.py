"""Some choices of a request, pursued through as many tries as it takes.

A request begins as one branch. Once there is output, each choice that has to go on elsewhere is a
branch of its own, because its context is its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinfire.gateway.backends.attempt import Attempt, AttemptOwner, Failure
from twinfire.gateway.backends.cluster_pool import ClusterPool
from twinfire.gateway.backends.cluster_request import ClusterRequest
from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.routing.route import NoWorker, Route, RouteRequest
from twinfire.protocol.errors import InvalidRequest, WorkerLost
from twinfire.protocol.messages import Fingerprint, PrefixPull

MAX_ATTEMPTS = 3
RESUME_PRIORITY_STEPS = 100
"""By which a request whose client has output already goes before others in the queue."""


class BranchOwner(AttemptOwner, Protocol):
    """The request that a branch belongs to."""

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the worker of its first output computes; None before, or where it does not say."""
        ...

    @property
    def has_prompt(self) -> bool:
        """Whether its consumer has been told that the prompt is done."""
        ...

    def attempt_begins(self, branch: Branch) -> None:
        """A try is sent."""
        ...

    def attempt_failed(self, branch: Branch, failure: Failure) -> None:
        """A try ended without success."""
        ...

    def split(self, branch: Branch) -> None:
        """Pursue each choice of a branch by itself; the branch ends."""
        ...

    def branch_failed(self, branch: Branch, error: Exception) -> None:
        """The branch is given up."""
        ...


@dataclass(slots=True)
class Blame:
    """Workers that have failed a branch."""

    num_failures: int = 0
    unfit: frozenset[PoolMember] = frozenset()
    """They refused or were lost; a worker that has joined again is another member."""
    bad_at_hand_over: frozenset[PoolMember] = frozenset()
    """They could not hand a prompt over, but may do all of the request themselves."""

    @property
    def all_blamed(self) -> frozenset[PoolMember]:
        """Whoever has failed in any way."""
        return self.unfit | self.bad_at_hand_over

    def learn(self, failure: Failure) -> None:
        """Count one more."""
        self.num_failures += 1
        if failure.kind == "hand_off":
            self.bad_at_hand_over |= {failure.worker}
        else:
            self.unfit |= {failure.worker}

    def copy(self) -> Blame:
        """Return an independent one."""
        return Blame(self.num_failures, self.unfit, self.bad_at_hand_over)


class Branch:
    """Runs on a task of its own, which sleeps while a try is under way."""

    def __init__(
        self,
        owner: BranchOwner,
        pool: ClusterPool,
        request: ClusterRequest,
        choices: Iterable[int],
        blame: Blame,
        route: Route | None = None,
    ) -> None:
        """`route` is that of the first try, where it has been chosen already."""
        self.live = set(choices)
        """Choices that have not ended."""
        self.attempt: Attempt | None = None
        self.blame = blame
        self.queue_s = 0.0
        """Spent in the gateway before tries."""
        self._owner = owner
        self._pool = pool
        self._request = request
        self._route = route
        self._last_error: Exception | None = None
        self._idle_since_s = time.monotonic()
        self._task = asyncio.create_task(self._run())

    @property
    def is_queued(self) -> bool:
        """Whether no worker has it now."""
        return self.attempt is None

    def cancel_choice(self, choice: int, *, is_complete: bool) -> None:
        """Stop one choice; `is_complete` when its client has all that it wanted of it."""
        self.live.discard(choice)
        if self.attempt is not None:
            self.attempt.cancel_choice(choice, is_complete=is_complete)
        elif not self.live:
            self.abandon()

    def abandon(self) -> None:
        """Stop all of it at once."""
        self.live.clear()
        if self.attempt is not None:
            self.attempt.abandon()
        if self._route is not None:
            self._route.charge.release(finished=False)
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._pursue()
        except Exception as error:
            self._owner.branch_failed(self, error)

    async def _pursue(self) -> None:
        while self.live:
            attempt = await self._begin()
            if attempt is None:
                continue
            failure = await attempt.ended
            self.attempt = None
            self._idle_since_s = time.monotonic()
            if failure is None or not self.live:
                return
            if failure.kind == "hand_off" and attempt.prefill is not None:
                pair = attempt.prefill.instance_id, attempt.decode.instance_id
                self._pool.hand_overs.failed(*pair)
            self._owner.attempt_failed(self, failure)
            self._last_error = failure.error
            self.blame.learn(failure)
            if failure.is_final or self.blame.num_failures >= MAX_ATTEMPTS:
                raise failure.error
            if len(self.live) > 1 and self._request.num_output_tokens(sorted(self.live)):
                self._owner.split(self)
                return

    async def _begin(self) -> Attempt | None:
        """Choose workers and send; None when one of them has just left."""
        request_id = self._pool.next_request_id()
        route, self._route = self._route, None
        if route is None:
            route = await self._choose(request_id)
        decode = self._pool.registry.get(route.decode)
        prefill = self._pool.registry.get(route.prefill) if route.prefill else None
        if decode is None or (prefill is None and route.prefill is not None):
            route.charge.release(finished=False)
            return None
        try:
            self._check_same_model(decode.info.fingerprint)
        except WorkerLost:
            route.charge.release(finished=False)
            raise
        pull = self._pull(route)
        if prefill is not None and not self._can_hand_over(prefill, decode):
            # The decode worker does all of it; what the other one was to pull may be its own.
            prefill = pull = None
        attempt = Attempt(self._owner, route, decode, prefill, self.live)
        self.attempt = attempt
        self.queue_s += time.monotonic() - self._idle_since_s
        self._owner.attempt_begins(self)
        submit = self._request.submit(
            request_id,
            self.blame.num_failures,
            sorted(self.live),
            self._timeout_s(),
            resumes=self._owner.has_prompt,
        )
        attempt.start(submit, pull)
        return attempt

    async def _choose(self, request_id: int) -> Route:
        """Return a route, without whoever failed while there is anybody else."""
        hashes = await self._pool.block_hashes(self._request, sorted(self.live))
        blame = self.blame
        try:
            return await self._enter(request_id, hashes, blame.all_blamed)
        except NoWorker:
            if not blame.bad_at_hand_over:
                raise self._last_error or WorkerLost("no worker can take this request") from None
        try:
            return await self._enter(request_id, hashes, blame.unfit)
        except NoWorker:
            assert self._last_error is not None, "a worker was blamed without a fault"
            raise self._last_error from None

    async def _enter(
        self, request_id: int, hashes: list[bytes], exclude: frozenset[PoolMember]
    ) -> Route:
        context = self._request.context
        is_first = not self.blame.num_failures
        try:
            return await self._pool.admission.enter(
                self.route_request(request_id, sorted(self.live), hashes, exclude),
                # What has been tried before ends at its deadline as such, not as too much work.
                context.deadline_s if is_first else None,
                reject_if_busy=context.reject_if_busy and is_first,
            )
        except InvalidRequest as error:
            if not self._owner.has_prompt:
                raise
            raise WorkerLost(f"no worker that is left can go on: {error}") from None

    def route_request(
        self,
        request_id: int | None,
        choices: Sequence[int],
        hashes: Sequence[bytes],
        exclude: frozenset[PoolMember],
    ) -> RouteRequest:
        """Return what the router is asked for the next try of some of the choices."""
        request = self._request
        # Those that have left cannot be chosen, and nobody is excluded for having been here.
        present = (one for one in exclude if self._pool.registry.get(one.instance_id) is one)
        has_prompt = self._owner.has_prompt
        return RouteRequest(
            num_prompt_tokens=len(request.prompt),
            block_hashes=hashes,
            max_tokens=request.sampling.max_tokens,
            num_output_tokens=request.num_output_tokens(choices),
            affinity=request.context.affinity,
            exclude=frozenset(one.instance_id for one in present),
            priority=request.priority - (RESUME_PRIORITY_STEPS if has_prompt else 0),
            pd_policy=request.context.pd_policy,
            num_choices=len(choices),
            request_id=request_id,
        )

    def _check_same_model(self, fingerprint: Fingerprint | None) -> None:
        before = self._owner.fingerprint
        if before is not None and (fingerprint is None or not fingerprint.matches(before)):
            raise WorkerLost("the workers that are left compute another version of the model")

    def _can_hand_over(self, prefill: PoolMember, decode: PoolMember) -> bool:
        if prefill.info.peer is None or decode.info.peer is None:
            return False
        return self._pool.hand_overs.may_try(prefill.instance_id, decode.instance_id)

    def _timeout_s(self) -> float | None:
        deadline_s = self._request.context.deadline_s
        if deadline_s is None:
            return None
        return max(deadline_s - asyncio.get_running_loop().time(), 0.0)

    def _pull(self, route: Route) -> PrefixPull | None:
        if route.pull is None:
            return None
        holder = self._pool.registry.get(route.pull.holder)
        if holder is None or holder.info.peer is None:
            return None
        return PrefixPull(holder.info.peer, route.pull.num_blocks)
