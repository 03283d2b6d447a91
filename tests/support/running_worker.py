"""A real worker over the mock model, on a thread, with its socket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.engines import mock_engine
from twinfire.engine.engine import Engine
from twinfire.protocol.messages import WorkerInfo
from twinfire.worker.gateway_links import GatewayLinks
from twinfire.worker.inbox import Inbox, Stop
from twinfire.worker.link_thread import LinkThread
from twinfire.worker.worker import Worker

MAX_UNREAD_BYTES = 500_000

INFO = WorkerInfo(
    instance_id="test",
    role="mixed",
    pid=0,
    model="mock",
    architecture="mock",
    dtype="f32",
    vocab_size=64,
    max_model_len=1024,
    block_size=4,
    num_kv_blocks=512,
    kv_bytes_per_block=1,
    weight_bytes=0,
    max_num_seqs=8,
)


@dataclass
class RunningWorker:
    socket_path: str
    engine: Engine
    inbox: Inbox
    thread: threading.Thread


@contextmanager
def running_worker(folder: Path) -> Iterator[RunningWorker]:
    inbox: Inbox = queue.SimpleQueue()
    socket_path = str(folder / "worker.sock")
    link_thread = LinkThread()
    link_thread.start()
    links = GatewayLinks(link_thread, inbox.put, max_unread_bytes=MAX_UNREAD_BYTES)
    links.listen(socket_path)
    engine, _ = mock_engine(num_blocks=512, max_model_len=1024)
    worker = Worker(engine, links, inbox, INFO)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield RunningWorker(socket_path, engine, inbox, thread)
    finally:
        inbox.put(Stop())
        thread.join(10)
        links.flush()
        link_thread.stop()
        assert not thread.is_alive()
