"""A pair of SGLang pools, by the protocol of its bootstrap rooms.

Both engines get the request at the same time, with a room of random name in which they find each
other. Neither answers without the other, so the two legs are raced: whichever fails first ends
the other at once, instead of after the engine's own minutes of waiting.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec
from msgspec import Raw

from twinfire.gateway.external.answer_edits import cached_tokens_of
from twinfire.gateway.external.engine_server import EngineServer
from twinfire.gateway.external.external_job import ExternalJob, Fields, raw_json
from twinfire.gateway.external.leg import FaultKind, Leg, LegFailed
from twinfire.gateway.external.pair import Attempts, Engines, SplitAnswer, note_outcome, race

_ROOM_BITS = 63
_BLAME_WAIT_S = 0.2
_FIELDS = msgspec.json.Decoder(Fields)


class SglangPair:
    """The flow over both pools."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def unready_reason(self) -> str | None:
        """An engine of either pool can do nothing without one of the other."""
        if not self._engines.prefill.has_available():
            return "no prefill engine is healthy"
        if not self._engines.decode.has_available():
            return "no decode engine is healthy"
        return None

    async def start(self, job: ExternalJob, attempts: Attempts) -> SplitAnswer:
        """Open both legs in a room of their own; a failed one is tried elsewhere, both anew."""
        engines = self._engines
        while True:
            prefill_server = engines.prefill.choose(attempts.excluded, job.session)
            if prefill_server is None:
                raise attempts.nobody("prefill")
            decode_server = engines.decode.choose(attempts.excluded, job.session)
            if decode_server is None:
                raise attempts.nobody("decode")
            room = room_fields(job, prefill_server)
            prefill = engines.prefill_leg(job, prefill_server)
            decode = engines.decode_leg(job, decode_server)
            prompt = asyncio.create_task(_compute_prompt(prefill, job, room))
            prompt.add_done_callback(note_outcome)
            try:
                await race(decode.open(job.path, job.with_fields(room), job.request_id), prompt)
            except LegFailed as failure:
                decode.close()
                cause = await _prompt_failure(prompt, failure)
                await _end(prompt)
                if cause is not None and cause is not failure:
                    decode.server.breaker.succeeded()
                attempts.failed(decode if cause is None else prefill, cause or failure)
            except BaseException:
                decode.close()
                prompt.cancel()
                raise
            else:
                engines.tallies.split += 1
                return SplitAnswer(decode, prefill_server=prefill_server, prefill=prompt)

    async def close(self) -> None:
        """Nothing is left behind."""


def room_fields(job: ExternalJob, server: EngineServer) -> Fields:
    """Return where the engines meet: one room for each sequence, none used twice."""
    rooms = [secrets.randbits(_ROOM_BITS) for _ in range(job.num_sequences)]
    if job.num_sequences == 1:
        host, port, room = raw_json(server.host), raw_json(server.bootstrap_port), rooms[0]
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": raw_json(room)}
    return {
        "bootstrap_host": raw_json([server.host] * len(rooms)),
        "bootstrap_port": raw_json([server.bootstrap_port] * len(rooms)),
        "bootstrap_room": raw_json(rooms),
    }


async def _compute_prompt(leg: Leg, job: ExternalJob, room: Fields) -> int | None:
    """Run the prefill leg to its end; return the cached tokens that it tells of."""
    body = job.with_fields({**room, "stream": Raw(b"false")}, without=("stream_options",))
    try:
        await leg.open(job.path, body, job.request_id)
        content = await leg.read_all()
    finally:
        leg.close()
    try:
        return cached_tokens_of(_FIELDS.decode(content))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _prompt_failure(prompt: asyncio.Task[int | None], failure: LegFailed) -> LegFailed | None:
    """Return what the prompt's leg failed of, None when the decode leg failed by itself.

    A decode engine whose peer fails breaks too, and may be the first to say so.
    """
    if failure.kind is FaultKind.BROKEN:
        await asyncio.wait({prompt}, timeout=_BLAME_WAIT_S)
    if not prompt.done():
        return None
    cause = prompt.exception()
    return cause if isinstance(cause, LegFailed) else None


async def _end(task: asyncio.Task[int | None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
