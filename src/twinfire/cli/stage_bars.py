"""Progress of a command of several stages: one bar a stage, with what is to be said beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID


class StageBars:
    """Draws while it is entered."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StageBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stage: str, done: int, total: int, note: str) -> None:
        """Show how far a stage is."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, note=note)
        self._progress.update(self._tasks[stage], completed=done, total=total, note=note)
