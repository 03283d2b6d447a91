"""The workers of one model's pool: who may join, who is there, who is lost.

Tells the router of everything. A worker that shows no life is cut off: its requests hear
WorkerLost and go elsewhere, and it may join again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import msgspec

from twinfire.gateway.backends.liveness import LivenessLimits
from twinfire.gateway.backends.pool_fit import unfit_reason
from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.backends.worker_link import WorkerLink
from twinfire.gateway.routing.router import Router
from twinfire.protocol.errors import InvalidRequest, TwinfireError
from twinfire.protocol.messages import (
    CacheEvents,
    DrainWorker,
    Fingerprint,
    Load,
    ResyncCache,
    Role,
    SetRole,
    WorkerInfo,
)

log = logging.getLogger(__name__)

_DEFAULT_LIMITS = LivenessLimits()


class JoinRefused(TwinfireError):
    """A worker does not belong into the pool; the message says why."""


class WorkerRegistry:
    """One pool. Belongs to the event loop's thread."""

    def __init__(
        self,
        model: str,
        router: Router,
        expected: Fingerprint | None = None,
        limits: LivenessLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Workers must match `expected`; without it, whoever is in the pool already."""
        self.model = model
        self._router = router
        self._expected = expected
        self._limits = limits
        self._members: dict[str, PoolMember] = {}
        self._ever_joined: set[tuple[str, int]] = set()
        """Host and process id of every worker that was ever taken in."""
        self._loading: dict[WorkerLink, str] = {}
        self._last_problem: str | None = None
        self._worker_info: WorkerInfo | None = None
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._on_load: Callable[[Load, str], None] = lambda load, instance_id: None
        self._on_leave: Callable[[str], None] = lambda instance_id: None

    def report_to(
        self, on_load: Callable[[Load, str], None], on_leave: Callable[[str], None]
    ) -> None:
        """Have workers' reports, each with its instance id, and who leaves told to somebody."""
        self._on_load, self._on_leave = on_load, on_leave

    def __iter__(self) -> Iterator[PoolMember]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def worker_info(self) -> WorkerInfo | None:
        """A description that fits the whole pool, None while it is empty.

        Its window is the longest of all: a request that only one worker can take goes to it.
        """
        return self._worker_info

    @property
    def fingerprint(self) -> Fingerprint | None:
        """What the workers of the pool compute, None while it is empty or where they do not say."""
        return self._worker_info.fingerprint if self._worker_info else None

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, None when one can."""
        if any(not member.is_draining for member in self._members.values()):
            return None
        if self._loading:
            return f"loading: {next(reversed(self._loading.values()))}"
        if self._members:
            return f"every worker of {self.model} is draining"
        return self._last_problem or f"no worker has joined the pool of {self.model}"

    def has_joined(self, host: str, pid: int) -> bool:
        """Whether this process was ever in the pool, be it gone or not."""
        return (host, pid) in self._ever_joined

    def get(self, instance_id: str) -> PoolMember | None:
        """Return a worker, None when it is not here any more."""
        return self._members.get(instance_id)

    def start(self) -> None:
        """Begin to watch for signs of life; needs the running loop."""
        self._watch = asyncio.create_task(self._watch_members())

    async def close(self) -> None:
        """Stop watching and close every link."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for member in self:
            member.link.close()

    async def wait_ready(self) -> None:
        """Return once a request can be served."""
        while self.unready_reason is not None:
            self._changed.clear()
            await self._changed.wait()

    def heard_loading(self, link: WorkerLink, stage: str) -> None:
        """A worker that may come to belong here is starting."""
        self._loading[link] = stage

    def forget_loading(self, link: WorkerLink, problem: str | None = None) -> None:
        """It is not starting any more; `problem` says what kept it from joining."""
        self._loading.pop(link, None)
        if problem is not None:
            self._last_problem = problem

    def join(self, info: WorkerInfo, link: WorkerLink) -> PoolMember:
        """Take a worker in; JoinRefused with the reason when it does not fit.

        One that is here already has dialled again, and its old link is cut.
        """
        before = self._members.get(info.instance_id)
        others = (one.info for one in self._members.values() if one is not before)
        reason = unfit_reason(info, self._expected, next(others, None))
        if reason:
            self._last_problem = f"a worker was refused: {reason}"
            raise JoinRefused(f"this worker does not fit the pool of {self.model}: {reason}")
        if before is not None:
            self.leave(before, "the worker opened another link")
            before.link.cut("the worker opened another link")
        member = PoolMember(info, link, asyncio.get_running_loop().time())
        self._members[info.instance_id] = member
        self._ever_joined.add((info.host, info.pid))
        self._last_problem = None
        log.info("%s joined %s as %s", described(info), self.model, info.role)
        self._router.worker_joined(info)
        if info.draining:
            self._router.worker_changed(info.instance_id, draining=True)
        self._describe()
        return member

    def leave(self, member: PoolMember, reason: str) -> None:
        """A worker's link is closed; a member that was replaced is ignored."""
        if self._members.get(member.instance_id) is not member:
            return
        del self._members[member.instance_id]
        self._last_problem = f"the last worker left: {reason}"
        log.warning("%s left %s: %s", described(member.info), self.model, reason)
        self._router.worker_left(member.instance_id)
        self._on_leave(member.instance_id)
        self._describe()

    def change(self, member: PoolMember, info: WorkerInfo) -> None:
        """A worker describes itself anew."""
        if self._members.get(member.instance_id) is not member:
            return
        member.info = info
        member.is_draining = info.draining
        self._router.worker_changed(info.instance_id, role=info.role, draining=info.draining)
        self._describe()

    def observe_load(self, member: PoolMember, load: Load) -> None:
        """Take a report, after everything else of its frame."""
        member.load = load
        self._on_load(load, member.instance_id)
        self._router.observe_load(member.instance_id, load)

    def observe_cache(self, member: PoolMember, events: CacheEvents) -> None:
        """Take what a worker's cache gained and lost; ask for all of it after a gap."""
        if not self._router.observe_cache(member.instance_id, events):
            member.link.send(ResyncCache())

    def set_role(self, instance_id: str, role: Role) -> None:
        """Change what a worker is asked to do; InvalidRequest when it is not here."""
        member = self._known(instance_id)
        member.link.send(SetRole(role))
        self.change(member, msgspec.structs.replace(member.info, role=role))

    def drain(self, instance_id: str) -> None:
        """Give a worker nothing new and let it end; InvalidRequest when it is not here."""
        member = self._known(instance_id)
        member.link.send(DrainWorker())
        self.change(member, msgspec.structs.replace(member.info, draining=True))

    def _known(self, instance_id: str) -> PoolMember:
        member = self._members.get(instance_id)
        if member is None:
            raise InvalidRequest(f"no worker {instance_id} serves {self.model}", "worker")
        return member

    def _describe(self) -> None:
        infos = [member.info for member in self._members.values()]
        self._worker_info = None
        if infos:
            longest = max(info.max_model_len for info in infos)
            self._worker_info = msgspec.structs.replace(infos[0], max_model_len=longest)
        self._changed.set()

    async def _watch_members(self) -> None:
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            now_s = loop.time()
            late_s = now_s - looked_s - self._limits.sweep_s
            looked_s = now_s
            for member in self:
                if late_s > self._limits.sweep_s:
                    # What came while the gateway itself stood still has not been read yet.
                    member.liveness.excuse(late_s)
                self._look_at(member, now_s)

    def _look_at(self, member: PoolMember, now_s: float) -> None:
        link = member.link
        was_heard, link.was_heard = link.was_heard, False
        problem = member.liveness.problem(
            now_s,
            was_heard=was_heard,
            step=link.step,
            has_work=member.has_work,
            limits=self._limits,
        )
        if problem is not None:
            link.cut(problem)
            self.leave(member, problem)


def described(info: WorkerInfo) -> str:
    """Return how the log names a worker: alone its name may be another's too."""
    return f"worker {info.name} ({info.instance_id})" if info.name else f"worker {info.instance_id}"
