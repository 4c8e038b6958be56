"""How loading and fetching show that they go on: bars on a terminal, few whole lines where output is recorded."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tqdm import tqdm

LINE = "{desc}: {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left\n"
LINE_INTERVAL_S = 5.0


def byte_progress(what: str, done: int, total: int | None) -> "tqdm[NoReturn]":
    """Progress over `total` bytes (None: not known), of which `done` are there already."""
    options: dict[str, Any] = {} if sys.stderr.isatty() else {"mininterval": LINE_INTERVAL_S, "bar_format": LINE}
    return tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=what, **options)


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Switches transformers' progress bars off in the block unless they go to a terminal."""
    from transformers.utils import logging  # seconds to import, and not needed to fetch

    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
