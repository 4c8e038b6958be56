"""How long a run may take, from finished runs in the same store."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.planned_run import PlannedRun
from fc_eval.results.store import RunFolder


def estimate(run: PlannedRun) -> float | None:
    """Seconds that a finished run of the same model, device and evaluations took, None where there is none."""
    wanted = _what_takes_time(run.plan.config.as_dict())
    times = []
    for file in run.store.root.glob("*/result.json"):
        with suppress(FcEvalError, OSError, KeyError, TypeError, ValueError):  # a report says what is broken
            key, seconds = _time_of(file, file.stat().st_mtime_ns)
            times += [seconds] if key == wanted else []
    return max(times) if times else None


@cache
def _time_of(result: Path, changed_ns: int) -> tuple[tuple[Any, ...], float]:
    """What took time in a finished run, and how many seconds; remembered until the file changes."""
    folder = RunFolder(result.parent, "")
    return _what_takes_time(folder.read_config()["config"]), float(folder.read_result()["time"]["total_s"])


def _what_takes_time(config: Mapping[str, Any]) -> tuple[Any, ...]:
    specs = [{key: value for key, value in spec.items() if key != "path"} for spec in config["eval"]["specs"]]
    return config["model"]["name"], config["device"], config["tp"], config.get("processes", 1), specs
