"""How far an evaluation has come."""

from collections.abc import Callable

# Called with (done, total) after each batch: windows of a perplexity, requests of a task.
Progress = Callable[[int, int], None]


class Ticker:
    """Counts what is done and reports it; requests of a task run longest first, so the rest goes faster."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def advance(self, count: int) -> None:
        """Counts `count` more."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
