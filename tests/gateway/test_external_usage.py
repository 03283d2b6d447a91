"""What is booked of requests that other engines answer, and what accounts may ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest

from support.external_gateway import (
    CHAT,
    PATHS,
    STREAM,
    Answer,
    ExternalGateway,
    external_gateway,
    external_table,
)
from support.mock_vllm import WORDS, Fabric, MockVllm, mock_vllm
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.database import open_database
from twinfire.accounts.limits import NO_LIMITS, Limits
from twinfire.accounts.prices import NANOS, ModelPrice, PriceTable
from twinfire.accounts.usage_record import UsageRecord
from twinfire.accounts.usage_store import UsageFilter, UsageStore
from twinfire.gateway.settings import GatewaySettings

PRICES = PriceTable(
    prices={"public": ModelPrice(input=Decimal(10), cached_input=Decimal(1), output=Decimal(30))}
)
SILENT = {name: value for name, value in STREAM.items() if name != "stream_options"}


@dataclass
class World:
    gateway: ExternalGateway
    prefill: MockVllm
    decode: MockVllm
    accounts: AccountStore
    usage: UsageStore

    def token(self, name: str, limits: Limits = NO_LIMITS) -> dict[str, str]:
        """Headers of a new account."""
        self.accounts.create(name, limits, is_admin=False)
        return {"authorization": "Bearer " + self.accounts.create_token(name)[0]}

    def records(self) -> list[UsageRecord]:
        return [one for _, one in reversed(self.usage.page(UsageFilter(), 100))]

    async def record(self) -> UsageRecord:
        """The only one, awaited: what ends badly is booked in the background."""
        async with asyncio.timeout(5):
            while not (found := self.records()):
                await asyncio.sleep(0.01)
        (one,) = found
        return one


@asynccontextmanager
async def world(folder: Path, *, is_split: bool = True) -> AsyncIterator[World]:
    url = str(folder / "accounts.db")
    database = open_database(url)
    settings = GatewaySettings(database=url, prices=PRICES)
    fabric = Fabric()
    async with mock_vllm(fabric) as prefill, mock_vllm(fabric) as decode:
        table = external_table("vllm", [decode.url], [prefill.url] if is_split else ())
        async with external_gateway(table, settings) as gateway:
            accounts, usage = AccountStore(database), UsageStore(database)
            yield World(gateway, prefill, decode, accounts, usage)
            gateway.assert_idle()
    database.close()


def run(folder: Path, test: Callable[[World], Awaitable[None]], *, is_split: bool = True) -> None:
    async def main() -> None:
        async with world(folder, is_split=is_split) as here:
            await test(here)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("body", [CHAT, STREAM, SILENT], ids=["whole", "stream", "no usage shown"])
@pytest.mark.parametrize("is_split", [True, False])
def test_a_record_says_what_the_engine_counted(
    tmp_path: Path, body: dict[str, object], is_split: bool
) -> None:
    async def check(here: World) -> None:
        headers = here.token("team")
        answer = await here.gateway.post(body, headers=headers | {"twinfire-cost": "1"})
        assert answer.status == 200
        (record,) = here.records()
        num_input = record.num_input_tokens
        assert num_input > 5
        assert (record.num_cached_tokens, record.num_output_tokens) == (5, len(WORDS))
        assert record.price_nanos == ((num_input - 5) * 10 + 5 + len(WORDS) * 30) * NANOS // 10**6
        assert (record.outcome, record.status, record.finish) == ("finished", 200, "length")
        assert (record.model, record.endpoint) == ("public", PATHS[0])
        assert record.decode_worker == ("decode-0" if is_split else "mixed-0")
        assert record.prefill_worker == ("prefill-0" if is_split else "mixed-0")
        assert (record.ttft_s is None) is (body is CHAT)
        if body is SILENT:
            assert b"usage" not in answer.content
            return
        usage = (answer.json() if body is CHAT else answer.events()[-2])["usage"]
        assert usage["prompt_tokens"] == num_input
        assert usage["cost"] == pytest.approx(record.price_nanos / NANOS)

    run(tmp_path, check, is_split=is_split)


def test_usage_so_far_goes_to_those_who_ask_for_it(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await here.gateway.post(STREAM | {"stream_options": options})).events()
        counts = [one["usage"]["completion_tokens"] for one in events[:-1] if "usage" in one]
        assert counts == [1, 2, 3, 4, 5, 6, 6]
        once = (await here.gateway.post(STREAM)).events()
        assert ["usage" in one for one in once[:-1]] == [False] * 7 + [True]

    run(tmp_path, check)


def test_the_record_is_there_before_the_finish_is_seen(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=STREAM) as response:
            seen = b""
            while b'"finish_reason":"length"' not in seen:
                seen += await response.content.readany()
            (record,) = here.records()
            assert record.outcome == "finished"
            seen += await response.read()
            assert seen.endswith(b"data: [DONE]\n\n")

    run(tmp_path, check)


def test_what_a_client_that_left_had_is_booked(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        never = asyncio.Event()
        here.decode.chunk_gate = lambda number: never if number == 3 else None
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=SILENT) as response:
            seen = b""
            while WORDS[2].encode() not in seen:
                seen += await response.content.readany()
        record = await here.record()
        assert (record.outcome, record.num_output_tokens) == ("cancelled", 3)
        assert record.num_input_tokens > 0
        assert record.num_cached_tokens == 5
        never.set()

    run(tmp_path, check)


def test_a_stream_that_breaks_is_booked_as_failed(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        begun = asyncio.Event()
        here.decode.error_after_chunks = 2
        here.decode.chunk_gate = lambda number: begun if number == 1 else None
        async with here.gateway.session.post(here.gateway.url + PATHS[0], json=STREAM) as response:
            first = await response.content.readuntil(b"\n\n")
            begun.set()
            answer = Answer(200, {}, first + await response.read())
        assert answer.text() == "".join(WORDS[:2])
        record = await here.record()
        assert (record.outcome, record.finish) == ("failed", "engine_failed")
        assert record.num_output_tokens == 2

    run(tmp_path, check)


def test_what_the_engine_finds_wrong_leaves_no_record(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        assert (await here.gateway.post(CHAT | {"temperature": -1})).status == 400
        assert (await here.gateway.post(CHAT)).status == 200
        await here.record()

    run(tmp_path, check)


def test_limits_hold_for_external_models(tmp_path: Path) -> None:
    async def check(here: World) -> None:
        other = here.token("other", Limits(models=("else",)))
        once = here.token("once", Limits(requests_per_minute=1))
        poor = here.token("poor", Limits(budget_tokens_per_day=60))
        codes = []
        for headers in (other, once, once, poor):
            answer = await here.gateway.post(CHAT, headers=headers)
            codes.append(answer.json().get("error", {}).get("code"))
        assert codes == [*("model_not_allowed", None, "rate_limit_exceeded", "budget_exhausted")]
        assert (await here.gateway.post(CHAT)).status == 401
        record = await here.record()
        assert record.num_output_tokens == len(WORDS)
        assert len(here.decode.bodies) == 1

    run(tmp_path, check)
