"""Keeps a cluster's own workers running on this machine, as many of each role as are wanted."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from twinfire.cluster.cluster_file import ModelTable, PoolTable
from twinfire.cluster.worker_slot import WorkerSlot
from twinfire.engine.memory import available_memory_bytes
from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.backends.worker_registry import WorkerRegistry
from twinfire.protocol.errors import InvalidRequest, TwinfireError
from twinfire.protocol.messages import Role, WorkerInfo
from twinfire.protocol.worker_config import WorkerConfig

MAX_DEFAULT_KV_BYTES = 4 << 30
"""KV memory of a worker that is not told how much; all of them share half of what is free."""
MAX_WORKERS = 64
"""Of one role on one machine."""


def kv_share_bytes(models: Sequence[ModelTable]) -> int:
    """Return the KV memory of each worker that is not told how much."""
    num_workers = sum(pool.count for model in models for _, pool in model.pools())
    return min(available_memory_bytes() // 2 // max(1, num_workers), MAX_DEFAULT_KV_BYTES)


class Supervisor:
    """The workers of one model that this process has started."""

    def __init__(
        self,
        model: ModelTable,
        base: WorkerConfig,
        registry: WorkerRegistry,
        folder: Path,
        *,
        kv_share_bytes: int,
        prefix: str = "",
    ) -> None:
        """`base` is what every worker is told beside its pool's settings.

        Their sockets are made in `folder`, their names begin with `prefix`, and those that are not
        told how much KV memory to take get `kv_share_bytes`.
        """
        self._pools: dict[Role, PoolTable] = dict(model.pools())
        self._base = base
        self._registry = registry
        self._folder = folder
        self._slots: dict[Role, list[WorkerSlot]] = {role: [] for role in self._pools}
        self._numbers = {role: itertools.count() for role in self._pools}
        self._kv_share_bytes = kv_share_bytes
        self._prefix = prefix
        self._host = socket.gethostname()
        self._scaling = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def slots(self) -> list[WorkerSlot]:
        """Every place, in the order of roles."""
        return [slot for slots in self._slots.values() for slot in slots]

    def absent(self) -> list[tuple[Role, WorkerSlot]]:
        """Return every place whose worker does not serve now, with its role."""
        return [
            (role, slot)
            for role, slots in self._slots.items()
            for slot in slots
            if self._member_of(slot) is None
        ]

    @property
    def failure(self) -> str | None:
        """Why a worker will never be ready, None while all may be."""
        return next((slot.failure for slot in self.slots if slot.failure), None)

    def slot_of(self, info: WorkerInfo) -> WorkerSlot | None:
        """Return the place of a worker, None when it is not one of ours."""
        if info.host != self._host:
            return None
        return next((slot for slot in self.slots if slot.pid == info.pid), None)

    def name_of(self, info: WorkerInfo) -> str:
        """Return what a worker is called: by us, or by itself."""
        slot = self.slot_of(info)
        return slot.name if slot else info.short_name

    async def start(self) -> None:
        """Start every worker; they join when they are ready."""
        for role, pool in self._pools.items():
            await self.scale(role, pool.count)

    async def wait_ready(self) -> None:
        """Return when every worker has joined; TwinfireError when one never will."""
        while True:
            if all(self._member_of(slot) is not None for slot in self.slots):
                return
            if self.failure is not None:
                raise TwinfireError(self.failure)
            await asyncio.sleep(0.05)

    async def scale(self, role: Role, count: int) -> None:
        """Start or drain workers of a role until there are `count`; InvalidRequest at a limit."""
        if not 0 <= count <= MAX_WORKERS:
            raise InvalidRequest(
                f"{role}: {count} workers; the limits are 0 and {MAX_WORKERS}", role
            )
        async with self._scaling:
            slots = self._slots[role]
            while len(slots) < count:
                slot = self._new_slot(role)
                slots.append(slot)
                await slot.start()
            newest_first = slots[::-1]
            surplus = sorted(newest_first, key=self._load_of)[: len(slots) - count]
            for slot in surplus:
                slots.remove(slot)
                self._drain(slot)
            await asyncio.gather(*(slot.end() for slot in surplus))

    def retire(self, name: str) -> None:
        """Take a worker that is being drained off the list, so that nobody starts it again."""
        for slots in self._slots.values():
            for slot in [slot for slot in slots if slot.name == name]:
                slots.remove(slot)
                ending = asyncio.create_task(slot.end())
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """End every worker, letting each finish what it runs."""
        await asyncio.gather(*(slot.end() for slot in self.slots), *self._ending)

    def _new_slot(self, role: Role) -> WorkerSlot:
        label = f"{role}-{next(self._numbers[role])}"
        name = self._prefix + label
        pool = self._pools[role]
        config = msgspec.structs.replace(
            self._base,
            name=name,
            role=role,
            peer_address=f"unix:{self._folder / label}.peer",
            threads=pool.threads,
            use_idle_cores=pool.use_idle_cores,
            niceness=pool.niceness,
            kv_cache_bytes=pool.kv_cache_memory or self._kv_share_bytes,
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            max_prompt_tokens_beside_streams=pool.max_prompt_tokens_beside_streams,
        )
        return WorkerSlot(name, config, self._has_served)

    def _has_served(self, pid: int) -> bool:
        return self._registry.has_joined(self._host, pid)

    def _load_of(self, slot: WorkerSlot) -> int:
        member = self._member_of(slot)
        if member is None:
            # Those that serve already are the last to go.
            return -1
        return member.load.kv_blocks_used if member.load else 0

    def _drain(self, slot: WorkerSlot) -> None:
        member = self._member_of(slot)
        if member is not None:
            self._registry.drain(member.instance_id)

    def _member_of(self, slot: WorkerSlot) -> PoolMember | None:
        for member in self._registry:
            if member.info.pid == slot.pid and member.info.host == self._host:
                return member
        return None
