"""A worker that dials its gateways, and the watch on its own standing still."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from pathlib import Path

from support.hand_off_world import Clock
from support.running_worker import INFO
from support.scripted_cluster import SECRET, ScriptedGateway
from twinfire.protocol.addresses import parse_address
from twinfire.protocol.messages import Cancel, Ready
from twinfire.worker.gateway_links import GatewayLinks
from twinfire.worker.inbox import FromGateway, GatewayJoined, GatewayLost
from twinfire.worker.link_security import LinkSecurity
from twinfire.worker.link_thread import LinkThread
from twinfire.worker.liveness import LivenessWatch


class Joining:
    """Links that dial, and what they deliver."""

    def __init__(self, *addresses: str, secret: bytes | None = SECRET) -> None:
        self.heard: queue.SimpleQueue[GatewayJoined | FromGateway | GatewayLost] = (
            queue.SimpleQueue()
        )
        self.thread = LinkThread()
        self.thread.start()
        self.links = GatewayLinks(self.thread, self.heard.put)
        self.links.announce(Ready(INFO))
        self.links.join([parse_address(text) for text in addresses], LinkSecurity(secret))

    async def next(self) -> GatewayJoined | FromGateway | GatewayLost:
        return await asyncio.to_thread(self.heard.get, timeout=10)

    def close(self) -> None:
        self.links.flush()
        self.thread.stop()


def scenario(steps: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(steps(), 25))  # type: ignore[arg-type]


def test_a_worker_joins_several_gateways_and_comes_back(tmp_path: Path) -> None:
    async def steps() -> None:
        gateways = [
            ScriptedGateway(f"unix:{tmp_path}/gateway", gateway_id="a"),
            ScriptedGateway("tcp:127.0.0.1:0", gateway_id="b"),
        ]
        for gateway in gateways:
            await gateway.listen()
        joining = Joining(*(gateway.address for gateway in gateways))
        assert {await joining.next(), await joining.next()} == {
            GatewayJoined("a"),
            GatewayJoined("b"),
        }
        for gateway in gateways:
            assert (await gateway.ready("mixed")).info == INFO
        gateways[0].links[0].send(Cancel(3))
        assert await joining.next() == FromGateway("a", Cancel(3))
        gateways[1].links[0].transport.abort()
        assert await joining.next() == GatewayLost("b")
        assert await joining.next() == GatewayJoined("b")
        joining.links.begin_alive(lambda: 41)
        await gateways[1].until(lambda: 41 in gateways[1].links[-1].alive_steps)
        joining.close()
        for gateway in gateways:
            gateway.close()

    scenario(steps)


def test_a_worker_waits_for_a_gateway_that_is_not_there_yet(tmp_path: Path) -> None:
    async def steps() -> None:
        joining = Joining(f"unix:{tmp_path}/late")
        await asyncio.sleep(0.5)
        gateway = ScriptedGateway(f"unix:{tmp_path}/late")
        await gateway.listen()
        assert await joining.next() == GatewayJoined("g")
        joining.close()
        gateway.close()

    scenario(steps)


def test_a_gateway_with_another_secret_is_not_joined(tmp_path: Path) -> None:
    async def steps() -> None:
        gateway = ScriptedGateway(f"unix:{tmp_path}/other", secret=None)
        await gateway.listen()
        joining = Joining(f"unix:{tmp_path}/other")
        await asyncio.sleep(0.6)
        assert joining.heard.empty()
        assert not gateway.links
        joining.close()
        gateway.close()

    scenario(steps)


def test_a_gap_in_the_ticks_is_told_once() -> None:
    clock = Clock()
    watch = LivenessWatch(3.0, clock)
    clock.now_s = 2.0
    assert watch.tick()
    assert watch.take_gap_s() == 0.0
    clock.now_s = 6.0
    assert not watch.tick()
    assert not watch.tick(), "nothing is renewed before the engine has let go"
    assert watch.take_gap_s() == 4.0
    assert watch.take_gap_s() == 0.0
    assert watch.tick()
    clock.now_s = 20.0
    assert watch.take_gap_s() == 14.0, "also when the asking thread wakes first"
