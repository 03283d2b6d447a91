"""Speed of reading KV blocks of another process, by every connector, beside copying in one's own.

Blocks are the default model's (737,280 bytes in bf16), by default in the native kernels' own
memory, so that packing and unpacking count. For each number of blocks all ways alternate, round by
round; each cell is the median MB/s. NIXL is left out where it is not installed; `nixl tcp` is what
it does between hosts, forced by UCX_TLS.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from rich.console import Console

from twinfire.bench.machine import ForeignCpu, describe_machine
from twinfire.bench.report_table import markdown_table
from twinfire.cache.kv_group import KvGroup, KvLayout, WireBuffer, WireBytes
from twinfire.kernels.cpu import _native
from twinfire.protocol.addresses import Address, TcpAddress, UnixAddress, parse_address
from twinfire.protocol.messages import Peer
from twinfire.protocol.worker_config import ConnectorKind
from twinfire.transfer.connector import Connector, ReadFailed, RemoteBlock
from twinfire.transfer.connectors import make_connector

LAYOUT = KvLayout((KvGroup("target", 30, 3, 64, "bf16"),))
SECRET = b"secret of the transfer benchmark"
SERVE = "--serve"
GENERATION = 1


class NativeMemory:
    """Blocks in the native kernels' layout; implements `KvMemory`."""

    kv_layout = LAYOUT

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        group = LAYOUT.groups[0]
        self._kv = _native.KvCache(
            group.num_layers, group.num_kv_heads, group.head_dim, group.dtype, num_blocks
        )

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        self._kv.export_blocks(list(block_ids), into)

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        self._kv.import_blocks(list(block_ids), content)

    def block_generation(self, block_id: int) -> int:
        return GENERATION


class PlainMemory:
    """Blocks in the wire layout, so that packing and unpacking are one copy each."""

    kv_layout = LAYOUT

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks = np.zeros((num_blocks, LAYOUT.bytes_per_block), np.uint8)

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        for block, block_id in zip(_rows(into, block_ids), block_ids, strict=True):
            block[:] = self._blocks[block_id]

    def import_blocks(self, block_ids: Sequence[int], content: WireBytes) -> None:
        for block_id, block in zip(block_ids, _rows(content, block_ids), strict=True):
            self._blocks[block_id] = block

    def block_generation(self, block_id: int) -> int:
        return GENERATION


