"""Checkpoint folders that are smoothed already: an ordinary folder with one more file, which says how.

`fc-eval smooth` writes them. The weights are those of any checkpoint; the file keeps them from being smoothed twice.
"""

import json
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, model_path

SMOOTHING_FILE = "fc_eval_smoothing.json"
SCHEMA = 1


def smoothing_of(folder: Path) -> dict[str, Any] | None:
    """What a folder's file says of its smoothing: `alpha`, `calibration` and `model`; None where there is no file.

    Raises:
        FcEvalError: the file cannot be read, or is of another schema.
    """
    file = folder / SMOOTHING_FILE
    if not file.is_file():
        return None
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        alpha, schema = float(said["alpha"]), int(said["schema"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FcEvalError(
            f"{file} does not say how the folder was smoothed ({error}): make it again with fc-eval smooth"
        ) from None
    if schema != SCHEMA:
        raise FcEvalError(f"{file} is of schema {schema}, expected {SCHEMA}: make it again with fc-eval smooth")
    return dict(said) | {"alpha": alpha}


def smoothed_before(config: ModelConfig) -> dict[str, Any] | None:
    """`smoothing_of` the folder that a model is read from; None for any other source.

    Raises:
        FcEvalError: as `smoothing_of` and `model_path`.
    """
    path = None if config.tiny is not None else model_path(config)
    return smoothing_of(path) if path is not None and path.is_dir() else None


def needs_calibration(config: ModelConfig) -> bool:
    """Whether a model is to be smoothed when it is loaded.

    Raises:
        FcEvalError: it is to be smoothed otherwise than its folder is already.
    """
    if config.weights == "native":
        return False
    before = smoothed_before(config)
    if before is None:
        return config.smoothing is not None
    if before["alpha"] != config.smoothing:
        wanted = "null" if config.smoothing is None else f"{config.smoothing:g}"
        raise FcEvalError(
            f"model.smoothing={wanted} is not possible: {config.path} is smoothed with {before['alpha']:g} already; "
            f"set model.smoothing={before['alpha']:g}, or give the original checkpoint"
        )
    return False
