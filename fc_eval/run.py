"""One run, in a process of its own: the only file that knows all parts. It reads top to bottom as the data flows.

    config.yaml -> load model -> find row-parallel sites -> attach communication -> evaluate -> result.json

Started by `fc_eval.sweep` as `python -m fc_eval.run RUN_FOLDER`.
"""

import ctypes
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fc_eval.collective.comm import BASELINE
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import mirror_serves_all
from fc_eval.results.kept import kept_eval
from fc_eval.results.store import RunFolder
from fc_eval.sweep import USER_ERROR_EXIT


def carry_out(folder: RunFolder, config: RunConfig, baseline_fingerprint: str | None) -> None:
    """Loads, attaches, evaluates and records. Evaluations that the folder already holds are not repeated.

    Raises:
        FcEvalError: something that the user can mend.
    """
    root = Path(config.data_root) if config.data_root else None
    if mirror_serves_all(config.eval.specs, root):
        os.environ["HF_HUB_OFFLINE"] = "1"  # must be set before the libraries are imported

    import torch

    from fc_eval.assemble import eval_summary, result_of
    from fc_eval.evaluate.run import evaluate
    from fc_eval.models.load import load_model
    from fc_eval.parallel.emulate import communicate
    from fc_eval.parallel.self_check import self_check

    started = time.time()
    _seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(config.model, config.device)
    print(f"{config.model.name}: {loaded.summary}", flush=True)
    check = self_check(loaded.model, config.tp, config.codec)
    print(f"self-check: {check.text}", flush=True)

    setup_s = time.time() - started
    summaries: dict[str, dict[str, Any]] = {}
    with communicate(loaded.model, config.build_policy(), config.tp, config.codec) as attachment:
        for spec in config.eval.specs:
            summaries[spec.name] = _kept(folder, spec.name)
            if summaries[spec.name]:
                continue
            began = time.time()
            attachment.reset_stats()
            result = evaluate(
                loaded.model,
                loaded.tokenizer,
                spec,
                data_root=root,
                add_bos_token=config.model.add_bos_token,
                batch_size=config.eval.batch_size,
                window_batch=config.eval.window_batch,
                as_baseline=(lambda: attachment.using(BASELINE)) if config.eval.divergence else None,
                progress=ProgressLines(spec.name, "windows" if spec.kind == "perplexity" else "requests"),
            )
            attachment.check_calls()
            summaries[spec.name] = eval_summary(spec, result, attachment.stats(), time.time() - began)
            folder.save_eval(spec.name, summaries[spec.name], result.arrays, result.rows)
        folder.write_result(
            result_of(
                config=config,
                fingerprint=folder.fingerprint,
                baseline_fingerprint=baseline_fingerprint,
                summaries=summaries,
                loaded=loaded,
                hidden=attachment.sites[0].out_features,
                check=check,
                setup_s=setup_s,
            )
        )


def _kept(folder: RunFolder, name: str) -> dict[str, Any]:
    """The summary of an evaluation that an earlier attempt finished, empty where it must be computed."""
    try:
        summary = kept_eval(folder.path, name)
    except FcEvalError as error:
        print(f"{name}: not kept from before: {error}", flush=True)
        return {}
    if summary is not None:
        print(f"{name}: kept from before", flush=True)
    return summary or {}


class ProgressLines:
    """Prints how far an evaluation is, as whole lines a few seconds apart, so that a log can hold them too."""

    INTERVAL_S = 5.0

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.started = self.said = time.time()

    def __call__(self, done: int, total: int) -> None:
        """Takes windows or requests done so far, of all."""
        now = time.time()
        if done < total and now - self.said < self.INTERVAL_S:
            return
        self.said = now
        left = (now - self.started) / max(done, 1) * (total - done)
        tail = f"{left:.0f} s left" if done < total else f"{now - self.started:.0f} s"
        print(f"{self.name}: {done}/{total} {self.unit}, {tail}", flush=True)


def _seed(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _die_with_parent() -> None:
    """Ends this process when its supervisor dies, so that nobody writes to a folder that another run takes up."""
    parent = os.environ.get("FC_EVAL_PARENT")
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the call above
        os._exit(1)


def main(path: str) -> int:
    """Carries out the run of one folder; a user's mistake is one line and its own exit status."""
    _die_with_parent()
    try:
        tree = RunFolder(Path(path), "").read_config()
        folder = RunFolder(Path(path), tree["fingerprint"])
        carry_out(folder, RunConfig.from_dict(tree["config"]), tree["baseline_fingerprint"])
    except FcEvalError as error:
        print(f"error: {error}", flush=True)
        return USER_ERROR_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
