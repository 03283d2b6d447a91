"""A progress bar for pulling a model, on standard error. Knows not where models come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twinfire.artifacts.model_store import PullProgress

# Imported when there is something to draw: most starts pull nothing.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


@contextmanager
def pull_progress(name: str, console: Console | None = None) -> Iterator[PullProgress]:
    """Yield a callback that draws one bar per stage; draws nothing when nothing is reported."""
    progress: Progress | None = None
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        nonlocal progress
        if progress is None:
            progress = _download_progress(console)
            progress.start()
        if stage not in tasks:
            tasks[stage] = progress.add_task(f"{name}: {stage}", total=total or None)
        progress.update(tasks[stage], completed=done)

    try:
        yield report
    finally:
        if progress is not None:
            progress.stop()


def _download_progress(console: Console | None) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console or Console(stderr=True))
