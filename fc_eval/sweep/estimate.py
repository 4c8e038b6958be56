"""How long a run may take, from finished runs in the same store."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.results.store import RunFolder
from fc_eval.sweep.planned_run import PlannedRun


@dataclass(frozen=True)
class _Timed:
    """What an evaluation took: seconds for so many samples, the whole of them or as many as its limit let in."""

    seconds: float
    samples: int
    whole: bool
    limit: int | None

    def seconds_for(self, limit: int | None) -> float:
        """Seconds under another limit, in proportion to the samples; NaN where their number is not known."""
        if limit == self.limit:
            return self.seconds
        if limit is None:
            return self.seconds if self.whole else math.nan
        return self.seconds * (min(limit, self.samples) if self.whole else limit) / self.samples


def estimate(run: PlannedRun) -> float | None:
    """Seconds that a run may take, None where nothing says so.

    Each evaluation takes what it took in finished runs of the same model, device, W and processes, the longest of them
    where there are several; in proportion where these had another limit.
    """
    config = run.plan.config.as_dict()
    setups: list[float] = []
    timed: dict[str, list[_Timed]] = {}
    for file in run.store.root.glob("*/result.json"):
        with suppress(FcEvalError, OSError, KeyError, TypeError, ValueError):  # a report says what is broken
            setting, setup_s, evaluations = _times_of(file, file.stat().st_mtime_ns)
            if setting == _setting(config):
                setups.append(setup_s)
                for key, found in evaluations.items():
                    timed.setdefault(key, []).append(found)
    seconds = max(setups, default=math.nan)
    for spec in config["eval"]["specs"]:
        known = [s for found in timed.get(_key(spec), ()) if not math.isnan(s := found.seconds_for(spec["limit"]))]
        seconds += max(known, default=math.nan)
    return None if math.isnan(seconds) else seconds


@cache
def _times_of(result: Path, changed_ns: int) -> tuple[tuple[Any, ...], float, dict[str, _Timed]]:
    """A finished run's setting, the seconds until its first evaluation, and its evaluations' by what they are.

    Remembered until the file changes.
    """
    folder = RunFolder(result.parent, "")
    config, found = folder.read_config()["config"], folder.read_result()
    evaluations = {}
    for spec in config["eval"]["specs"]:
        seconds, info = found["time"]["evals_s"][spec["name"]], found["evals"][spec["name"]]
        samples, whole = max(1, int(info["samples"])), not info["partial"]
        evaluations[_key(spec)] = _Timed(float(seconds), samples, whole, spec["limit"])
    return _setting(config), float(found["time"]["setup_s"]), evaluations


def _setting(config: Mapping[str, Any]) -> tuple[Any, ...]:
    model = config["model"]
    return model["name"], model["weights"], config["device"], config["tp"], config.get("processes", 1)


def _key(spec: Mapping[str, Any]) -> str:
    """An evaluation apart from its limit and the place of its file."""
    return json.dumps({key: value for key, value in spec.items() if key not in ("path", "limit")}, sort_keys=True)
