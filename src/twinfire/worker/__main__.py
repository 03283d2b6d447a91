"""A worker process: `python -m twinfire.worker CONFIG`, CONFIG being a `WorkerConfig` as JSON.

Listens at once, then loads, so that whoever started it sees how far it is. Ends when its standard
input closes, on SIGTERM (both after what runs has finished), or when it cannot go on.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading

import msgspec

from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.messages import Failed, Loading
from twinfire.protocol.startup_stages import StartupStages
from twinfire.protocol.worker_config import WorkerConfig, decode_worker_config
from twinfire.worker.build import build_engine
from twinfire.worker.link_server import LinkServer
from twinfire.worker.worker import Drain, Inbox, Worker

STDIN_FILENO = 0
FAILURE_NOTICE_S = 5.0
"""How long a worker that cannot start waits for somebody to tell."""

log = logging.getLogger("twinfire.worker")


def main() -> int:
    """Run the worker and return its exit status."""
    stages = StartupStages()
    stages.begin("listening")
    # Threads that spin at a barrier starve the gateway of the core that the others wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = decode_worker_config(sys.argv[1])
    except (IndexError, msgspec.DecodeError) as error:
        print(f"usage: python -m twinfire.worker CONFIG-AS-JSON ({error})", file=sys.stderr)
        return 2
    inbox: Inbox = queue.SimpleQueue()
    # A terminal's Ctrl-C goes to the whole group; the gateway decides when its worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(Drain()))
    threading.Thread(target=_watch_parent, args=(inbox,), name="parent", daemon=True).start()
    links = LinkServer(config.socket_path, inbox.put)
    links.start()
    status = _serve(config, links, inbox, stages)
    links.stop()
    return status


def _serve(config: WorkerConfig, links: LinkServer, inbox: Inbox, stages: StartupStages) -> int:
    try:
        built = build_engine(
            config, lambda stage, done, total: links.announce(Loading(stage, done, total)), stages
        )
    except TwinfireError as error:
        links.announce(Failed(str(error)))
        if not links.wait_for_gateway(FAILURE_NOTICE_S):
            log.error("%s", error)
        return 1
    built.weight_saver.start()
    Worker(built.engine, links, inbox, built.info).run()
    built.weight_saver.finish()
    return 0


def _watch_parent(inbox: Inbox) -> None:
    """Drain when standard input closes, which it does however the parent ends."""
    # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
    while os.read(STDIN_FILENO, 1):
        pass
    inbox.put(Drain())


if __name__ == "__main__":
    sys.exit(main())
