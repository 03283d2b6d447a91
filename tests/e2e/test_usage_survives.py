"""SIGKILL of a server in the middle of its work: what a client saw finished is booked, once."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from support.serve_process import serve_process
from support.tiny_text_model import write_text_model
from twinfire.accounts.database import open_database
from twinfire.accounts.usage_store import UsageFilter, UsageStore

_NUM_CLIENTS = 6


class Clients:
    """Sends requests from several threads until the server is gone."""

    def __init__(self, port: int) -> None:
        self.sent: list[str] = []
        self.finished: list[str] = []
        self._port = port
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(_NUM_CLIENTS)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        choose = random.Random(number)
        count = 0
        while not self.stop.is_set():
            request_id = f"{os.getpid()}-{number}-{count}-{self._port}-{time.monotonic_ns()}"
            count += 1
            with self._lock:
                self.sent.append(request_id)
            try:
                is_whole = self._ask(request_id, choose.randint(1, 8), choose.random() < 0.7)
            except (OSError, http.client.HTTPException):
                return
            if is_whole:
                with self._lock:
                    self.finished.append(request_id)

    def _ask(self, request_id: str, max_tokens: int, stream: bool) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            body = {
                "prompt": [1, 2, 3, 4, 5],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": stream,
            }
            headers = {"content-type": "application/json", "x-request-id": request_id}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            # A choice's finish is all that a client needs to take an answer for whole.
            return (b'"finish_reason":"length"' in content) or not stream
        finally:
            connection.close()


def _check_kills(folder: Path, num_requests: int, num_kills: int) -> None:
    database = str(folder / "usage.db")
    model = folder / "model"
    model.mkdir()
    write_text_model(model)
    sent: list[str] = []
    finished: list[str] = []
    for _ in range(num_kills):
        with serve_process(folder, str(model), "--accounts-db", database) as server:
            clients = Clients(int(server.url.rpartition(":")[2]))
            deadline_s = time.monotonic() + 120
            while len(clients.finished) < num_requests / num_kills:
                assert time.monotonic() < deadline_s, server.output()
                time.sleep(0.005)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(30)
            clients.stop.set()
            for thread in clients.threads:
                thread.join(60)
            sent += clients.sent
            finished += clients.finished
    assert len(finished) >= num_requests
    records = [one for _, one in UsageStore(open_database(database)).page(UsageFilter(), 10**6)]
    counts = Counter(one.request_id for one in records)
    assert set(finished) <= set(counts)
    assert max(counts.values()) == 1
    assert set(counts) <= set(sent)
    # Of each client at most the one that was under way when the server went.
    assert len(set(counts) - set(finished)) <= _NUM_CLIENTS * num_kills


def test_finished_requests_are_booked_once(tmp_path: Path) -> None:
    _check_kills(tmp_path, num_requests=60, num_kills=1)


@pytest.mark.slow
def test_finished_requests_are_booked_once_in_a_thousand(tmp_path: Path) -> None:
    _check_kills(tmp_path, num_requests=1000, num_kills=5)
