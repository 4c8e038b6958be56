"""Finished runs in an experiment tracker: `tracking=wandb`, `mlflow` or `trackio`.

Each run is logged once, when it is done, from its record; where and under whose name is the tracker's own business
(WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...). The record is what counts, so a tracker that fails is said, and
nothing else.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fc_eval.errors import unknown
from fc_eval.results.record import RunRecord, load_run
from fc_eval.results.store import RunFolder
from fc_eval.sweep.optional import optional

PROJECT = "fc_eval"
# What of the fingerprint names a run for a tracker, as it names the run's folder.
ID_CHARACTERS = 10

Log = Callable[[Any, str, str, Mapping[str, Any], Mapping[str, float]], None]


def tracker_of(name: str, say: Callable[[str], None] = print) -> Callable[[RunFolder], None]:
    """A function that logs the finished run of a folder.

    Args:
        name: `none`, or a key of `TRACKERS`.
        say: takes one line where a run could not be logged.

    Raises:
        FcEvalError: an unknown name, or its package is not installed.
    """
    if name == "none":
        return lambda folder: None
    if name not in TRACKERS:
        raise unknown("tracking", name, ["none", *TRACKERS])
    return partial(_track, TRACKERS[name], optional(name, f"tracking={name}"), name, say)


def _track(log: Log, module: Any, name: str, say: Callable[[str], None], folder: RunFolder) -> None:
    try:
        record = load_run(folder.path)
        log(module, folder.path.name, folder.fingerprint[:ID_CHARACTERS], settings(record), metrics(record))
    except Exception as error:  # whatever a tracker does, the run is done
        text = " ".join(str(error).split())
        say(f"! {folder.path.name}: not logged by {name}: {type(error).__name__}: {text}")


def metrics(record: RunRecord) -> dict[str, float]:
    """Everything that the run measured and is a finite number: 'wikitext2/perplexity', 'wire/effective_bits', ..."""
    found = {f"{name}/{metric}": value for name, each in record.results.items() for metric, value in each.items()}
    for key in ("effective_bits", "nominal_bits", "wire_ratio", "wire_bytes_per_token"):
        found[f"wire/{key}"] = record.wire_number(key)
    found["time/total_s"] = record.total_s
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}


def settings(record: RunRecord) -> dict[str, Any]:
    """What was run: its identity, label and configuration, each under a dotted key."""
    fixed = {"fingerprint": record.fingerprint, "baseline_fingerprint": record.baseline_fingerprint}
    fixed |= {"comm_name": record.arm.comm_full, "label": record.arm.label, "fc_eval": record.env.get("fc-eval")}
    return fixed | dict(_dotted(record.config["config"]))


def _dotted(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _wandb(wandb: Any, name: str, key: str, config: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    # Under the same id, so that a run which is logged again replaces itself.
    run = wandb.init(project=project, name=name, id=key, resume="allow", config=dict(config))
    run.summary.update(dict(numbers))
    run.finish()


def _mlflow(mlflow: Any, name: str, key: str, config: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    with mlflow.start_run(run_name=name, tags={"fc_eval.run": key}):
        mlflow.log_params({each: str(value) for each, value in config.items()})
        mlflow.log_metrics(dict(numbers))


def _trackio(trackio: Any, name: str, key: str, config: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
    trackio.init(project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=name, config=dict(config))
    trackio.log(dict(numbers))
    trackio.finish()


TRACKERS: Mapping[str, Log] = {"trackio": _trackio, "wandb": _wandb, "mlflow": _mlflow}