def _rows(wire: WireBytes, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(wire, np.uint8).reshape(len(block_ids), -1)


Memory = NativeMemory | PlainMemory
MEMORIES: dict[str, type[NativeMemory] | type[PlainMemory]] = {
    "native": NativeMemory,
    "plain": PlainMemory,
}


class Way:
    """One connector between this process and one that it starts."""

    def __init__(
        self,
        kind: ConnectorKind,
        listen: Address,
        memory_name: str,
        memory: Memory,
        ucx_transports: str | None = None,
    ) -> None:
        self._memory = memory
        variables = dict(os.environ)
        if ucx_transports is not None:
            # Read by UCX when an agent is made, here and there.
            variables["UCX_TLS"] = os.environ["UCX_TLS"] = ucx_transports
        arguments = [kind, str(listen), memory_name, str(memory.num_blocks)]
        command = [sys.executable, __file__, SERVE, *arguments]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._peer = Peer("there", "", self._process.stdout.readline().strip())
        self._connector = _connector(kind, memory, TcpAddress("127.0.0.1", 0), "here")
        os.environ.pop("UCX_TLS", None)

    def read(self, num_blocks: int) -> None:
        ended = threading.Event()
        failures: list[ReadFailed | None] = []

        def on_done(failure: ReadFailed | None) -> None:
            failures.append(failure)
            ended.set()

        remote = [RemoteBlock(block_id, GENERATION) for block_id in range(num_blocks)]
        self._connector.read(self._peer, remote, range(num_blocks), on_done)
        ended.wait()
        if failures[0] is not None:
            raise failures[0]

    def check(self, expected: bytearray) -> None:
        """Raise unless the blocks arrive as they are."""
        self.read(self._memory.num_blocks)
        if exported(self._memory) != expected:
            raise SystemExit("blocks arrived changed")

    def close(self) -> None:
        self._connector.close()
        self._process.communicate("")


def make_memory(name: str, num_blocks: int, *, filled: bool) -> Memory:
    memory = MEMORIES[name](num_blocks)
    for block_id in range(num_blocks if filled else 0):
        chance = np.random.default_rng(block_id)
        words = chance.integers(0, 2**16, LAYOUT.bytes_per_block // 2, np.uint16)
        memory.import_blocks([block_id], words.tobytes())
    return memory


def exported(memory: Memory) -> bytearray:
    wire = bytearray(memory.num_blocks * LAYOUT.bytes_per_block)
    memory.export_blocks(range(memory.num_blocks), wire)
    return wire


def main() -> int:
    if sys.argv[1:2] == [SERVE]:
        return serve(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], metavar="N"
    )
    parser.add_argument("--memory", choices=MEMORIES, default="native", help="layout of the blocks")
    parser.add_argument("--rounds", type=int, default=15, help="reads of each (default: 15)")
    measure(Console(soft_wrap=True), parser.parse_args())
    return 0


def serve(kind: str, listen: str, memory_name: str, num_blocks: str) -> int:
    """Be the other process until standard input ends."""
    memory = make_memory(memory_name, int(num_blocks), filled=True)
    connector = _connector(
        "nixl" if kind == "nixl" else "socket", memory, parse_address(listen), "there"
    )
    print(connector.address, flush=True)
    sys.stdin.read()
    connector.close()
    return 0


def measure(console: Console, args: argparse.Namespace) -> None:
    """Print the table."""
    num_blocks = max(args.blocks)
    source = make_memory(args.memory, num_blocks, filled=True)
    target = make_memory(args.memory, num_blocks, filled=False)
    expected = exported(source)
    wire = np.frombuffer(expected, np.uint8)
    copy = np.zeros_like(wire)
    one_block = bytearray(LAYOUT.bytes_per_block)

    def copy_wire(count: int) -> None:
        size = count * LAYOUT.bytes_per_block
        copy[:size] = wire[:size]

    def repack(count: int) -> None:
        for block_id in range(count):
            source.export_blocks([block_id], one_block)
            target.import_blocks([block_id], one_block)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loopback = TcpAddress("127.0.0.1", 0)
        ways = {
            "socket unix": Way("socket", UnixAddress(str(folder / "kv.sock")), args.memory, target),
            "socket tcp": Way("socket", loopback, args.memory, target),
        }
        if importlib.util.find_spec("nixl_cu12") is not None:
            ways["nixl one host"] = Way("nixl", loopback, args.memory, target)
            ways["nixl tcp"] = Way("nixl", loopback, args.memory, target, ucx_transports="tcp")
        for way in ways.values():
            stack.callback(way.close)
        for way in ways.values():
            way.check(expected)
        steps: dict[str, Callable[[int], None]] = {"memcpy": copy_wire, "pack, unpack": repack}
        steps |= {name: way.read for name, way in ways.items()}
        foreign = ForeignCpu()
        rows = [[str(count), *_rates(steps, count, args.rounds)] for count in sorted(args.blocks)]
        console.print(markdown_table(["blocks", *steps], rows))
        machine = describe_machine()
        taken = f"other processes took {foreign.share():.0%} of them"
        console.print(f"{machine.cores} cores, {machine.cpu}; {taken}")


def _rates(steps: dict[str, Callable[[int], None]], count: int, rounds: int) -> list[str]:
    """Return the median MB/s of each step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step(count)
            seconds[name].append(time.perf_counter() - started)
    megabytes = count * LAYOUT.bytes_per_block / 1e6
    return [f"{megabytes / median(taken):,.0f}" for taken in seconds.values()]


def _connector(kind: ConnectorKind, memory: Memory, listen: Address, name: str) -> Connector:
    return make_connector(
        kind, memory, instance_id=name, listen=listen, secret=SECRET, tls=None, timeout_s=30.0
    )


if __name__ == "__main__":
    sys.exit(main())
