"""What a run reads, so that equal fingerprints mean equal contents: local files by hash, repositories by commit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fc_eval.config import RunConfig
from fc_eval.evaluate.calibration import calibration_sources
from fc_eval.evaluate.sources import Sources, check_mirror, sources
from fc_eval.models.config import ModelConfig, model_files
from fc_eval.models.smoothed import needs_calibration
from fc_eval.results.fingerprint import CALIBRATION, files_digest

if TYPE_CHECKING:
    from fc_eval.sweep.hub_commit import Commit, Kind


@dataclass(frozen=True)
class Contents:
    """What the model and the data of a run are made of.

    Attributes:
        model: SHA-256 of each file of the model, or its commit on the Hub; empty where the configuration holds a
            checksum, or a seed. Then the same of the text that smoothing looks at.
        data: by evaluation, SHA-256 of each file and commit of each data set on the Hub.
        commits: the data sets on the Hub and their commits, None where one is not known.
        unknown: what could not be known, in words for the record.
    """

    model: tuple[str, ...]
    data: Mapping[str, tuple[str, ...]]
    commits: Mapping[str, str | None]
    unknown: tuple[str, ...]


def _commit(kind: "Kind", repo_id: str, revision: str, config: str | None = None) -> "Commit":
    from fc_eval.sweep.hub_commit import (
        hub_commit,  # the Hub's client takes a second to import, and most runs need none
    )

    return hub_commit(kind, repo_id, revision, config)


def pinned(model: ModelConfig) -> ModelConfig:
    """The model with the commit of the Hub in place of its branch or tag, where it can be known."""
    if model.hub_id is None or model.path is not None:
        return model
    commit = _commit("model", model.hub_id, model.revision)
    return replace(model, revision=commit.sha) if commit.sha else model


def contents(config: RunConfig) -> Contents:
    """What a run with a `pinned` model reads.

    Raises:
        FcEvalError: a file is missing or cannot be read, lm-eval has no such task, or `data.root` holds no data set.
    """
    root = Path(config.data_root) if config.data_root else None
    check_mirror(config.eval.specs, root)
    unknown: list[str] = []
    model = files_digest(model_files(config.model))
    if config.model.hub_id is not None and config.model.path is None:
        commit = _commit("model", config.model.hub_id, config.model.revision)
        model = [f"hub:{config.model.hub_id}@{commit.sha or 'unknown'}"]
        if commit.sha is None:
            unknown.append(
                f"model {config.model.hub_id}@{config.model.revision}: its commit is not known ({commit.why})"
            )
    data: dict[str, tuple[str, ...]] = {}
    commits: dict[str, str | None] = {}

    def lines(found: Sources) -> tuple[str, ...]:
        unknown.extend(found.unknown)
        said = files_digest(found.files)
        for ref in found.hub:
            commit = _commit("dataset", ref.id, ref.revision, ref.config)
            said.append(f"hub:{ref.id}@{commit.sha or 'unknown'}")
            # One data set in two revisions: neither can be told from the id alone.
            commits[ref.id] = commit.sha if commits.get(ref.id, commit.sha) == commit.sha else None
            if commit.sha is None:
                unknown.append(f"data set {ref.id}@{ref.revision}: its commit is not known ({commit.why})")
        return tuple(said)

    if needs_calibration(config.model):
        model += [CALIBRATION + line for line in lines(calibration_sources(config.model.calibration.text, root))]
    for spec in config.eval.specs:
        data[spec.name] = lines(sources(spec, root))
    return Contents(tuple(model), data, commits, tuple(dict.fromkeys(unknown)))
