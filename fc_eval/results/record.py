"""Reading run folders: a `RunRecord` is one finished run, checked; whatever is not finished becomes a `Problem`.

`fc_eval.results.store` writes the folders. A number enters a report only through `load_run`, so a file that is cut
off, of a newer schema, or that contradicts another file of the same folder is found here.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from fc_eval.errors import FcEvalError, os_error
from fc_eval.results.files import AGAIN
from fc_eval.results.layers import Layers
from fc_eval.results.samples import Samples, Windows, read_checked
from fc_eval.results.state import Problem, is_run, read_schema, unfinished
from fc_eval.results.store import RunFolder

# Perplexity texts and tasks in the order of the papers' tables.
EVAL_ORDER = ("wikitext2", "c4", "c4_new", "text", "piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande")


@dataclass(frozen=True)
class Arm:
    """What was run: the model, how its all-reduce is done, and how that was carried out.

    Attributes:
        model: name of the model preset.
        weights: 'native', or how weights were quantized ('W8A8 (alpha 0.85)').
        dtype: 'bf16', 'fp16' or 'fp32', that of the partial sums.
        comm: name of the comm preset; `comm_full` its full name, `label` the one for tables.
        algorithm: such as 'two_step'.
        reduce_format: full name of the reduce stage's format, None where nothing is quantized.
        gather_format: that of the gather stage, None where there is none.
        group_size: elements per group in the reduce stage, 'token', or None.
        policy: name of the layer policy, 'uniform' where every layer has the same comm.
        tp: tensor-parallel world size W.
        exec: 'emulated' or 'tp'.
        codec: which codec encoded.
        reducer: which reducer ran under exec=tp, None otherwise.
    """

    model: str
    weights: str
    dtype: str
    comm: str
    comm_full: str
    label: str
    algorithm: str
    reduce_format: str | None
    gather_format: str | None
    group_size: int | str | None
    policy: str
    tp: int
    exec: str
    codec: str
    reducer: str | None

    @property
    def stored(self) -> str:
        """'native' or 'w8a8': how the weights are stored, without what the label says of smoothing."""
        return self.weights.split(" ")[0].lower()


@dataclass(frozen=True)
class EvalInfo:
    """One evaluation: its kind (see `fc_eval.evaluate.spec`), the label for tables, samples taken, and whether all."""

    kind: str
    label: str
    samples: int
    partial: bool


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A finished run. `results` holds floats, NaN where the number was not finite; `evals` perplexities, then tasks."""

    path: Path
    fingerprint: str
    baseline_fingerprint: str | None
    arm: Arm
    results: Mapping[str, Mapping[str, float]]
    evals: Mapping[str, EvalInfo]
    wire: Mapping[str, Any]
    calls: Mapping[str, Any]
    nonfinite_groups: Mapping[str, int]
    env: Mapping[str, Any]
    protocol: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, float]
    notes: tuple[str, ...]
    total_s: float
    config: Mapping[str, Any]
    windows: Mapping[str, Windows] = field(default_factory=dict)
    samples: Mapping[str, Samples] = field(default_factory=dict)
    layers: Mapping[str, Layers] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with this run."""
        return self.baseline_fingerprint is None

    @property
    def device_type(self) -> str:
        """'cpu' or 'cuda'."""
        return str(self.env.get("device", "unknown")).split(":")[0]

    @property
    def batch_size(self) -> tuple[Any, Any]:
        """Requests per batch of tasks, and windows per forward pass of perplexity."""
        settings = self.config.get("config", self.config).get("eval") or {}
        return settings.get("batch_size"), settings.get("window_batch")

    def wire_number(self, key: str) -> float:
        """A number of the `wire` part, NaN where it is missing."""
        value = self.wire.get(key)
        return math.nan if value is None else float(value)


def load_run(path: Path) -> RunRecord:
    """Reads one finished run.

    Raises:
        FcEvalError: the folder is missing, not finished, incomplete, contradicts itself, or is of another schema.
    """
    found = read_run(Path(path))
    if isinstance(found, Problem):
        raise FcEvalError(f"run {found.name} is {found.state}: {found.reason}")
    return found


def load_runs(folders: Path | Iterable[Path], now: float | None = None) -> tuple[list[RunRecord], list[Problem]]:
    """Reads all runs in RUNS folders; a run folder itself may be given too.

    Args:
        folders: one or several RUNS folders.
        now: time in seconds since 1970 against which heartbeats are judged; None for the present.

    Returns:
        The finished runs in the order of their names, and everything else that looks like a run, with the reason.

    Raises:
        FcEvalError: a folder that is missing or may not be looked into.
    """
    records: dict[str, RunRecord] = {}
    problems: list[Problem] = []
    for root in [folders] if isinstance(folders, Path) else folders:
        if not Path(root).is_dir():
            raise FcEvalError(f"{root} is not a folder: expected one that `fc-eval run out=RUNS` wrote")
        try:
            inside = [p for p in sorted(Path(root).iterdir()) if p.is_dir() and not p.name.startswith(".")]
        except OSError as error:
            raise os_error(error, root) from None
        for path in [Path(root)] if is_run(Path(root)) else filter(is_run, inside):
            found = read_run(path, now)
            if isinstance(found, Problem):
                problems.append(found)
            elif found.fingerprint in records:
                first = records[found.fingerprint].path
                if first.resolve() != path.resolve():
                    problems.append(Problem(path.name, "left out", f"the same run as {first.name}, which is used"))
            else:
                records[found.fingerprint] = found
    return sorted(records.values(), key=lambda r: (r.path.name, r.fingerprint)), sorted(problems, key=lambda p: p.name)


def read_run(path: Path, now: float | None = None) -> RunRecord | Problem:
    """A finished run, or why it is none; never raises.

    Args:
        path: the run folder.
        now: as for `load_runs`.
    """
    try:
        try:
            problem = unfinished(path, time.time() if now is None else now)
            return problem if problem is not None else _record(path, read_schema(path / "result.json"))
        except OSError as error:
            raise os_error(error, path) from None
    except FcEvalError as error:
        return Problem(path.name, "broken", str(error).replace(f"{path}/", ""))


def _record(path: Path, result: Mapping[str, Any]) -> RunRecord:
    try:
        evals = {
            name: EvalInfo(str(e["kind"]), str(e["label"]), int(e["samples"]), bool(e["partial"]))
            for name, e in sorted(result["evals"].items(), key=_eval_order)
        }
        numbers = {
            name: {key: math.nan if value is None else float(value) for key, value in metrics.items()}
            for name, metrics in result["results"].items()
        }
        lacking = next((name for name in evals if name not in numbers), None)
        if lacking is not None:
            raise FcEvalError(f"result.json has no results of {lacking}: {AGAIN}")
        measured = {name: read_checked(path, name, e.kind, e.samples, numbers[name]) for name, e in evals.items()}
        fingerprint = str(result["fingerprint"])
        config = RunFolder(path, fingerprint).read_config()
        if config["fingerprint"] != fingerprint:
            raise FcEvalError(f"config.yaml and result.json have different fingerprints: {AGAIN}")
        return RunRecord(
            path=path,
            fingerprint=fingerprint,
            baseline_fingerprint=result["baseline_fingerprint"],
            arm=_arm(result["arm"]),
            results=numbers,
            evals=evals,
            wire=dict(result["wire"]),
            calls=dict(result["calls"]),
            nonfinite_groups=dict(result["nonfinite_groups"]),
            env=dict(result["env"]),
            protocol=dict(result["protocol"]),
            published=dict(result["published"] or {}),
            notes=tuple(result["notes"]),
            total_s=float(result["time"]["total_s"]),
            config=config,
            windows={name: found for name, found in measured.items() if isinstance(found, Windows)},
            samples={name: found for name, found in measured.items() if isinstance(found, Samples)},
            layers={name: found for name, found in measured.items() if isinstance(found, Layers)},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FcEvalError):
            raise
        what = f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({error})"
        raise FcEvalError(f"result.json {what}: {AGAIN}") from None


def _arm(said: Mapping[str, Any]) -> Arm:
    for key, kind in get_type_hints(Arm).items():
        if isinstance(said[key], bool) or not isinstance(said[key], kind):
            raise FcEvalError(f"result.json has arm.{key}={said[key]!r}: {AGAIN}")
    return Arm(**{key: said[key] for key in get_type_hints(Arm)})


def _eval_order(item: tuple[str, Mapping[str, Any]]) -> tuple[object, ...]:
    """Perplexities first, then tasks; known ones in the order of the papers, others by name."""
    name, known = item[0], item[0] in EVAL_ORDER
    return item[1]["kind"] != "perplexity", not known, EVAL_ORDER.index(name) if known else 0, name
