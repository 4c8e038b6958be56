"""How far an evaluation has come."""

from collections.abc import Callable

# Called with (done, total) after each batch: windows of a perplexity, requests of a task.
Progress = Callable[[int, int], None]


class Ticker:
    """Counts what is done and reports it; requests of a task run longest first, so the rest goes faster.

    Where several processes share the work, one counts for all: they have about equally much to do. Then it has not come
    to the end before `finish` says so.
    """

    def __init__(self, progress: Progress | None, total: int, processes: int = 1) -> None:
        self._progress, self._total, self._processes, self._done = progress, total, processes, 0

    def advance(self, count: int) -> None:
        """Counts `count` more of this process."""
        known = self._total if self._processes == 1 else self._total - 1
        self._report(min(self._done + count * self._processes, known))

    def finish(self) -> None:
        """All is done, in the other processes too."""
        if self._done < self._total:
            self._report(self._total)

    def _report(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(self._done, self._total)
