"""A bar for a worker's start, on standard error: one line a stage where that is no terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from twinfire.protocol.messages import Failed, Loading, Ready

# Imported when there is a terminal to draw on, and then while the worker imports its own.
if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LoadProgressBar:
    """Follows the states that a worker announces. Safe to close more than once."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def update(self, state: Loading | Ready | Failed) -> None:
        """Show a state; anything but loading ends the bar."""
        if not isinstance(state, Loading):
            self.close()
        elif sys.stderr.isatty():
            self._draw(state)
        elif state.stage != self._stage:
            print(f"loading: {state.stage}", file=sys.stderr, flush=True)
            self._stage = state.stage

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _draw(self, state: Loading) -> None:
        if self._progress is None:
            self._progress = _loading_progress()
            self._progress.start()
            self._task = self._progress.add_task("loading")
        assert self._task is not None
        self._progress.update(
            self._task,
            description=f"loading: {state.stage}",
            completed=state.done,
            total=state.total or None,
        )


def _loading_progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
