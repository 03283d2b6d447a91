"""Named places where a test can make a worker fail, so that it is known which state it died in.

`TWINFIRE_FAULTS="sender.before_commit=kill;receiver.reading=delay:0.5@3"`: actions are kill
(SIGKILL to itself), stop (SIGSTOP), cut (close its peer links) and delay:SECONDS; `@N` acts at the
N-th time only. Without it a delay acts each time and the others at the first. Each act is logged on
standard error, in one line, before it happens. Nothing is armed unless asked for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from twinfire.protocol.errors import InvalidRequest

FAULT_POINTS = {
    "sender.queued": "a hand-off waits in the prefill worker's queue",
    "sender.before_open": "the decode worker is about to be asked for blocks",
    "sender.after_open": "it has been asked",
    "sender.after_ticket": "it has taken blocks; the prompt is about to be computed",
    "sender.chunk_ready": "blocks are about to be announced",
    "sender.before_commit": "the prompt is computed and not yet committed",
    "sender.after_commit": "the commit has been sent",
    "sender.after_done": "the decode worker has accepted",
    "receiver.reserve": "a hand-off is announced by the gateway",
    "receiver.open": "the prefill worker asks for blocks",
    "receiver.waiting": "there is no room for them",
    "receiver.before_ticket": "blocks are taken and nobody knows yet",
    "receiver.after_ticket": "the prefill worker has been told",
    "receiver.reading": "a read is about to begin",
    "receiver.read": "a read has ended",
    "receiver.commit": "the commit has come",
    "receiver.before_adopt": "every block is in place",
    "receiver.after_accept": "the first tokens have been sent and the prefill worker not yet told",
    "prefill.step": "a step has computed some of a prompt",
    "decode.step": "a step has drawn tokens",
    "pull.request": "a holder is about to be asked for a prefix",
    "pull.granted": "it has pinned what it holds",
    "pull.reading": "a read of it is about to begin",
    "pull.finish": "a pull is over",
    "holder.before_grant": "blocks are pinned and the puller does not know",
    "holder.after_grant": "it has been told",
}
"""Every point, and the state that a worker is in there."""

STDERR_FILENO = 2
_ACTIONS = ("kill", "stop", "cut", "delay")


@dataclass(slots=True)
class _Armed:
    action: str
    delay_s: float
    at_hit: int | None
    num_hits: int = 0

    def is_due(self) -> bool:
        self.num_hits += 1
        if self.at_hit is None:
            return self.action == "delay" or self.num_hits == 1
        return self.num_hits == self.at_hit


class FaultPoints:
    """What is armed. `cut` closes the peer links; `text` is as in the module's description.

    InvalidRequest when it names an unknown point or action.
    """

    def __init__(self, text: str = "", cut: Callable[[], None] = lambda: None) -> None:
        self._cut = cut
        self._armed = {
            name.strip(): _parse(name.strip(), action.strip())
            for name, _, action in (part.partition("=") for part in text.split(";") if part.strip())
        }

    def hit(self, name: str) -> None:
        """Say that the process is at `name`, one of FAULT_POINTS."""
        if not self._armed:
            return
        assert name in FAULT_POINTS, f"{name} is no fault point"
        armed = self._armed.get(name)
        if armed is not None and armed.is_due():
            self._act(name, armed)

    def _act(self, name: str, armed: _Armed) -> None:
        line = f"twinfire fault {name} {armed.action} hit={armed.num_hits} pid={os.getpid()}\n"
        os.write(STDERR_FILENO, line.encode())
        match armed.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self._cut()
            case _:
                time.sleep(armed.delay_s)


def _parse(name: str, text: str) -> _Armed:
    if name not in FAULT_POINTS:
        raise InvalidRequest(f"{name!r} is no fault point; there are {', '.join(FAULT_POINTS)}")
    spec, _, at_hit = text.partition("@")
    action, _, argument = spec.partition(":")
    try:
        delay_s = float(argument) if argument else 0.0
        number = int(at_hit) if at_hit else None
    except ValueError:
        action, delay_s, number = "", 0.0, None
    if action not in _ACTIONS or (action == "delay") != bool(argument):
        raise InvalidRequest(
            f"{text!r} is no fault; write kill, stop, cut or delay:SECONDS, with @N"
        )
    return _Armed(action, delay_s, number)
