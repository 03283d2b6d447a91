"""A bar for a worker's start, on standard error: one line a stage where that is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from twinfire.protocol.messages import Failed, Loading, Ready


class LoadProgressBar:
    """Follows the states that a worker announces. Safe to close more than once."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def update(self, state: Loading | Ready | Failed) -> None:
        """Show a state; anything but loading ends the bar."""
        if not isinstance(state, Loading):
            self.close()
        elif self._console.is_terminal:
            self._draw(state)
        elif state.stage != self._stage:
            self._console.print(f"loading: {state.stage}", highlight=False)
            self._stage = state.stage

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _draw(self, state: Loading) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("loading")
        assert self._task is not None
        self._progress.update(
            self._task,
            description=f"loading: {state.stage}",
            completed=state.done,
            total=state.total or None,
        )
