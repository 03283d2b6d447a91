"""A conversation: its turns, and the commands that change it. Knows no terminal and no socket."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twinfire.bench.request import GenerationRequest, Message
from twinfire.protocol.errors import TwinfireError

HELP = """\
/system [TEXT]  show or set the system prompt; the conversation starts anew
/clear          forget the conversation, keep the system prompt
/retry          answer the last message again
/save FILE      write the conversation (.json, or Markdown for .md)
/help           this list
/quit           leave (also Ctrl-D)
\"\"\" on a line of its own begins and ends a message of several lines.
Ctrl-C stops an answer; what came of it stays in the conversation."""


class CommandError(TwinfireError):
    """A command that cannot be done; the message says why."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of every answer; None leaves a field to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class ChatSession:
    """The messages so far. Its key keeps a routed conversation on one warm cache."""

    def __init__(self, sampling: Sampling, system: str | None = None) -> None:
        self._sampling = sampling
        self.system = system
        self.turns: list[Message] = []
        self._key = f"chat-{secrets.token_hex(8)}"

    def ask(self, text: str) -> GenerationRequest:
        """Add a user message and return the request for its answer."""
        self.turns.append(Message("user", text))
        return self._request()

    def retry(self) -> GenerationRequest:
        """Drop the last answer and return the request for another; CommandError without one."""
        while self.turns and self.turns[-1].role == "assistant":
            self.turns.pop()
        if not self.turns:
            raise CommandError("/retry: there is no message to answer")
        return self._request()

    def answered(self, text: str) -> None:
        """Add the model's answer; one without text is not kept."""
        if text:
            self.turns.append(Message("assistant", text))

    def unanswered(self) -> None:
        """Take back the last user message, whose request failed."""
        if self.turns and self.turns[-1].role == "user":
            self.turns.pop()

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()

    def set_system(self, text: str) -> None:
        """Replace the system prompt and forget all turns."""
        self.system = text or None
        self.clear()

    def messages(self) -> tuple[Message, ...]:
        """Return everything, the system prompt first."""
        system = (Message("system", self.system),) if self.system else ()
        return (*system, *self.turns)

    def save(self, path: Path) -> None:
        """Write the conversation; CommandError when the file cannot be written."""
        if path.suffix == ".md":
            content = "".join(f"## {m.role}\n\n{m.content}\n\n" for m in self.messages()).encode()
        else:
            encoded = msgspec.json.encode({"messages": self.messages()})
            content = msgspec.json.format(encoded, indent=1) + b"\n"
        try:
            path.write_bytes(content)
        except OSError as error:
            raise CommandError(f"/save {path}: {error.strerror}") from None

    def _request(self) -> GenerationRequest:
        return GenerationRequest(
            messages=self.messages(),
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            seed=self._sampling.seed,
            session=self._key,
        )
