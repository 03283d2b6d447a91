"""A progress bar for pulling a model, on standard error. Knows not where models come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from twinfire.artifacts.model_store import PullProgress


@contextmanager
def pull_progress(name: str, console: Console | None = None) -> Iterator[PullProgress]:
    """Yield a callback that draws one bar per stage; draws nothing when nothing is reported."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{name}: {stage}", total=total or None)
            progress.update(tasks[stage], completed=done)

        yield report
