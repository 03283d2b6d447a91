"""Hosts on one machine: network namespaces whose links meet in a switch and can be taken down.

Needs root and iproute2. A thread is `on` one host at a time: sockets that it opens and processes
that it starts are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
SUBNET = "10.213.47"


class NetworkUnavailable(Exception):
    """Namespaces cannot be made here; the message says why."""


class NetworkHosts:
    """Use as a context manager; the hosts are gone afterwards."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"twinfire-{os.getpid()}"
        self._names = list(names)
        self._made: list[str] = []

    def __enter__(self) -> NetworkHosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def address(self, name: str) -> str:
        """Return a host's IPv4 address."""
        return f"{SUBNET}.{self._names.index(name) + 1}"

    def set_link(self, name: str, *, up: bool) -> None:
        """Plug a host's cable in, or pull it at the switch, of which connections are not told."""
        port = f"port{self._names.index(name)}"
        _ip("-n", self._space("switch"), "link", "set", port, "up" if up else "down")

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Have this thread be on a host."""
        with open("/proc/thread-self/ns/net", "rb") as before:
            with open(f"/var/run/netns/{self._space(name)}", "rb") as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise NetworkUnavailable("`ip` (iproute2) is not installed")
        if os.geteuid() != 0:
            raise NetworkUnavailable("network namespaces need root")
        for name in ("switch", *self._names):
            _ip("netns", "add", self._space(name))
            self._made.append(self._space(name))
        switch = self._space("switch")
        _ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(self._names):
            space, port = self._space(name), f"port{number}"
            near = ("link", "add", "name", port, "netns", switch)
            _ip(*near, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        for space in self._made:
            with contextlib.suppress(NetworkUnavailable):
                _ip("netns", "delete", space)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkUnavailable(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET) != 0:
        raise NetworkUnavailable(f"setns: {os.strerror(ctypes.get_errno())}")
