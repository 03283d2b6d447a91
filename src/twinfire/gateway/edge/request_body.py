"""A request's body on its way through: kept while it is short, streamed when it is not."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import StreamReader

from twinfire.gateway.edge.edge_settings import EdgeSettings


class BodyTooLong(Exception):
    """The client sends more than the limit."""


class RequestBody:
    """Call `begin` first. `is_repeatable` turns False once a stream of it has begun."""

    def __init__(self, content: StreamReader, length: int | None, settings: EdgeSettings) -> None:
        self.is_repeatable = True
        self._content = content
        self._length = length
        self._settings = settings
        self._begun = bytearray()
        self._is_whole = False

    async def begin(self) -> None:
        """Read what fits into memory; BodyTooLong when it says that it is too long."""
        if self._length is not None and self._length > self._settings.max_body_bytes:
            raise BodyTooLong
        limit = min(self._settings.max_repeatable_bytes, self._settings.max_body_bytes)
        while len(self._begun) <= limit:
            piece = await self._content.readany()
            if not piece:
                self._is_whole = True
                break
            self._begun += piece
        if len(self._begun) > self._settings.max_body_bytes:
            raise BodyTooLong

    @property
    def limit(self) -> int:
        """Bytes that it may have."""
        return self._settings.max_body_bytes

    @property
    def whole(self) -> bytes | None:
        """All of it, None when it is streamed."""
        return bytes(self._begun) if self._is_whole else None

    @property
    def length(self) -> int | None:
        """Bytes, None where only the end will tell."""
        return len(self._begun) if self._is_whole else self._length

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield everything; BodyTooLong as soon as that is known."""
        self.is_repeatable = False
        yield bytes(self._begun)
        num_bytes = len(self._begun)
        while piece := await self._content.readany():
            num_bytes += len(piece)
            if num_bytes > self._settings.max_body_bytes:
                raise BodyTooLong
            yield piece
