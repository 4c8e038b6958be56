"""Reads data sets: from the mirror where it has a folder for the id, otherwise from the Hub.

Files of the mirror are read with pyarrow straight into memory: no cache folder, no lock, no network.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import DatasetRef, dataset_folder, describe, files_of

T = TypeVar("T")

# The Hub keeps C4 in shards; the perplexity protocols and the calibration text read the first of their split only.
_HUB_FILES = {
    "allenai/c4": {
        "validation": "en/c4-validation.00000-of-00008.json.gz",
        "train": "en/c4-train.00000-of-01024.json.gz",
    }
}


@dataclass(frozen=True)
class Column:
    """The texts of one column, in order, and where they came from (for the record)."""

    texts: list[str]
    origin: dict[str, Any]


def read_table(file: Path) -> pa.Table:
    """One parquet, JSON-lines or gzipped JSON-lines file.

    Raises:
        FcEvalError: the file cannot be read or is cut off.
    """
    try:
        if file.name.endswith(".parquet"):
            return pa.parquet.read_table(file, memory_map=True)
        return pa.json.read_json(file)
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0].strip().rstrip(".") if str(error) else type(error).__name__
        raise FcEvalError(f"{file} cannot be read ({reason}): it may be cut off, copy it again") from None


def read_split(files: list[Path]) -> pa.Table:
    """The rows of all files of one split, in the order of their names.

    Raises:
        FcEvalError: a file cannot be read, or the files differ in their columns.
    """
    try:
        return pa.concat_tables([read_table(file) for file in files])
    except pa.ArrowInvalid:
        raise FcEvalError(
            f"the files {', '.join(map(str, files))} differ in their columns: expected one data set"
        ) from None


def from_hub(dataset_id: str, root: Path | None, call: Callable[[], T]) -> T:
    """Runs a call that loads from the Hub, and says in one sentence why it cannot.

    Raises:
        FcEvalError: no network and nothing in the cache, or no such data set, config or split.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    http_error: type[Exception] = HfHubHTTPError.__bases__[
        0
    ]  # of whichever HTTP library this version of the Hub's client uses
    advice = f"copy it to {root / dataset_id}" if root else "mirror it in a folder and give data.root=FOLDER"
    try:
        return call()
    except datasets.exceptions.DatasetNotFoundError:
        raise FcEvalError(
            f"data set {dataset_id!r} is not on the Hub, or needs a token (HF_TOKEN): check the name, or {advice}"
        ) from None
    except (ConnectionError, http_error, FileNotFoundError) as error:
        raise FcEvalError(
            f"data set {dataset_id!r} cannot be fetched ({type(error).__name__}: no network, or offline mode): {advice}"
        ) from None
    except ValueError as error:
        if isinstance(error, FcEvalError):
            raise
        # datasets raises ValueError for an unknown config or split, with its own list of the known ones.
        raise FcEvalError(f"data set {dataset_id!r} on the Hub: {' '.join(str(error).split())}") from None


def load_column(ref: DatasetRef, column: str, root: Path | None) -> Column:
    """One column of text, from the mirror or the Hub.

    Raises:
        FcEvalError: folder, config, split or column missing, an unreadable file, or no network.
    """
    folder = dataset_folder(ref.id, root)
    if folder is not None:
        assert root is not None  # without a root there is no folder
        files = files_of(ref, root)
        table = read_split(files[:1] if ref.id in _HUB_FILES else files)
        where, revision = "data.root", None
        if column not in table.column_names:
            raise FcEvalError(f"{files[0]} has no column {column!r}: it has {', '.join(table.column_names)}")
        texts = table.column(column).to_pylist()
    else:
        dataset = from_hub(ref.id, root, lambda: _hub_split(ref))
        where, revision = "hub", hub_revision(dataset.info.download_checksums or {})
        texts = list(dataset[column])
    bad = next((index for index, text in enumerate(texts) if not isinstance(text, str)), None)
    if bad is not None:
        raise FcEvalError(f"row {bad} of {ref.id!r} has no text in column {column!r}: expected a string")
    return Column(texts, {**describe(ref), "where": where, "revision": revision})


def _hub_split(ref: DatasetRef) -> Any:
    import datasets

    if ref.id in _HUB_FILES:
        # One of several shards: without no_checks the library misses the others.
        return datasets.load_dataset(
            ref.id,
            data_files={ref.split: _HUB_FILES[ref.id][ref.split]},
            split=ref.split,
            verification_mode="no_checks",
        )
    return datasets.load_dataset(ref.id, ref.config, split=ref.split)


def hub_revision(addresses: Iterable[str]) -> str | None:
    """The commit that a loaded data set came from, read from its file addresses (hf://datasets/OWNER/NAME@COMMIT/...).

    >>> hub_revision({"hf://datasets/allenai/c4@1588ec454efa1a09f29cd18ddd04fe05fc8653a2/en/x.json.gz": {}})
    '1588ec454efa1a09f29cd18ddd04fe05fc8653a2'
    """
    found = {match.group(1) for url in addresses if (match := re.search(r"@([0-9a-f]{40})/", url))}
    return found.pop() if len(found) == 1 else None


def check_commits(protocol: Mapping[str, Any], planned: Mapping[str, str | None]) -> None:
    """Makes sure that an evaluation read the commits of the Hub that it was to read.

    Args:
        protocol: of the evaluation.
        planned: {OWNER/NAME: commit}, None where it was not known.

    Raises:
        FcEvalError: a data set was loaded from another commit.
    """
    loaded = dict(protocol.get("commits") or {})
    if protocol.get("revision"):
        loaded[str(protocol["dataset"])] = protocol["revision"]
    for name, commit in loaded.items():
        if planned.get(name) not in (None, commit):
            raise FcEvalError(
                f"data set {name!r} was loaded from commit {commit} of the Hub, but {planned[name]} was planned: it "
                "moved, or the cache holds another one; run it again"
            )


def loaded_commits(dataset: Any) -> dict[str, str]:
    """{OWNER/NAME: commit} of the repositories that a data set (or its splits) came from, as far as it tells."""
    addresses: dict[str, list[str]] = {}
    for split in dataset.values() if isinstance(dataset, dict) else [dataset]:
        for url in getattr(getattr(split, "info", None), "download_checksums", None) or {}:
            if match := re.search(r"datasets/([^/]+/[^/@]+)@", url):
                addresses.setdefault(match.group(1), []).append(url)
    return {name: commit for name, urls in addresses.items() if (commit := hub_revision(urls)) is not None}
