"""Taking a socket file to listen on, whatever was left in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

_PROBE_TIMEOUT_S = 1.0


def listen_unix(path: str, backlog: int = 128) -> socket.socket:
    """Return a socket that listens at `path`, to which only this user may connect.

    The file of a process that is gone is replaced. OSError when somebody listens there (EADDRINUSE)
    or when something else than a socket is there.
    """
    _remove_abandoned(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        # Nobody can connect before it listens.
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_abandoned(path: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        if probe.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
