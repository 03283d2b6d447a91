"""Edits an engine's server-sent events as they arrive, and passes on whole events only.

Buffers by lines of bytes, so that an event or a character may be cut anywhere. Events, comments
and fields that need no edit keep their bytes. The end mark is not passed on: whoever ends the
client's stream sends it, after whatever else has to be said.
"""

from __future__ import annotations

from twinfire.gateway.external.answer_edits import AnswerEdits, EngineError, NotJson

_MAX_EVENT_BYTES = 64 << 20


class EventTooLong(Exception):
    """An event does not end within any sensible length."""


class SseRewriter:
    """One stream."""

    def __init__(self, edits: AnswerEdits) -> None:
        self._edits = edits
        self._line = bytearray()
        self._event: list[bytes] = []
        self.is_done = False
        """Whether the end mark came: without it the stream was cut."""
        self.num_events = 0
        """Events with data passed on so far."""
        self.failure: EngineError | NotJson | None = None
        """What the engine did wrong; nothing is passed on from there."""

    def feed(self, piece: bytes) -> bytes:
        """Return the events that `piece` completes; what they say of a fault is in `failure`."""
        self._line += piece
        if len(self._line) > _MAX_EVENT_BYTES:
            raise EventTooLong
        end = self._line.rfind(b"\n") + 1
        if end == 0:
            return b""
        lines = [line + b"\n" for line in bytes(self._line[: end - 1]).split(b"\n")]
        del self._line[:end]
        complete: list[bytes] = []
        for line in lines:
            if not self._take(line, complete):
                break
        return b"".join(complete)

    def finish(self) -> bytes:
        """Return what an engine left without its closing blank line."""
        complete: list[bytes] = []
        if self._line:
            line = bytes(self._line) + b"\n"
            self._line.clear()
            self._take(line, complete)
        if self._event:
            self._take(b"\n", complete)
        return b"".join(complete)

    def _take(self, line: bytes, complete: list[bytes]) -> bool:
        """Return whether the stream may go on."""
        if self.failure is not None:
            return False
        content = line.rstrip(b"\r\n")
        if content:
            try:
                edited = self._edited(line, content)
            except (EngineError, NotJson) as failure:
                self.failure = failure
                self._event.clear()
                return False
            if edited:
                self._event.append(edited)
        elif self._event:
            complete += self._event
            complete.append(line)
            self._event.clear()
        return True

    def _edited(self, line: bytes, content: bytes) -> bytes:
        if not content.startswith(b"data:"):
            return line
        data = content[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return b""
        edited = self._edits.chunk(data)
        if not edited:
            return b""
        self.num_events += 1
        return line if edited is data else b"data: " + edited + line[len(content) :]
