"""Evaluations that an earlier attempt at a run finished: kept if all their files read and fit together."""

import math
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.results.files import AGAIN
from fc_eval.results.samples import read_checked
from fc_eval.results.state import read_schema

# What `result.json` is made of; a summary that lacks one of them was written by another version.
_KEYS = ("kind", "label", "metrics", "samples", "partial", "protocol", "comm", "seconds")


def kept_eval(folder: Path, name: str) -> dict[str, Any] | None:
    """The summary of an evaluation that is complete, None where there is none.

    Raises:
        FcEvalError: one of its files is missing, does not read, or contradicts another.
    """
    file = folder / "evals" / f"{name}.json"
    if not file.exists():
        return None
    summary = read_schema(file)
    lacking = next((key for key in _KEYS if key not in summary), None)
    if lacking is not None:
        raise FcEvalError(f"{file} has no {lacking!r}: {AGAIN}")
    try:
        metrics = {key: math.nan if value is None else float(value) for key, value in summary["metrics"].items()}
        read_checked(folder, name, str(summary["kind"]), int(summary["samples"]), metrics)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FcEvalError):
            raise
        raise FcEvalError(f"{file} is malformed ({error}): {AGAIN}") from None
    return summary
