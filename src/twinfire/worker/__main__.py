"""A worker process: `python -m twinfire.worker CONFIG`, CONFIG being a `WorkerConfig` as JSON.

Listens and dials at once, then loads, so that whoever started it sees how far it is. Ends on
SIGTERM and, under a supervisor, when its standard input closes (both after what runs has finished),
or when it cannot go on. `TWINFIRE_FAULTS` arms fault points, for tests.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading

import msgspec

from twinfire.protocol.errors import InvalidRequest, TwinfireError
from twinfire.protocol.startup_stages import StartupStages
from twinfire.protocol.worker_config import WorkerConfig, decode_worker_config
from twinfire.worker.inbox import Drain, Inbox
from twinfire.worker.process import WorkerProcess

STDIN_FILENO = 0
FAULTS_VARIABLE = "TWINFIRE_FAULTS"


def main() -> int:
    """Run the worker and return its exit status."""
    stages = StartupStages()
    stages.begin("listening")
    # Threads that spin at a barrier starve the gateway of the core that the others wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        config = decode_worker_config(sys.argv[1])
    except (IndexError, msgspec.DecodeError) as error:
        print(f"usage: python -m twinfire.worker CONFIG-AS-JSON ({error})", file=sys.stderr)
        return 2
    _begin_log(config.name)
    inbox: Inbox = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(Drain()))
    if config.supervised:
        # A terminal's Ctrl-C goes to the whole group; the supervisor decides when workers end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_watch_parent, args=(inbox,), name="parent", daemon=True).start()
    else:
        signal.signal(signal.SIGINT, lambda *_: inbox.put(Drain()))
    return _run(config, inbox, stages)


def _begin_log(worker_name: str) -> None:
    # Many workers share one log.
    name = f"{worker_name} ".replace("%", "%%") if worker_name else ""
    logging.basicConfig(format=f"%(asctime)s {name}%(name)s %(levelname)s %(message)s")
    # How an ambiguous file was read is told once, at start.
    logging.getLogger("twinfire.artifacts").setLevel(logging.INFO)


def _run(config: WorkerConfig, inbox: Inbox, stages: StartupStages) -> int:
    if config.niceness:
        os.nice(config.niceness)
    if not config.faults:
        faults = os.environ.get(FAULTS_VARIABLE, "")
        config = msgspec.structs.replace(config, faults=faults)
    try:
        process = WorkerProcess(config, inbox)
    except (InvalidRequest, OSError) as error:
        print(f"twinfire worker: {error}", file=sys.stderr)
        return 1
    try:
        return process.run(stages)
    except TwinfireError as error:
        process.report(error)
        return 1
    finally:
        process.close()


def _watch_parent(inbox: Inbox) -> None:
    """Drain when standard input closes, which it does however the parent ends."""
    # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
    while os.read(STDIN_FILENO, 1):
        pass
    inbox.put(Drain())


if __name__ == "__main__":
    sys.exit(main())
