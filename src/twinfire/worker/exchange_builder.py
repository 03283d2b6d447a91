"""Opens what a worker needs to exchange KV: its address for peers, its connector, its links."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from twinfire.engine.engine import Engine
from twinfire.engine.runner import Runner
from twinfire.protocol.addresses import Address, TcpAddress, UnixAddress, parse_address
from twinfire.protocol.errors import ModelError
from twinfire.protocol.messages import Peer, WorkerInfo
from twinfire.protocol.peer_messages import PEER_PROTOCOL_VERSION, PeerHello
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.transfer.connector import Connector
from twinfire.transfer.connectors import make_connector
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_receiver import Accepted
from twinfire.transfer.shared_blocks import SharedBlocks
from twinfire.worker.exchange import Exchange, ExchangeSettings
from twinfire.worker.gateway_links import GatewayLinks
from twinfire.worker.heartbeat import Heartbeat
from twinfire.worker.inbox import Inbox
from twinfire.worker.kv_memory import WorkerKvMemory
from twinfire.worker.link_security import BoundSocket, LinkSecurity
from twinfire.worker.link_thread import LinkThread
from twinfire.worker.liveness import LivenessWatch
from twinfire.worker.peer_links import PeerLinks

WILDCARD_HOSTS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class OpenedExchange:
    """An address that peers can be told, before there is anybody to answer them."""

    peer: Peer
    bound: BoundSocket
    connector: Connector
    memory: WorkerKvMemory


def open_exchange(
    config: WorkerConfig, info: WorkerInfo, engine: Engine, runner: Runner, security: LinkSecurity
) -> OpenedExchange:
    """Take the addresses of `config`; callers wait until the exchange runs.

    OSError when an address cannot be had, InvalidRequest when nothing would protect it.
    """
    bound = security.bind(parse_address(config.peer_address))
    control = _advertised(bound.address, config)
    draft = info.fingerprint.draft if info.fingerprint is not None else ""
    memory = WorkerKvMemory(runner, info.num_kv_blocks, engine.block_generation, draft)
    connector = make_connector(
        config.connector,
        memory,
        instance_id=info.instance_id,
        listen=_data_address(control, config),
        secret=security.secret,
        tls=security.tls,
        timeout_s=config.lease_s,
    )
    peer = Peer(info.instance_id, str(control), connector.address)
    return OpenedExchange(peer, bound, connector, memory)


def start_exchange(
    config: WorkerConfig,
    info: WorkerInfo,
    opened: OpenedExchange,
    engine: Engine,
    security: LinkSecurity,
    thread: LinkThread,
    gateways: GatewayLinks,
    inbox: Inbox,
    watch: LivenessWatch,
    on_accepted: Accepted,
    faults: FaultPoints,
) -> tuple[Exchange, Callable[[], None]]:
    """Return the exchange, and what cuts its links."""
    if info.fingerprint is None:
        raise ModelError("a worker without a fingerprint cannot exchange KV")
    hello = PeerHello(PEER_PROTOCOL_VERSION, opened.peer, info.fingerprint)
    dialled = PeerLinks(thread, hello, security, inbox.put, "dialled")
    accepted = PeerLinks(thread, hello, security, inbox.put, "accepted")
    heartbeat = Heartbeat(watch, dialled, accepted, lease_s=config.lease_s)
    settings = ExchangeSettings(
        info.block_size,
        info.kv_bytes_per_block,
        info.fingerprint.draft,
        config.lease_s,
        config.kv_checksums,
    )
    exchange = Exchange(
        engine,
        opened.connector,
        SharedBlocks(opened.memory, ""),
        dialled,
        accepted,
        gateways,
        inbox.put,
        on_accepted,
        lambda: engine.load().waiting,
        heartbeat,
        settings,
        clock=time.monotonic,
        faults=faults,
    )

    async def serve() -> None:
        await opened.bound.serve(accepted.accept)
        thread.spawn(heartbeat.run())

    def cut() -> None:
        dialled.cut()
        accepted.cut()

    thread.result(serve())
    return exchange, cut


def _advertised(address: Address, config: WorkerConfig) -> Address:
    """Return the address with a host that others can use."""
    if isinstance(address, UnixAddress) or address.host not in WILDCARD_HOSTS:
        return address
    return TcpAddress(config.data_host or _own_host(config), address.port)


def _own_host(config: WorkerConfig) -> str:
    """Return this machine's address on the way to the first gateway on another one."""
    for text in config.join:
        gateway = parse_address(text)
        if isinstance(gateway, TcpAddress):
            family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Nothing is sent: this only chooses a route.
                probe.connect((gateway.host, gateway.port or 1))
                return str(probe.getsockname()[0])
    return socket.gethostname()


def _data_address(control: Address, config: WorkerConfig) -> Address:
    if config.data_host:
        return TcpAddress(config.data_host, 0)
    if isinstance(control, UnixAddress):
        return UnixAddress(f"{control.path}.data")
    return TcpAddress(control.host, 0)
