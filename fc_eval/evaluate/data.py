"""Where data sets lie on disk: dataset ids as folders under `data.root`. Paths only: no tensor or dataset library.

    ROOT/allenai/ai2_arc/ARC-Easy/test.parquet      config and split as folder and file
    ROOT/baber/piqa/validation.parquet              no config
    ROOT/allenai/ai2_arc/README.md                  a card, as on the Hub: names configs, splits and their files

A clone of a dataset repository is such a folder as well. An id without a folder is read from the Hub.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.spec import EvalSpec, WindowSpec

EMBEDDED = Path(__file__).parent / "embedded"
EVERYDAY = "everyday"
SUFFIXES = (".parquet", ".json.gz", ".jsonl", ".json")


@dataclass(frozen=True)
class DatasetRef:
    """One split of a data set on the Hub: `id` is 'owner/name', `config` None where there is only one."""

    id: str
    config: str | None
    split: str


PROTOCOL_DATA = {
    "wikitext2": DatasetRef("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "c4": DatasetRef("allenai/c4", "en", "validation"),
    "c4_new": DatasetRef("allenai/c4", "en", "validation"),
}
# What lm-eval's own definitions read, for the tasks whose data are known without importing lm-eval.
TASK_DATA = {
    "piqa": DatasetRef("baber/piqa", None, "validation"),
    "arc_easy": DatasetRef("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc_challenge": DatasetRef("allenai/ai2_arc", "ARC-Challenge", "test"),
    "hellaswag": DatasetRef("Rowan/hellaswag", None, "validation"),
    "winogrande": DatasetRef("allenai/winogrande", "winogrande_xl", "validation"),
    "wikitext": DatasetRef("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"),
}


def dataset_folder(dataset_id: str, root: Path | None) -> Path | None:
    """The folder of a dataset id under `root`, None where there is none.

    Raises:
        FcEvalError: `root` is given and is not a folder.
    """
    if root is None:
        return None
    if not root.is_dir():
        raise FcEvalError(f"data.root={root} is not a folder: give one that holds data sets as OWNER/NAME, or null")
    folder = root / dataset_id
    return folder if folder.is_dir() else None


def _card_configs(card: Path) -> dict[str, Any]:
    """Front matter `configs` of a card: what it says of data files, by config name; empty without one."""
    if not card.is_file():
        return {}
    try:
        matter = yaml.safe_load(_front_matter(card.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _odd_card(card, f"it cannot be read ({type(error).__name__})") from None
    if matter is None:
        return {}
    if not isinstance(matter, dict):
        raise _odd_card(card, "its front matter is no mapping")
    entries = matter.get("configs") or []
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "config_name" in e for e in entries):
        raise _odd_card(card, "its configs are no list of mappings with a config_name")
    return {str(entry["config_name"]): entry.get("data_files") for entry in entries}


def _front_matter(text: str) -> str:
    """The YAML between a first line '---' and the next such line; empty where a card has none."""
    first, *rest = text.splitlines() or [""]
    return "\n".join(rest[: rest.index("---")]) if first.rstrip() == "---" and "---" in rest else ""


def _odd_card(card: Path, what: str) -> FcEvalError:
    return FcEvalError(f"{card} does not say where the data files are, because {what}: correct it or remove the card")


def _card_files(folder: Path, config: str, data_files: Any) -> dict[str, list[Path]]:
    """Existing files by split of one `data_files` entry, which the Hub writes as a path, a list or a list of splits."""
    found: dict[str, list[Path]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split, patterns = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            try:
                if not isinstance(split, str) or not isinstance(pattern, str) or Path(pattern).anchor:
                    raise ValueError("not text, or absolute")
                files = sorted(file for file in folder.glob(pattern) if file.is_file())
            except ValueError:  # also what pathlib raises for an odd pattern
                what = f"the data_files of config {config!r} are no paths below the folder, by split"
                raise _odd_card(folder / "README.md", what) from None
            found.setdefault(split, []).extend(files)
    return {split: files for split, files in found.items() if files}


def split_files(dataset_id: str, config: str | None, root: Path) -> dict[str, list[Path]]:
    """Data files by split of one config of a data set that has a folder under `root`.

    Raises:
        FcEvalError: the config is not there (the known ones are named), or it has no files.
    """
    folder = dataset_folder(dataset_id, root)
    if folder is None:
        raise FcEvalError(f"data set {dataset_id!r} has no folder under data.root={root}")
    card = _card_configs(folder / "README.md")
    if card:
        name = config if config is not None else ("default" if "default" in card else next(iter(card)))
        if name not in card:
            raise FcEvalError(f"{folder} has no config {name!r}: its card names {', '.join(card)}")
        found = _card_files(folder, name, card[name])
    else:
        places = [folder / config] if config is not None else [folder, folder / "data", folder / "default"]
        if config is not None and not places[0].is_dir():
            there = sorted(p.name for p in folder.iterdir() if p.is_dir())
            raise FcEvalError(f"{folder} has no config {config!r}: it has {', '.join(there) or 'no folders'}")
        found = {}
        for file in sorted(file for place in places if place.is_dir() for file in place.iterdir()):
            if file.name.endswith(SUFFIXES):
                # 'test.parquet' and, on the Hub, 'test-00000-of-00001.parquet'
                found.setdefault(file.name.split(".")[0].split("-")[0], []).append(file)
    if not found:
        raise FcEvalError(
            f"{folder} holds no data file of config {config or 'default'!r}: expected SPLIT.parquet there"
        )
    return found


def files_of(ref: DatasetRef, root: Path) -> list[Path]:
    """Data files of one split in the mirror.

    Raises:
        FcEvalError: the config or the split is not there (the existing ones are named).
    """
    splits = split_files(ref.id, ref.config, root)
    if ref.split not in splits:
        raise FcEvalError(f"{root / ref.id} has no split {ref.split!r}: it has {', '.join(sorted(splits))}")
    return splits[ref.split]


def refs(spec: EvalSpec) -> tuple[DatasetRef, ...] | None:
    """The data sets that an evaluation reads; empty for what is embedded or local, None where only lm-eval knows."""
    if isinstance(spec, WindowSpec):
        return () if spec.protocol == "text" else (PROTOCOL_DATA[spec.protocol],)
    if spec.task == EVERYDAY:
        return ()
    if spec.task not in TASK_DATA:
        return None
    ref = TASK_DATA[spec.task]
    return (ref, DatasetRef(ref.id, ref.config, "train")) if spec.num_fewshot else (ref,)


def mirror_serves_all(specs: Iterable[EvalSpec], root: str | Path | None) -> bool:
    """Whether no evaluation needs the Hub, so that `HF_HUB_OFFLINE=1` may be set before anything is imported.

    False for lm-eval tasks whose data sets are known to lm-eval alone (they still use the mirror where it has them).

    Raises:
        FcEvalError: `root` is given and is not a folder.
    """
    folder = Path(root) if root is not None else None
    needed = [refs(spec) for spec in specs]
    return all(ids is not None and all(dataset_folder(ref.id, folder) is not None for ref in ids) for ids in needed)


def embedded_files(spec: EvalSpec) -> list[Path]:
    """Files of the embedded text or task that an evaluation reads, none for the others."""
    if isinstance(spec, WindowSpec):
        origin = importlib.util.find_spec("pydoc_data.topics")
        return (
            [Path(origin.origin)] if spec.protocol == "text" and spec.path is None and origin and origin.origin else []
        )
    return [EMBEDDED / "everyday.yaml", EMBEDDED / "everyday.jsonl"] if spec.task == EVERYDAY else []


def local_text(path: str, key: str = "eval.runs.text.path") -> Path:
    """A text file that a key of the command line names.

    Raises:
        FcEvalError: there is no such file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FcEvalError(f"text file {path!r} does not exist: give {key} an existing UTF-8 file")
    return file


def task_file(path: str) -> Path:
    """The YAML file of a task of one's own.

    Raises:
        FcEvalError: there is no such file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FcEvalError(f"task file {path!r} does not exist: give the path of an lm-eval YAML file")
    return file


def describe(ref: DatasetRef) -> Mapping[str, str | None]:
    """The reference as it stands in a record."""
    return {"dataset": ref.id, "config": ref.config, "split": ref.split}
