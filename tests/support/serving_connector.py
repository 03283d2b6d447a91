"""A process that serves blocks, to be killed, stopped and started again.

python -m support.serving_connector KIND ADDRESS NAME OWNER NUM_BLOCKS (small|large)
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.array_memory import LARGE, SMALL, ArrayMemory
from support.connector_ends import End
from twinfire.protocol.addresses import Address, parse_address
from twinfire.protocol.messages import Peer
from twinfire.protocol.worker_config import ConnectorKind


class ServingProcess:
    def __init__(
        self,
        kind: ConnectorKind,
        listen: Address,
        *,
        name: str = "there",
        owner: int = 7,
        num_blocks: int = 64,
        size: str = "small",
    ) -> None:
        arguments = [kind, str(listen), name, str(owner), str(num_blocks), size]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.serving_connector", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        assert address, "the serving process did not start"
        self.peer = Peer(name, "", address)
        self.expected = ArrayMemory(num_blocks, LARGE if size == "large" else SMALL, owner).fill()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def serving_process(*args: object, **options: object) -> Iterator[ServingProcess]:
    process = ServingProcess(*args, **options)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        with suppress(ValueError):
            process.kill()


def main(kind: str, address: str, name: str, owner: str, num_blocks: str, size: str) -> None:
    assert kind in ("socket", "nixl")
    layout = LARGE if size == "large" else SMALL
    memory = ArrayMemory(int(num_blocks), layout, int(owner)).fill()
    end = End("nixl" if kind == "nixl" else "socket", memory, parse_address(address), name=name)
    print(end.peer.data, flush=True)
    sys.stdin.read()
    end.connector.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
