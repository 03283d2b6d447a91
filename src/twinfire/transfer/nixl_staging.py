"""Memory that NIXL reads from and into: one region per end of a link, taken from a pool.

Never KV memory: blocks are packed into a region on one side and unpacked from one on the other.
Regions are mapped and registered when first needed, and kept for the next link.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from twinfire.transfer.carrier import CarrierFailed
from twinfire.transfer.nixl_agent import NixlAgent

MAX_REGIONS = 128
"""Links in both directions, and regions that a read which was given up may still write."""


class StagingRegion:
    """Registered memory; `metadata` is what a peer must know to read it."""

    def __init__(self, agent: NixlAgent, num_bytes: int) -> None:
        self._array = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self.address = self._array.ctypes.data
        self.view = memoryview(self._array)  # type: ignore[arg-type]
        self.metadata = agent.register(self.address, num_bytes)


class StagingPool:
    """Regions of `region_bytes`. Safe to use from any thread."""

    def __init__(self, agent: NixlAgent, region_bytes: int) -> None:
        self._agent = agent
        self._region_bytes = region_bytes
        self._lock = threading.Lock()
        self._free: list[StagingRegion] = []
        self._num_regions = 0

    def take(self) -> StagingRegion:
        """Return a region; CarrierFailed when all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_regions >= MAX_REGIONS:
                raise CarrierFailed(f"all {MAX_REGIONS} staging regions are in use")
            self._num_regions += 1
        try:
            return StagingRegion(self._agent, self._region_bytes)
        except BaseException:
            with self._lock:
                self._num_regions -= 1
            raise

    def give_back(self, region: StagingRegion) -> None:
        """Put a region back that nobody writes any more."""
        with self._lock:
            self._free.append(region)
