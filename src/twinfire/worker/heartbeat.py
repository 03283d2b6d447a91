"""Says to other workers what is still wanted of them, from the links' thread.

A long step must not cost what others hold for this worker, so this does not wait for the engine;
but a process that stood still says nothing before the engine has dealt with that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from twinfire.protocol.peer_messages import Renew
from twinfire.transfer.lease import RENEWALS_PER_LEASE
from twinfire.transfer.ports import Peers
from twinfire.worker.liveness import TICK_S, LivenessWatch

Renewals = Mapping[str, Renew]
"""What to say to each worker."""


class Heartbeat:
    """Ticks the watch, and renews what `renewals` holds."""

    def __init__(
        self, watch: LivenessWatch, dialled: Peers, accepted: Peers, *, lease_s: float
    ) -> None:
        self._watch = watch
        self._dialled = dialled
        self._accepted = accepted
        self._ticks_per_renewal = max(1, round(lease_s / RENEWALS_PER_LEASE / TICK_S))
        self.renewals: tuple[Renewals, Renewals] = ({}, {})
        """For dialled and for accepted links; replaced as a whole by the engine's thread."""

    async def run(self) -> None:
        """Beat for ever."""
        num_ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            num_ticks += 1
            if self._watch.tick() and num_ticks % self._ticks_per_renewal == 0:
                dialled, accepted = self.renewals
                for instance_id, message in dialled.items():
                    self._dialled.send(instance_id, message)
                for instance_id, message in accepted.items():
                    self._accepted.send(instance_id, message)
