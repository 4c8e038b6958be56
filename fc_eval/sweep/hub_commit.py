"""Which commit a branch of a repository on the Hub stands for: asked of the Hub, otherwise read from its caches.

A branch moves, so its name says nothing about contents. Imports no tensor library.
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants

COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_S = 10.0

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class Commit:
    """`sha` is None where the commit cannot be known; `why` then says so in a few words."""

    sha: str | None
    why: str = ""


@cache  # so that all runs of one sweep see one commit
def hub_commit(kind: Kind, repo_id: str, revision: str, config: str | None = None) -> Commit:
    """The commit that would be loaded now.

    Args:
        kind: of the repository.
        repo_id: OWNER/NAME.
        revision: branch, tag or commit.
        config: of a data set, which has a cache of its own per config.
    """
    if COMMIT.fullmatch(revision):
        return Commit(revision)
    asked = _ask(kind, repo_id, revision)
    if asked.sha is not None:
        return asked
    cached = (_cached_data(repo_id, config) if kind == "dataset" else None) or _cached_ref(kind, repo_id, revision)
    return Commit(cached) if cached else Commit(None, f"{asked.why}, and nothing of it is cached")


@cache
def _ask(kind: Kind, repo_id: str, revision: str) -> Commit:
    try:
        sha = HfApi().repo_info(repo_id, repo_type=kind, revision=revision, timeout=TIMEOUT_S).sha
    except Exception as error:  # offline mode, the Hub's answers, and whatever the HTTP library of its client raises
        return Commit(None, f"the Hub cannot be asked, {type(error).__name__}")
    return Commit(str(sha)) if sha else Commit(None, "the Hub names none")


def _cached_ref(kind: Kind, repo_id: str, revision: str) -> str | None:
    """What the Hub's cache last saw the branch at."""
    file = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo_id.replace('/', '--')}" / "refs" / revision
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if COMMIT.fullmatch(text) else None


def _cached_data(dataset_id: str, config: str | None) -> str | None:
    """The commit of the prepared data that `datasets` loads when it cannot reach the Hub: the most recent of a config.

    Where files were chosen by name, the cache has another config than the one asked for, and which one is not known
    here; then all of them must agree.
    """
    from datasets.naming import camelcase_to_snakecase

    *owner, name = dataset_id.split("/")
    root = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    folder = root / "___".join([*owner, camelcase_to_snakecase(name)])
    found = [path for path in folder.glob("*/*/*") if COMMIT.fullmatch(path.name) and path.is_dir()]
    same = [path for path in found if config is None or path.parts[-3] == config]
    if same:
        return max(same, key=lambda path: path.stat().st_mtime).name
    commits = {path.name for path in found}
    return commits.pop() if len(commits) == 1 else None
