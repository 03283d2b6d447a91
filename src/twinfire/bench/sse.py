"""Server-sent events: received bytes to `data` payloads, whatever way the stream was cut.

Follows the event-stream grammar of the HTML standard as far as LLM servers use it: `data` fields,
comments, CR, LF or CRLF line ends. Never interprets a payload.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = "[DONE]"


class SseError(Exception):
    """Bytes that are no event stream."""


class SseDecoder:
    """Collects lines into events."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = b""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, received: bytes) -> list[str]:
        """Return the payloads that `received` completes; SseError on what is no event."""
        self._buffer += received
        payloads: list[str] = []
        # A trailing CR may be the first half of a CRLF: it waits for the next bytes.
        usable = len(self._buffer) - self._buffer.endswith(b"\r")
        lines = self._buffer[:usable].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = lines.pop() + self._buffer[usable:]
        for line in lines:
            payload = self._line(line)
            if payload is not None:
                payloads.append(payload)
        if len(self._buffer) + self._data_bytes > self._max_event_bytes:
            raise SseError(f"an event of more than {self._max_event_bytes} bytes")
        return payloads

    @property
    def has_partial_event(self) -> bool:
        """Whether the stream would end inside an event."""
        return bool(self._data or self._buffer.strip())

    def _line(self, line: bytes) -> str | None:
        if not line:
            payload = "\n".join(self._data) if self._data else None
            self._data, self._data_bytes = [], 0
            return payload
        if line.startswith(b":"):
            return None
        name, _, value = line.partition(b":")
        if name == b"data":
            try:
                self._data.append(value.removeprefix(b" ").decode())
            except UnicodeDecodeError as error:
                raise SseError(f"bad UTF-8 in an event: {error}") from None
            self._data_bytes += len(value)
        elif name not in (b"event", b"id", b"retry"):
            raise SseError(f"not an event-stream line: {line[:80]!r}")
        return None
