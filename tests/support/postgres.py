"""A real PostgreSQL server of the test's own, on a Unix socket in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_USER = "twinfire"
_OTHER_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def postgres_programs() -> Path | None:
    """Return the folder of `initdb` and `postgres`, None where there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    return next((place for place in _OTHER_PLACES if (place / "initdb").exists()), None)


@contextmanager
def running_postgres(programs: Path) -> Iterator[str]:
    """Yield the URL of an empty database. The server refuses to run as root, so root lends it a
    user of the system."""
    user = _unprivileged_user()
    with tempfile.TemporaryDirectory(prefix="tf-pg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        identity = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid}

        def call(*words: str) -> None:
            done = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, timeout=60, **identity
            )
            assert done.returncode == 0, done.stdout + done.stderr

        call(
            str(programs / "initdb"),
            *("-D", str(data), "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-sync"),
        )
        control = str(programs / "pg_ctl")
        options = f"-c listen_addresses='' -k {folder} -c shared_buffers=16MB -c fsync=off"
        call(control, "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://{_USER}@/postgres?host={folder}"
        finally:
            call(control, "-D", str(data), "-m", "immediate", "-w", "stop")


def _unprivileged_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError("there is no user that the database could run as")
