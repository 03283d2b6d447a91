"""All parts of a worker process, in the order in which they begin and end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from twinfire.protocol.addresses import UnixAddress, parse_address
from twinfire.protocol.errors import InvalidRequest, TwinfireError
from twinfire.protocol.messages import Failed, Loading
from twinfire.protocol.secret import check_exposed, hash_seed
from twinfire.protocol.startup_stages import StartupStages
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.transfer.fault_points import FaultPoints
from twinfire.worker.build import BuiltEngine, build_engine
from twinfire.worker.exchange_builder import OpenedExchange, open_exchange, start_exchange
from twinfire.worker.gateway_links import GatewayLinks
from twinfire.worker.inbox import Inbox
from twinfire.worker.link_security import link_security
from twinfire.worker.link_thread import LinkThread
from twinfire.worker.liveness import LivenessWatch
from twinfire.worker.worker import Worker

FAILURE_NOTICE_S = 5.0
"""How long a worker that cannot start waits for somebody to tell."""

log = logging.getLogger("twinfire.worker")


class WorkerProcess:
    """Links from the beginning, an engine when it is loaded, an exchange if it is to have one.

    InvalidRequest when the configuration contradicts itself, OSError when the worker cannot listen.
    """

    def __init__(self, config: WorkerConfig, inbox: Inbox) -> None:
        self._config = config
        self._inbox = inbox
        self._security = link_security(config)
        self._faults = FaultPoints(config.faults, self._cut)
        self._opened: OpenedExchange | None = None
        self._cut_links: Callable[[], None] = lambda: None
        joined = [parse_address(address) for address in config.join]
        for address in joined:
            check_exposed(address, self._security.secret, self._security.tls)
        if not config.socket_path and not joined:
            raise InvalidRequest("a worker needs a socket to listen on or gateways to join")
        self._thread = LinkThread()
        self._thread.start()
        self._gateways = GatewayLinks(self._thread, inbox.put)
        if config.socket_path:
            self._gateways.listen(config.socket_path)
        self._gateways.join(joined, self._security)

    def run(self, stages: StartupStages) -> int:
        """Load, serve until the end, and return the exit status.

        TwinfireError when the model or the settings are at fault.
        """
        seed = hash_seed(self._security.secret) if self._security.secret else b""
        built = build_engine(
            self._config,
            lambda stage, done, total: self._gateways.announce(Loading(stage, done, total)),
            stages,
            hash_seed=seed,
        )
        worker = self._make_worker(built)
        built.weight_saver.start()
        built.kv_populator.start()
        self._gateways.begin_alive(lambda: worker.num_passes)
        worker.run()
        built.weight_saver.finish()
        return 0

    def report(self, error: TwinfireError) -> None:
        """Tell whoever is connected why this worker cannot start."""
        self._gateways.announce(Failed(str(error)))
        if not self._gateways.wait_for_gateway(FAILURE_NOTICE_S):
            log.error("%s", error)

    def close(self) -> None:
        """Write out what is buffered and end links, connector and socket files."""
        self._gateways.flush()
        self._thread.stop()
        if self._opened is not None:
            self._opened.connector.close()
            if isinstance(address := self._opened.bound.address, UnixAddress):
                Path(address.path).unlink(missing_ok=True)

    def _make_worker(self, built: BuiltEngine) -> Worker:
        config, info, watch = self._config, built.info, None
        if config.peer_address:
            try:
                self._opened = open_exchange(
                    config, info, built.engine, built.runner, self._security
                )
            except OSError as error:
                raise InvalidRequest(f"{config.peer_address}: {error.strerror}") from None
            info = msgspec.structs.replace(info, peer=self._opened.peer)
            watch = LivenessWatch(config.lease_s)
        worker = Worker(
            built.engine,
            self._gateways,
            self._inbox,
            info,
            populator=built.kv_populator,
            watch=watch,
            faults=self._faults,
        )
        if self._opened is not None and watch is not None:
            exchange, self._cut_links = start_exchange(
                config,
                info,
                self._opened,
                built.engine,
                self._security,
                self._thread,
                self._gateways,
                self._inbox,
                watch,
                worker.accepted,
                self._faults,
            )
            worker.attach(exchange)
        return worker

    def _cut(self) -> None:
        self._cut_links()
