"""What decides the data of an evaluation: files on disk, data sets on the Hub, and what nobody can know beforehand.

For fingerprints: local files count by their contents, data sets on the Hub by their commit. Paths and names only.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import (
    dataset_folder,
    embedded_files,
    files_of,
    local_text,
    refs,
    split_files,
    task_file,
)
from fc_eval.evaluate.definitions import Definition, tasks_named, tasks_of_file
from fc_eval.evaluate.spec import EvalSpec, WindowSpec

# Names that `datasets` takes for a reader of files rather than for a data set.
READERS = ("arrow", "csv", "hdf5", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml")


@dataclass(frozen=True)
class HubData:
    """A data set on the Hub: OWNER/NAME, its config (None for the default one), and branch, tag or commit."""

    id: str
    config: str | None
    revision: str = "main"


@dataclass(frozen=True)
class Sources:
    """Local files, data sets on the Hub, and what decides the data besides and cannot be known, in words."""

    files: tuple[Path, ...] = ()
    hub: tuple[HubData, ...] = ()
    unknown: tuple[str, ...] = ()


def joined(parts: Iterable[Sources]) -> Sources:
    """All of several sources, each once and in order."""
    parts = list(parts)
    return Sources(
        tuple(dict.fromkeys(file for part in parts for file in part.files)),
        tuple(dict.fromkeys(data for part in parts for data in part.hub)),
        tuple(dict.fromkeys(text for part in parts for text in part.unknown)),
    )


def sources(spec: EvalSpec, root: Path | None) -> Sources:
    """What one evaluation reads, with `root` as the mirror of data sets.

    Raises:
        FcEvalError: a file, a config or a split is missing, or lm-eval has no such task.
    """
    own = Sources(tuple(embedded_files(spec)))
    if isinstance(spec, WindowSpec) and spec.path is not None:
        own = Sources((local_text(spec.path),))
    known = refs(spec)
    if known is None:
        assert not isinstance(spec, WindowSpec)
        is_file = spec.task.endswith((".yaml", ".yml"))
        tasks = tasks_of_file(task_file(spec.task)) if is_file else tasks_named(spec.task)
        return joined(_task(task, root) for task in tasks)
    parts = [own]
    for ref in known:
        folder = dataset_folder(ref.id, root)
        if folder is not None and root is not None:
            parts.append(Sources(tuple(files_of(ref, root))))
        else:
            parts.append(_elsewhere(ref.id, ref.config, "main"))
    return joined(parts)


def check_mirror(specs: Iterable[EvalSpec], root: Path | None) -> None:
    """Refuses a mirror with none of the data sets of these evaluations, before the Hub is asked for all of them.

    A mirror of some of them is one; of a task that only lm-eval knows the data sets are not known here.

    Raises:
        FcEvalError: `root` is not a folder, or holds none of them.
    """
    needed = [refs(spec) for spec in specs]
    ids = dict.fromkeys(ref.id for known in needed for ref in known or ())
    if root is not None and ids and None not in needed and all(dataset_folder(one, root) is None for one in ids):
        raise FcEvalError(
            f"data.root={root} holds none of the data sets that are read, of which each is a folder OWNER/NAME "
            f"({', '.join(ids)}): give the folder around these, or leave out data.root to read from the Hub"
        )


def data_files(specs: Iterable[EvalSpec], root: str | Path | None) -> list[Path]:
    """Every local file whose contents decide a result; raises as `sources`."""
    folder = Path(root) if root is not None else None
    return list(joined(sources(spec, folder) for spec in specs).files)


def _elsewhere(dataset_id: str, config: str | None, revision: str) -> Sources:
    """A data set that the mirror lacks: `datasets` takes a folder of that name before it asks the Hub."""
    if Path(dataset_id).is_dir():
        return Sources(_all_files(Path(dataset_id)))
    return Sources(hub=(HubData(dataset_id, config, revision),))


def _all_files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(file for file in folder.rglob("*") if file.is_file()))


def _task(task: Definition, root: Path | None) -> Sources:
    """What one task of lm-eval reads: its definition, and the data that this names."""
    settings, own = task.settings, Sources(task.files)
    name = settings.get("task")
    foreign = tuple(f"task {name!r} uses {function}, code of an installed package" for function in task.imported)
    if code := ", ".join(file.name for file in task.files if file.suffix == ".py"):
        foreign = (
            *foreign,
            f"task {name!r} has code of its own ({code}): files that this opens by itself are not hashed",
        )
    if settings.get("class") or settings.get("custom_dataset"):
        return joined([own, Sources(unknown=(*foreign, f"task {name!r} has its data from code of its own"))])
    path, kwargs = settings.get("dataset_path"), settings.get("dataset_kwargs") or {}
    if not isinstance(path, str) or not isinstance(kwargs, Mapping):
        return joined([own, Sources(unknown=(*foreign, f"task {name!r} names no data set"))])
    config = settings.get("dataset_name")
    config = None if config is None else str(config)
    parts = [own, Sources(unknown=foreign)]
    if "/" in path and dataset_folder(path, root) is not None and root is not None:
        parts += [Sources(tuple(files)) for files in split_files(path, config, root).values()]
    elif path in READERS:
        parts += _read_files(str(name), kwargs)
    else:
        parts.append(_elsewhere(path, config, str(kwargs.get("revision") or "main")))
    return joined(parts)


def _read_files(task: str, kwargs: Mapping[str, Any]) -> Iterator[Sources]:
    """The files that a task hands to a reader: by path or pattern below `data_dir` or the working folder, or by URL."""
    base = Path(str(kwargs.get("data_dir") or "")).expanduser()
    patterns = list(_patterns(kwargs.get("data_files")))
    if not patterns and kwargs.get("data_dir"):
        yield Sources(_all_files(base))
    for pattern in patterns:
        place = pattern.rpartition("::")[2]  # zip://inside.csv::outside.zip
        if place.startswith("hf://datasets/"):
            parts = place.removeprefix("hf://datasets/").split("/")
            repository, _, revision = "/".join(parts[:2]).partition("@")
            yield Sources(hub=(HubData(repository, None, revision or "main"),))
        elif "://" in place:
            yield Sources(unknown=(f"task {task!r} reads {place}, whose contents may change",))
        else:
            found = sorted(file for file in _glob(base, place) if file.is_file())
            if not found:
                raise FcEvalError(f"task {task!r} names data files that are not there: {base / place}")
            yield Sources(tuple(found))


def _patterns(data_files: Any) -> Iterator[str]:
    """`data_files` of `datasets`: a path, a list of paths, or either by split."""
    if isinstance(data_files, Mapping):
        for value in data_files.values():
            yield from _patterns(value)
    elif isinstance(data_files, (list, tuple)):
        for value in data_files:
            yield from _patterns(value)
    elif data_files is not None:
        yield str(data_files)


def _glob(base: Path, pattern: str) -> Iterable[Path]:
    path = base / pattern
    if path.exists():
        return [path]
    root = Path(path.anchor)
    return root.glob(str(path.relative_to(root)))
