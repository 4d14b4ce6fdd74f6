"""A progress bar for work that usually takes no time: it shows itself when a second has passed, on a terminal alone."""

import sys
import time

from rich.console import Console
from rich.progress import Progress as Bar

_PATIENCE = 1.0


class Progress:
    """Counts `total` steps under a title, on standard error.

    It draws when it advances and at no other time: a thread that draws would disturb what is being measured.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._done = 0
        self._start = time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is None and time.monotonic() - self._start > _PATIENCE and sys.stderr.isatty():
            self._bar = Bar(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, refresh=True)
