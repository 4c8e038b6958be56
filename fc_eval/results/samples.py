"""What a run kept of every window and question, so that two runs can be paired: `Windows` and `Samples`."""

import gzip
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError

AGAIN = "delete the folder and run again"


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


def read_windows(folder: Path, name: str) -> Windows:
    """Reads `windows_<name>.npz`.

    Raises:
        FcEvalError: missing, cut off, or with arrays that do not fit together.
    """
    file = f"windows_{name}.npz"
    try:
        with np.load(folder / file, allow_pickle=False) as data:
            arrays = {key: data[key] for key in data.files}
    except FileNotFoundError:
        raise FcEvalError(f"it has no {file}: {AGAIN}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):  # what zipfile raises
        raise FcEvalError(f"{file} is cut off or not an npz file: {AGAIN}") from None
    missing = [key for key in ("nll_sum", "tokens", "cluster") if key not in arrays]
    if missing:
        raise FcEvalError(f"{file} has no array {missing[0]!r}: {AGAIN}")
    known = {key: arrays[key] for key in Windows.__dataclass_fields__ if key in arrays}
    n = len(known["tokens"])
    if n == 0 or any(value.shape != (n,) for value in known.values()) or known["tokens"].min() < 1:
        raise FcEvalError(f"{file} has empty arrays or arrays of different lengths: {AGAIN}")
    return Windows(
        **{key: value.astype(np.int64 if key in ("tokens", "cluster") else np.float64) for key, value in known.items()}
    )


def read_samples(folder: Path, name: str) -> Samples:
    """Reads `samples_<name>.jsonl`, gzipped or not; a field that is a plain number in all rows counts as a metric.

    Raises:
        FcEvalError: missing, cut off, or a row without its document's hash.
    """
    file = f"samples_{name}.jsonl"
    try:
        packed = folder / f"{file}.gz"
        raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / file).read_bytes()
        lines = raw.decode().splitlines()
    except FileNotFoundError:
        raise FcEvalError(f"it has no {file}: {AGAIN}") from None
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error):
        raise FcEvalError(f"{file} is cut off or not text: {AGAIN}") from None
    documents: set[tuple[str, str, int]] = set()
    scopes: dict[tuple[str, str], list[tuple[str, str, int, dict[str, Any]]]] = {}
    for line_number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            document = str(row.get("task", "")), str(row["doc_hash"]), int(row["doc_id"])
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            raise FcEvalError(f"line {line_number} of {file} is cut off or lacks doc_hash or doc_id: {AGAIN}") from None
        documents.add(document)
        suffix = "" if row.get("filter", "none") == "none" else f",{row['filter']}"
        for prefix in ("", f"{document[0]}/"):
            scopes.setdefault((prefix, suffix), []).append((*document, row))
    if not documents:
        raise FcEvalError(f"{file} is empty: {AGAIN}")
    metrics = {}
    for (prefix, suffix), rows in scopes.items():
        rows.sort(key=lambda entry: entry[:3])
        for key, values_n in _numbers([row for *_, row in rows]).items():
            metrics[f"{prefix}{key}{suffix}"] = values_n
    return Samples(tuple(doc_hash for _, doc_hash, _ in sorted(documents)), metrics)


def _numbers(rows: list[dict[str, Any]]) -> dict[str, npt.NDArray[np.float64]]:
    """Fields that are plain numbers in all rows, apart from those that tell rows apart or say what was right."""
    keys = [key for key in rows[0] if key not in ("doc_id", "target")]
    keys = [key for key in keys if all(isinstance(row.get(key), (int, float)) for row in rows)]
    return {key: np.array([float(row[key]) for row in rows]) for key in keys}
