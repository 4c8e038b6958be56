"""`fc-eval smooth`: a model smoothed once and kept, as an ordinary checkpoint folder that any program can load."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fc_eval.compose import compose_one
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.machine import settled
from fc_eval.models.cache import disk_errors
from fc_eval.models.smoothed import SCHEMA, SMOOTHING_FILE, needs_calibration

USAGE = """\
usage: fc-eval smooth [model=NAME] [KEY=VALUE] ... out=DIR

Smooths a model as SmoothQuant does, for INT8 weights and activations, and writes it as an ordinary checkpoint folder:

  fc-eval smooth model=llama3_8b model.smoothing=0.85 data.root=DATA out=smoothed
  fc-eval run model=local model.path=smoothed model.weights=w8a8 comm=int4 tp=4

keys of `fc-eval run` that count: model and all below it (model.smoothing, model.calibration.text, ...), data.root,
device, threads.
"""


def smooth(words: Sequence[str]) -> int:
    """Smooths a model and writes the folder; returns the exit status.

    Raises:
        FcEvalError: no folder named, one that exists, a model without alpha, or whatever smoothing finds wrong.
    """
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    outs = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    if len(outs) != 1 or not outs[0].strip():
        raise FcEvalError("say where the smoothed checkpoint goes: out=DIR, a folder that does not exist yet")
    target = Path(outs[0]).expanduser()
    if target.exists():
        raise FcEvalError(f"out={target} exists already: name a folder that does not")
    config = settled(compose_one([*(word for word in words if not word.startswith("out=")), "model.weights=w8a8"]))
    if not needs_calibration(config.model):
        raise FcEvalError(
            "nothing is to be smoothed: give model.smoothing=ALPHA, and a checkpoint that is not smoothed"
        )
    with disk_errors(target, "out="):
        _write(config, target)
    print(f"written: {target}; use it with model=local model.path={target} model.weights=w8a8")
    return 0


def _write(config: RunConfig, target: Path) -> None:
    """Loads, smooths and writes; the folder appears whole or not at all."""
    import torch

    from fc_eval.models.load import load_model
    from fc_eval.quantized import smooth_over_text_
    from fc_eval.results.fingerprint import files_digest

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(config.model.unquantized(), config.device)
    origin = smooth_over_text_(loaded, config.model, config.data_root)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        whole = Path(scratch) / "whole"
        loaded.model.save_pretrained(whole)
        loaded.tokenizer.save_pretrained(whole)
        said = {
            "schema": SCHEMA,
            "alpha": config.model.smoothing,
            "calibration": origin,
            "model": config.model.name,
            "model_files": files_digest(loaded.source_files),
        }
        (whole / SMOOTHING_FILE).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        shutil.move(whole, target)
