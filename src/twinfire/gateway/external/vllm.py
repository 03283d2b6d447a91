"""A pair of vLLM pools, by the protocol of its NIXL connector.

The prefill engine is asked for one token and answers with a handle to the KV that it holds; the
decode engine gets the client's request with that handle and pulls. A held prompt that will not be
pulled is given back by a one-token request, so that no engine waits for a lease to run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from twinfire.gateway.external.answer_edits import cached_tokens_of
from twinfire.gateway.external.engine_server import EngineServer
from twinfire.gateway.external.external_job import (
    TOKEN_LIMITS,
    ExternalJob,
    Fields,
    raw_json,
)
from twinfire.gateway.external.leg import FaultKind, Leg, LegFailed
from twinfire.gateway.external.pair import (
    Attempts,
    Engines,
    SplitAnswer,
    note_outcome,
    open_alone,
)

_HANDLE = "kv_transfer_params"
_ASKS_FOR_HANDLE = raw_json(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
_LEFT_OUT_OF_PREFILL = (
    *("stream_options", "min_tokens", "min_completion_tokens"),
    # An engine that stops at its first token for another reason than length keeps no KV for us.
    *("stop", "stop_token_ids"),
)
_RELEASE_LIMIT_S = 30.0
_FIELDS = msgspec.json.Decoder(Fields)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """KV on a prefill engine, which holds it until somebody pulls it."""

    server: EngineServer
    handle: Raw
    cached_tokens: int | None


class VllmPair:
    """The flow over both pools."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._background: set[asyncio.Task[None]] = set()

    def unready_reason(self) -> str | None:
        """Each engine can do both stages, so one of either pool is enough."""
        engines = self._engines
        if engines.decode.has_available() or engines.prefill.has_available():
            return None
        return "no engine is healthy"

    async def start(self, job: ExternalJob, attempts: Attempts) -> SplitAnswer:
        """Hold the prompt on a prefill engine, then open the answer on a decode engine."""
        engines = self._engines
        if not engines.decode.has_available():
            return SplitAnswer(await open_alone(engines, engines.prefill, job, attempts))
        if engines.decode.choose(attempts.excluded) is None:
            raise attempts.nobody("decode")
        held = None
        # One handle serves one sequence, and prompt tokens are told by who computes them.
        if job.num_sequences == 1 and not job.reads_prompt_logprobs:
            held = await self._hold(job, attempts)
        if held is None:
            return SplitAnswer(await open_alone(engines, engines.decode, job, attempts))
        leg = await self._open_decode(job, held, attempts)
        engines.tallies.split += 1
        return SplitAnswer(leg, prefill_server=held.server, cached_tokens=held.cached_tokens)

    async def close(self) -> None:
        """Give up what is still being released."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _hold(self, job: ExternalJob, attempts: Attempts) -> HeldPrompt | None:
        """Return the held prompt; None when no prefill engine can be reached at all."""
        pool = self._engines.prefill
        body = prefill_body(job)
        last: LegFailed | None = None
        while (server := pool.choose(attempts.excluded, job.session)) is not None:
            leg = self._engines.prefill_leg(job, server)
            asking = asyncio.ensure_future(_ask_to_hold(leg, job, body))
            asking.add_done_callback(note_outcome)
            try:
                return await asyncio.shield(asking)
            except LegFailed as failure:
                attempts.failed(leg, failure)
                last = failure
            except asyncio.CancelledError:
                if leg.is_answered:
                    self._in_background(self._release_when_held(job, asking))
                else:
                    asking.cancel()
                raise
        if last is not None and last.kind is not FaultKind.UNREACHED:
            raise last
        return None

    async def _open_decode(self, job: ExternalJob, held: HeldPrompt, attempts: Attempts) -> Leg:
        """Offer the handle to one decode engine after the other until one takes it."""
        pool = self._engines.decode
        body = job.with_fields({_HANDLE: held.handle})
        while (server := pool.choose(attempts.excluded, job.session)) is not None:
            leg = self._engines.decode_leg(job, server)
            try:
                await leg.open(job.path, body, job.request_id)
            except LegFailed as failure:
                leg.close()
                attempts.failed(leg, failure)
                if failure.kind is FaultKind.BROKEN:
                    # The handle may be used up, and a second pull would read others' blocks.
                    failure.may_go_on = True
                    raise
            except BaseException:
                leg.close()
                if not leg.is_sent:
                    self._in_background(self._release(job, held))
                raise
            else:
                return leg
        raise attempts.nobody("decode")

    async def _release_when_held(
        self, job: ExternalJob, asking: asyncio.Task[HeldPrompt | None]
    ) -> None:
        try:
            held = await asking
        except LegFailed:
            return
        if held is not None:
            await self._release(job, held)

    async def _release(self, job: ExternalJob, held: HeldPrompt) -> None:
        """Have a decode engine pull and drop a prompt that nobody waits for."""
        server = self._engines.decode.choose()
        if server is None:
            return
        leg = self._engines.decode_leg(job, server)
        try:
            await leg.open(job.path, release_body(job, held), job.request_id)
            await leg.read_all()
            self._engines.tallies.released += 1
        except LegFailed as failure:
            log.warning("a held prompt is left to its lease: %s", failure)
        finally:
            leg.close()

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(asyncio.wait_for(work, _RELEASE_LIMIT_S))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def prefill_body(job: ExternalJob) -> bytes:
    """Return the request for one token and a handle."""
    return job.with_fields(
        {**_one_token(job), "ignore_eos": Raw(b"true"), _HANDLE: _ASKS_FOR_HANDLE},
        without=_LEFT_OUT_OF_PREFILL,
    )


def release_body(job: ExternalJob, held: HeldPrompt) -> bytes:
    """Return the cheapest request that pulls a held prompt."""
    return job.with_fields({**_one_token(job), _HANDLE: held.handle}, without=_LEFT_OUT_OF_PREFILL)


def _one_token(job: ExternalJob) -> Fields:
    limits = {name: Raw(b"1") for name in TOKEN_LIMITS if name in job.fields}
    return {**limits, "max_tokens": Raw(b"1"), "stream": Raw(b"false")}


async def _ask_to_hold(leg: Leg, job: ExternalJob, body: bytes) -> HeldPrompt | None:
    """Return what the engine holds; None from one that holds nothing, as for a tiny prompt."""
    try:
        await leg.open(job.path, body, job.request_id)
        content = await leg.read_all()
        try:
            answer = _FIELDS.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise leg.broken("The prefill engine's answer is not JSON.") from None
        handle = answer.get(_HANDLE)
        if handle is None or bytes(handle) == b"null":
            return None
        return HeldPrompt(leg.server, Raw(bytes(handle)), cached_tokens_of(answer))
    finally:
        leg.close()
