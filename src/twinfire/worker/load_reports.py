"""What gateways are told of this worker's load, with every step and once when it falls idle."""

from __future__ import annotations

import msgspec

from twinfire.engine.engine import Engine
from twinfire.protocol.messages import Load, StepFrame
from twinfire.worker.exchange import Exchange
from twinfire.worker.gateway_links import GatewayLinks


class LoadReports:
    """Owns what the engine does not know: what each gateway has charged, and open hand-offs."""

    def __init__(self, engine: Engine, gateways: GatewayLinks) -> None:
        self._engine = engine
        self._gateways = gateways
        self._exchange: Exchange | None = None
        self._newest_request: dict[str, int] = {}
        """By gateway: what it may count as charged here."""
        self._idle_held: tuple[int, int] | None = None

    def attach(self, exchange: Exchange) -> None:
        """Count hand-offs too."""
        self._exchange = exchange

    @property
    def idle_is_known(self) -> bool:
        """Whether the gateways have been told that nothing is computed."""
        return self._idle_held is not None

    @property
    def idle_is_up_to_date(self) -> bool:
        """Whether what they were told is still so."""
        return self._idle_held == self._held()

    def changed(self) -> None:
        """Something is going on: idleness is to be reported anew after it."""
        self._idle_held = None

    def charge(self, gateway_id: str, request_id: int) -> None:
        """A gateway has sent a request here."""
        newest = self._newest_request.get(gateway_id, 0)
        self._newest_request[gateway_id] = max(newest, request_id)
        self.changed()

    def forget(self, gateway_id: str) -> None:
        """A gateway is gone."""
        self._newest_request.pop(gateway_id, None)
        self.changed()

    def load(self, gateway_id: str, num_passes: int) -> Load:
        """Return the load for one gateway; `num_passes` is the worker's sign of life."""
        load, exchange = self._engine.load(), self._exchange
        return msgspec.structs.replace(
            load,
            step=num_passes,
            last_charge=self._newest_request.get(gateway_id, 0),
            hand_offs_open=exchange.num_open if exchange else 0,
            prefill_tokens_waiting=load.prefill_tokens_waiting
            + (exchange.num_queued_tokens if exchange else 0),
        )

    def report_idle(self, num_passes: int) -> None:
        """Tell the gateways once that nothing runs, so that their gauges fall to zero."""
        for gateway_id in self._gateways.gateway_ids:
            self._gateways.send(gateway_id, StepFrame(self.load(gateway_id, num_passes)))
        self._idle_held = self._held()

    def _held(self) -> tuple[int, int]:
        """What can change while nothing is computed: blocks in use and open hand-offs."""
        num_open = self._exchange.num_open if self._exchange is not None else 0
        return self._engine.load().kv_blocks_used, num_open
