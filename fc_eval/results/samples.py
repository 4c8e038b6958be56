"""What a run kept of every window and question, so that two runs can be paired: `Windows` and `Samples`."""

import gzip
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError
from fc_eval.results.files import AGAIN, read
from fc_eval.results.layers import Layers, read_layers

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class Windows:
    """Per-window losses of one perplexity evaluation.

    Attributes:
        nll_sum: [n] float64, summed negative log-likelihood in nats.
        tokens: [n] int64, predicted tokens.
        cluster: [n] int64, document; equal ids are the same document.
        kl_mean: [n] float64, mean KL divergence from the baseline in nats, None where not measured.
        same_top1: [n] float64, share of positions with the baseline's most likely token, None where not measured.
    """

    nll_sum: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    cluster: npt.NDArray[np.int64]
    kl_mean: npt.NDArray[np.float64] | None = None
    same_top1: npt.NDArray[np.float64] | None = None

    @property
    def perplexity(self) -> float:
        """exp of the mean loss per token; infinite where it overflows."""
        mean = float(self.nll_sum.sum() / self.tokens.sum())
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, eq=False)
class Samples:
    """Per-question outcomes of one task or group, ordered by (task, hash, id): equal questions stand at equal places.

    Attributes:
        doc_hash: hash of each question's content.
        metrics: values per metric in that order, 0 and 1 for accuracies. A name is as in `result.json`: 'acc',
            'exact_match,strict-match' for one filter, 'piqa/acc' for one of several tasks (then its questions only).
    """

    doc_hash: tuple[str, ...]
    metrics: Mapping[str, npt.NDArray[np.float64]]


Measured = Windows | Layers | Samples


def read_windows(folder: Path, name: str) -> Windows:
    """Reads `windows_<name>.npz`.

    Raises:
        FcEvalError: missing, cut off, or with arrays that do not fit together.
    """
    file = folder / f"windows_{name}.npz"
    return read(file, "npz data", lambda data: _windows(file, data))


def _windows(file: Path, data: bytes) -> Windows:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        known = {key: arrays[key] for key in Windows.__dataclass_fields__ if key in arrays.files}
    missing = [key for key in ("nll_sum", "tokens", "cluster") if key not in known]
    if missing:
        raise FcEvalError(f"{file} has no array {missing[0]!r}: {AGAIN}")
    n = len(known["tokens"])
    if n == 0 or any(value.shape != (n,) for value in known.values()) or known["tokens"].min() < 1:
        raise FcEvalError(f"{file} has empty arrays or arrays of different lengths: {AGAIN}")
    return Windows(
        **{key: value.astype(np.int64 if key in ("tokens", "cluster") else np.float64) for key, value in known.items()}
    )


def read_samples(folder: Path, name: str) -> Samples:
    """Reads `samples_<name>.jsonl`, gzipped or not; a field that is a plain number in all rows counts as a metric.

    Raises:
        FcEvalError: missing, cut off, a row without its document's hash, or a filter that has a document twice or not
            at all.
    """
    file = folder / f"samples_{name}.jsonl"
    packed = file.with_name(file.name + ".gz")
    return read(packed if packed.exists() else file, "text", lambda data: _samples(file.name, data))


def _samples(file: str, data: bytes) -> Samples:
    lines = (gzip.decompress(data) if data[:2] == GZIP_MAGIC else data).decode().splitlines()
    documents: set[tuple[str, str, int]] = set()
    scopes: dict[tuple[str, str], list[tuple[str, str, int, dict[str, Any]]]] = {}
    seen: dict[tuple[str, str], set[int]] = {}
    for line_number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            document = str(row.get("task", "")), str(row["doc_hash"]), int(row["doc_id"])
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            raise FcEvalError(f"line {line_number} of {file} is cut off or lacks doc_hash or doc_id: {AGAIN}") from None
        documents.add(document)
        filtered = seen.setdefault((document[0], str(row.get("filter", "none"))), set())
        if document[2] in filtered:
            raise FcEvalError(f"line {line_number} of {file} repeats the row of document {document[2]}: {AGAIN}")
        filtered.add(document[2])
        suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
        for prefix in ("", f"{document[0]}/"):
            scopes.setdefault((prefix, suffix), []).append((*document, row))
    if not documents:
        raise FcEvalError(f"{file} is empty: {AGAIN}")
    if any(ids != {doc_id for of, _, doc_id in documents if of == task} for (task, _), ids in seen.items()):
        raise FcEvalError(f"{file} lacks rows of a filter for some documents: {AGAIN}")
    metrics = {}
    for (prefix, suffix), rows in scopes.items():
        rows.sort(key=lambda entry: entry[:3])
        for key, values_n in _numbers([row for *_, row in rows]).items():
            metrics[f"{prefix}{key}{suffix}"] = values_n
    return Samples(tuple(doc_hash for _, doc_hash, _ in sorted(documents)), metrics)


def read_checked(folder: Path, name: str, kind: str, samples: int, metrics: Mapping[str, float]) -> Measured:
    """What an evaluation kept, which must be as much as it says and give the numbers that it says.

    Args:
        folder: the run folder.
        name: of the evaluation.
        kind: 'perplexity', 'layer_error' or 'task'.
        samples: how many windows or questions there should be.
        metrics: what was computed from them.

    Raises:
        FcEvalError: a file is missing, does not read, or belongs to other numbers.
    """
    if kind == "layer_error":
        layers = read_layers(folder, name)
        _complete(name, samples, int(metrics.get("windows", math.nan)))
        for metric, value in layers.totals().items():
            _agree(f"{name} {metric}", metrics.get(metric, math.nan), value, 1e-9)
        return layers
    if kind == "perplexity":
        windows = read_windows(folder, name)
        _complete(name, samples, len(windows.tokens))
        _agree(f"{name} perplexity", metrics.get("perplexity", math.nan), windows.perplexity, 1e-3)
        return windows
    answers = read_samples(folder, name)
    _complete(name, samples, len(answers.doc_hash))
    for metric in ("acc", "acc_norm"):  # other metrics need not be plain means
        if metric in metrics and metric in answers.metrics:
            _agree(f"{name} {metric}", metrics[metric], float(answers.metrics[metric].mean()), 1e-6)
    return answers


def _complete(name: str, said: int, kept: int) -> None:
    if said != kept:
        raise FcEvalError(f"its results say {said} samples of {name}, but {kept} are kept: {AGAIN}")


def _agree(what: str, said: float, kept: float, rtol: float) -> None:
    # The sums may have been made in another precision or order; a file of another run differs by far more.
    if math.isfinite(said) and math.isfinite(kept) and not math.isclose(said, kept, rel_tol=rtol, abs_tol=1e-6):
        raise FcEvalError(
            f"its results say {what} {said:.6g}, but its samples give {kept:.6g}: the files do not belong together, "
            f"{AGAIN}"
        )


def _numbers(rows: list[dict[str, Any]]) -> dict[str, npt.NDArray[np.float64]]:
    """Fields that are plain numbers in all rows, apart from those that tell rows apart or say what was right."""
    keys = [key for key in rows[0] if key not in ("doc_id", "target")]
    keys = [key for key in keys if all(isinstance(row.get(key), (int, float)) for row in rows)]
    return {key: np.array([float(row[key]) for row in rows]) for key in keys}
