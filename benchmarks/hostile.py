"""Attack a running server beside good traffic, and see that the good traffic hardly notices.

    python benchmarks/hostile.py --minutes 10

Starts `twinfire serve` with accounts, measures good streams alone, then beside everything at once:
wrong tokens, oversize and nested bodies, slow headers and bodies, aborted uploads, header floods,
clients that do not read, and floods over an account's limits. The verdict: no crash, every refusal
an honest 4xx, 429 or 503, and good traffic's P90 time to first token at most doubled. Keeps a log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.api_token import new_token
from twinfire.accounts.database import open_database
from twinfire.accounts.limits import NO_LIMITS, Limits
from twinfire.accounts.usage_store import UsageFilter, UsageStore

HONEST = frozenset(
    ("200", "400", "401", "402", "403", "404", "408", "413", "415", "429", "431", "503")
)
"""Statuses that an attack may be answered with; `closed` is a connection ended without one."""
CHAT = "/v1/chat/completions"
_GOOD_CLIENTS = 2
_GOOD_PAUSE_S = 1.0


@dataclass
class World:
    host: str
    port: int
    good_token: str
    limited_token: str
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self, attack: str, outcome: str) -> None:
        self.outcomes.setdefault(attack, Counter())[outcome] += 1


def chat_body(tokens: int = 16, **more: object) -> bytes:
    message = {"role": "user", "content": f"Tell me about the number {random.random()}."}
    return json.dumps(
        {"messages": [message], "max_tokens": tokens, "stream": True, **more}
    ).encode()


def head(path: str, length: int, token: str | None, extra: bytes = b"") -> bytes:
    auth = b"" if token is None else b"authorization: Bearer %b\r\n" % token.encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n%b%b\r\n" % (path.encode(), length, auth, extra)
    )


@contextlib.asynccontextmanager
async def connected(world: World):
    reader, writer = await asyncio.open_connection(world.host, world.port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(reader: asyncio.StreamReader, limit_s: float = 90) -> str:
    """The status of the answer, "closed" where the server ended the connection without one."""
    try:
        line = await asyncio.wait_for(reader.readline(), limit_s)
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "no answer"
    return line.split()[1].decode() if line else "closed"


async def good_request(world: World) -> float:
    """Seconds to the first token of a stream that must be whole."""
    body = chat_body()
    begin_s = time.monotonic()
    ttft_s = None
    received = b""
    async with connected(world) as (reader, writer):
        writer.write(head(CHAT, len(body), world.good_token) + body)
        while b"data: [DONE]" not in received:
            chunk = await asyncio.wait_for(reader.read(65536), 120)
            if not chunk:
                raise ConnectionError(f"cut after {received[-200:]!r}")
            received += chunk
            if ttft_s is None and received.count(b"data: ") > 1:
                ttft_s = time.monotonic() - begin_s
    if not received.startswith(b"HTTP/1.1 200") or b'"error"' in received:
        raise ConnectionError(f"refused: {received[:60]!r} ... {received[-300:]!r}")
    assert ttft_s is not None
    return ttft_s


async def good_traffic(world: World, seconds: float) -> tuple[list[float], list[str]]:
    ttfts: list[float] = []
    faults: list[str] = []
    end_s = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end_s:
            try:
                ttfts.append(await good_request(world))
            except (OSError, TimeoutError) as error:
                faults.append(repr(error))
            await asyncio.sleep(_GOOD_PAUSE_S * random.random())

    await asyncio.gather(*(client() for _ in range(_GOOD_CLIENTS)))
    return ttfts, faults


async def wrong_tokens(world: World) -> str:
    token = random.choice([new_token(), "x" * 5000, "tf_", "\x7f", world.good_token[:-1]])
    async with connected(world) as (reader, writer):
        body = chat_body()
        writer.write(head(CHAT, len(body), token) + body)
        return await status_of(reader)


async def no_token(world: World) -> str:
    async with connected(world) as (reader, writer):
        body = chat_body()
        writer.write(head(CHAT, len(body), None) + body)
        return await status_of(reader)


async def oversize_body(world: World) -> str:
    async with connected(world) as (reader, writer):
        size = 40 << 20
        writer.write(head(CHAT, size, world.limited_token))
        with contextlib.suppress(ConnectionError):
            for _ in range(size >> 16):
                writer.write(b" " * 65536)
                await writer.drain()
        return await status_of(reader)


async def nested_body(world: World) -> str:
    depth = random.choice((500, 50_000, 1_000_000))
    body = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    async with connected(world) as (reader, writer):
        writer.write(head(CHAT, len(body), world.limited_token) + body)
        return await status_of(reader)


async def garbage_body(world: World) -> str:
    body = random.randbytes(random.randint(1, 5000))
    async with connected(world) as (reader, writer):
        writer.write(head(CHAT, len(body), world.limited_token) + body)
        return await status_of(reader)


async def not_http(world: World) -> str:
    async with connected(world) as (reader, writer):
        writer.write(random.randbytes(1000) + b"\r\n\r\n")
        return await status_of(reader)


async def slow_headers(world: World) -> str:
    async with connected(world) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n")
        answer = asyncio.ensure_future(status_of(reader))
        while not answer.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"x-a: b\r\n")
            await asyncio.wait({answer}, timeout=1)
        return answer.result()


async def slow_body(world: World) -> str:
    async with connected(world) as (reader, writer):
        writer.write(head(CHAT, 100_000, world.limited_token))
        answer = asyncio.ensure_future(status_of(reader))
        while not answer.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
            await asyncio.wait({answer}, timeout=1)
        return answer.result()


async def aborted_upload(world: World) -> str:
    async with connected(world) as (_, writer):
        writer.write(head(CHAT, 1 << 20, world.limited_token) + b'{"messages": [')
        await writer.drain()
        await asyncio.sleep(random.random())
    return "aborted"


async def aborted_stream(world: World) -> str:
    async with connected(world) as (reader, writer):
        body = chat_body(200)
        writer.write(head(CHAT, len(body), world.limited_token) + body)
        return await status_of(reader)


async def header_flood(world: World) -> str:
    count, size = random.choice(((10_000, 10), (10, 50_000), (1, 10_000_000)))
    async with connected(world) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(count):
                writer.write(b"x-%d: %b\r\n" % (number, b"a" * size))
                await writer.drain()
            writer.write(b"\r\n")
        return await status_of(reader)


async def over_the_limits(world: World) -> str:
    async with connected(world) as (reader, writer):
        body = chat_body(4)
        writer.write(head(CHAT, len(body), world.limited_token) + body)
        status = await status_of(reader)
        await asyncio.wait_for(reader.read(1 << 20), 60)
    return status


async def deaf_client(world: World) -> str:
    async with connected(world) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        body = chat_body(100, n=2)
        writer.write(head(CHAT, len(body), world.limited_token) + body)
        await asyncio.sleep(20)
    return "left"


Attack = Callable[[World], Awaitable[str]]
ATTACKS: tuple[tuple[Attack, int, float], ...] = (
    (wrong_tokens, 2, 0.05),
    (no_token, 1, 0.05),
    (oversize_body, 1, 2.0),
    (nested_body, 1, 0.5),
    (garbage_body, 1, 0.1),
    (not_http, 1, 0.1),
    (slow_headers, 50, 0.5),
    (slow_body, 50, 0.5),
    (aborted_upload, 4, 0.2),
    (aborted_stream, 1, 1.0),
    (header_flood, 1, 0.5),
    (over_the_limits, 4, 0.05),
    (deaf_client, 2, 1.0),
)
"""Each with how many do it at once, and the pause of each between two, in seconds."""


async def attack_on_and_on(world: World, attack: Attack, pause_s: float) -> None:
    name = attack.__name__
    while not world.stop.is_set():
        try:
            world.count(name, await attack(world))
        except TimeoutError:
            world.count(name, "no answer")
        except OSError:
            world.count(name, "closed")
        await asyncio.sleep(pause_s * 2 * random.random())


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run(world: World, minutes: float, process: subprocess.Popen[bytes], log: Path) -> bool:
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    await good_request(world)
    alone_s = max(15.0, minutes * 60 / 5)
    alone, alone_faults = await good_traffic(world, alone_s)
    say(
        f"alone, {alone_s:.0f} s: {len(alone)} good, P50 {percentile(alone, 0.5) * 1e3:.0f} ms, "
        f"P90 {percentile(alone, 0.9) * 1e3:.0f} ms, {len(alone_faults)} faults"
    )
    attackers = [
        asyncio.create_task(attack_on_and_on(world, attack, pause_s))
        for attack, count, pause_s in ATTACKS
        for _ in range(count)
    ]
    beside, beside_faults = await good_traffic(world, minutes * 60)
    world.stop.set()
    for task in attackers:
        task.cancel()
    crashed = [
        repr(one)
        for one in await asyncio.gather(*attackers, return_exceptions=True)
        if isinstance(one, Exception)
    ]
    say(
        f"beside the attacks, {minutes:.1f} min: {len(beside)} good, "
        f"P50 {percentile(beside, 0.5) * 1e3:.0f} ms, P90 {percentile(beside, 0.9) * 1e3:.0f} ms, "
        f"{len(beside_faults)} faults {beside_faults[:3]}"
    )
    for name, outcomes in sorted(world.outcomes.items()):
        told = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        say(f"  {name}: {told}")
    seen = {outcome for outcomes in world.outcomes.values() for outcome in outcomes}
    strange = seen - HONEST - {"closed", "aborted", "left"}
    is_alive = process.poll() is None
    after = await good_request(world) if is_alive else float("inf")
    ratio = percentile(beside, 0.9) / percentile(alone, 0.9)
    say(
        f"alive: {is_alive}; one more request: {after * 1e3:.0f} ms; strange answers: {strange}; "
        f"faults of the script itself: {crashed[:3]}; P90 ratio {ratio:.2f}"
    )
    passed = is_alive and not strange and not beside_faults and not crashed and ratio <= 2
    say("passed" if passed else "FAILED")
    log.write_text("\n".join(lines) + "\n")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument(
        "--log", type=Path, default=Path(__file__).parent / "results" / "hostile.txt"
    )
    parser.add_argument("serve_options", nargs="*", help="for `twinfire serve`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        database = str(Path(name) / "accounts.db")
        opened = open_database(database)
        accounts = AccountStore(opened)
        accounts.create("good", NO_LIMITS)
        accounts.create(
            "limited", Limits(requests_per_minute=30, tokens_per_minute=20_000, concurrency=2)
        )
        server_log = args.log.with_suffix(".server.log")
        words = [sys.executable, "-m", "twinfire.cli.main", "serve", "--port", str(args.port)]
        with server_log.open("wb") as output:
            process = subprocess.Popen(
                [*words, "--accounts-db", database, *args.serve_options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )
        world = World(
            "127.0.0.1",
            args.port,
            accounts.create_token("good")[0],
            accounts.create_token("limited")[0],
        )
        try:
            wait_until_ready(process, server_log)
            passed = asyncio.run(run(world, args.minutes, process, args.log))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        text = server_log.read_text()
        leaked = [token for token in (world.good_token, world.limited_token) if token in text]
        tracebacks = text.count("Traceback")
        sums = UsageStore(opened).sums(UsageFilter(), ("account",))
        with args.log.open("a") as log:
            for line in (
                f"server log: {len(text.splitlines())} lines, {tracebacks} tracebacks, "
                f"{len(leaked)} tokens in it",
                *(
                    f"ledger: {one.num_requests} requests of {one.account}, "
                    f"{one.num_finished} finished"
                    for one in sums
                ),
            ):
                print(line)
                log.write(line + "\n")
    return 0 if passed and not leaked and not tracebacks else 1


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 120
    while b"is ready at" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
