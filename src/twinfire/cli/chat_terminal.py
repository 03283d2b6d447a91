"""The terminal side of a chat: reads messages and commands, shows answers as they come.

Answers go to standard output, everything else of a piped chat to standard error, so that the
answer alone can be piped on. Owns the event loop and the client for as long as it is open.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.text import Text

from twinfire.bench.client import Client
from twinfire.bench.load_metrics import tpot_ms, ttft_ms
from twinfire.bench.request import GenerationRequest
from twinfire.bench.request_record import Recorder, RequestRecord
from twinfire.bench.stream_events import StreamFault, TextDelta
from twinfire.bench.target import Target
from twinfire.cli.chat_session import HELP, ChatSession, CommandError

PROMPT = "> "
CONTINUED = ". "
FENCE = '"""'


class ChatTerminal:
    """Use as a context manager."""

    def __init__(
        self,
        target: Target,
        session: ChatSession,
        out: Console | None = None,
        err: Console | None = None,
    ) -> None:
        self._session = session
        self._client = Client(target)
        self._runner = asyncio.Runner()
        self._out = out or Console(highlight=False, soft_wrap=True)
        self._err = err or Console(highlight=False, soft_wrap=True, stderr=True)

    def __enter__(self) -> ChatTerminal:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._client.__aexit__(kind, error, trace))
        self._runner.close()

    def interact(self) -> int:
        """Read messages from the terminal until the input ends; TwinfireError if unreachable."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history
        card = self._runner.run(self._client.model())
        self._out.print(Text(f"{card.id} · /help lists commands", style="dim"))
        while True:
            try:
                if not self._turn(input(PROMPT)):
                    return 0
            except EOFError:
                self._out.print()
                return 0
            except KeyboardInterrupt:
                self._out.print(Text("(Ctrl-D or /quit leaves)", style="dim"))
            except CommandError as error:
                self._out.print(Text(str(error), style="red"))

    def answer_pipe(self, stdin: TextIO, *, each_line: bool) -> int:
        """Answer what the pipe holds, as one message or line by line; 1 when an answer failed."""
        messages = (line.strip() for line in stdin) if each_line else iter([stdin.read().strip()])
        for message in messages:
            if not message:
                continue
            if not self.answer(self._session.ask(message), stats=self._err):
                return 1
        return 0

    def answer(self, request: GenerationRequest, stats: Console | None = None) -> bool:
        """Show an answer as it arrives, then its figures; whether it came whole or was stopped."""
        recorder = Recorder(request, self._client.clock())
        stopped = False
        fault: StreamFault | None = None
        try:
            self._runner.run(self._show(request, recorder))
        except KeyboardInterrupt:
            stopped = True
        except StreamFault as caught:
            fault = caught
        record = recorder.finish(self._client.clock(), fault)
        shown = stats or self._out
        if record.chunk_times_s:
            self._out.print()
            self._session.answered(recorder.answer)
        elif not stopped:
            self._session.unanswered()
        if record.error_kind is not None and not stopped:
            line = f"{record.error_kind}: {record.error_message}"
            shown.print(Text(line, style="red"))
            return False
        shown.print(Text(("stopped · " if stopped else "") + figures(record), style="dim"))
        return True

    async def _show(self, request: GenerationRequest, recorder: Recorder) -> None:
        await self._client.model()
        recorder.restart(self._client.clock())
        reasoning = False
        async with contextlib.aclosing(self._client.stream(request)) as stream:
            async for at_s, event in stream:
                recorder.add(event, at_s)
                if not isinstance(event, TextDelta):
                    continue
                if reasoning and event.kind == "content":
                    self._out.print()
                reasoning = event.kind == "reasoning"
                self._out.print(Text(event.text, style="dim italic" if reasoning else ""), end="")

    def _turn(self, line: str) -> bool:
        """Do what one line begins: a command, a message, a fenced message; False ends the chat."""
        if line.startswith("/"):
            return self._command(line)
        if line.strip() == FENCE:
            lines: list[str] = []
            while (line := input(CONTINUED)).strip() != FENCE:
                lines.append(line)
            line = "\n".join(lines)
        if line.strip():
            self.answer(self._session.ask(line))
        return True

    def _command(self, line: str) -> bool:
        """Do a command; False when it ends the chat."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._out.print(Text(HELP))
            case "/system" if argument:
                self._session.set_system(argument)
            case "/system":
                self._out.print(Text(self._session.system or "(none)", style="dim"))
            case "/clear":
                self._session.clear()
            case "/retry":
                self.answer(self._session.retry())
            case "/save" if argument:
                self._session.save(Path(argument).expanduser())
                self._out.print(Text(f"saved {argument}", style="dim"))
            case "/save":
                raise CommandError("/save needs a file name")
            case _:
                raise CommandError(f"{name}: no such command; /help lists them")
        return True


def figures(record: RequestRecord) -> str:
    """Return one line of what an answer cost."""
    parts = [f"{record.output_tokens} tokens"]
    per_token_ms = tpot_ms(record)
    if per_token_ms:
        parts.append(f"{1e3 / per_token_ms:.1f} tokens/s")
    first_ms = ttft_ms(record)
    if first_ms is not None:
        parts.append(f"first after {first_ms:.0f} ms")
    if record.prompt_tokens is not None:
        cached = f", {record.cached_tokens} cached" if record.cached_tokens is not None else ""
        parts.append(f"prompt {record.prompt_tokens}{cached}")
    if record.finish_reason == "length":
        parts.append("cut at the length limit")
    return " · ".join(parts)
