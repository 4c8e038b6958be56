"""One run, in a process of its own: the only file that knows all parts. It reads top to bottom as the data flows.

    config.yaml -> load model -> find row-parallel sites -> attach communication -> evaluate -> result.json

Started by `fc_eval.sweep.child` as `python -m fc_eval.run RUN_FOLDER`. With `processes` above 1 or exec=tp it starts
itself as often as needed (`fc_eval.launch`): each process, or each group of ranks, has the whole model and computes its
share; the first one writes and speaks.
"""

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fc_eval.collective.comm import BASELINE
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError, LostProcessError, is_disk_error, os_error
from fc_eval.evaluate.calibration import calibration_sources
from fc_eval.evaluate.data import mirror_serves_all
from fc_eval.evaluate.processes import Processes, joined
from fc_eval.evaluate.spec import LayerErrorSpec, WindowSpec
from fc_eval.launch import LOST_EXIT, USER_ERROR_EXIT, die_with_parent, is_launched, launch, report_error
from fc_eval.models.smoothed import needs_calibration
from fc_eval.results.kept import kept_eval
from fc_eval.results.store import RunFolder


def carry_out(folder: RunFolder, config: RunConfig, tree: Mapping[str, Any], processes: Processes) -> None:
    """Loads, attaches, evaluates and records. Evaluations that the folder already holds are not repeated.

    Args:
        folder: of the run.
        config: what to run.
        tree: what the run is made of, as `config.yaml` keeps it beside the configuration.
        processes: those that share the evaluations.

    Raises:
        FcEvalError: something that the user can mend.
    """
    import torch

    from fc_eval.assemble import eval_summary, result_of
    from fc_eval.evaluate.loading import check_commits
    from fc_eval.evaluate.logits import check_context
    from fc_eval.evaluate.run import evaluate
    from fc_eval.models.half_products import multiplies_in_fp32
    from fc_eval.parallel.layer_probe import LayerProbe
    from fc_eval.ready import ready

    started = time.time()
    root = Path(config.data_root) if config.data_root else None
    _seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with ready(config, processes) as (loaded, check, attachment):
        each = " on each rank" if config.ranks > 1 else ""
        print(f"{config.model.name}: {loaded.summary}{each}", flush=True)
        if multiplies_in_fp32(loaded.model):
            print(
                f"this CPU has no instructions for {config.model.dtype} products: they are summed in fp32 and rounded"
            )
        print(f"self-check: {check.text}", flush=True)
        if any(other != check for other in processes.gather(check)):
            raise FcEvalError(
                f"the {processes.count} processes do not compute the same numbers, as on GPUs of different kinds: "
                "choose equal ones with CUDA_VISIBLE_DEVICES, or set processes=1"
            )

        for spec in config.eval.specs:  # all of them before the first one: a mistake should not show after hours
            if isinstance(spec, WindowSpec):
                check_context(loaded.model, spec)
        setup_s = time.time() - started
        summaries: dict[str, dict[str, Any]] = {}
        for spec in config.eval.specs:
            # Process 0 alone looks, and tells the others, so that all of them go on with the same evaluation.
            summaries[spec.name] = processes.gather(_kept(folder, spec.name) if processes.is_first else {})[0]
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
                probe=LayerProbe(attachment) if isinstance(spec, LayerErrorSpec) else None,
                as_baseline=(lambda: attachment.using(BASELINE)) if config.eval.divergence else None,
                progress=ProgressLines(spec.name, "windows" if isinstance(spec, WindowSpec) else "requests"),
                processes=processes,
            )
            attachment.set_counts(processes.gather(attachment.counts()))
            check_commits(result.protocol, tree.get("commits") or {})
            attachment.check_calls()
            summaries[spec.name] = eval_summary(spec, result, attachment.stats(), time.time() - began)
            if processes.is_first:
                folder.save_eval(spec.name, summaries[spec.name], result.arrays, result.rows, result.layers)
        if not processes.is_first:
            return
        folder.write_result(
            result_of(
                config=config,
                tree=tree,
                summaries=summaries,
                loaded=loaded,
                hidden=attachment.sites[0].out_features,
                check=check,
                reducer=attachment.reducer,
                processes=processes,
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


@contextmanager
def _one_of(config: RunConfig) -> Iterator[Processes]:
    """Joins the processes of the run; all but the first are silent, except for tracebacks."""
    root = Path(config.data_root) if config.data_root else None
    asks_hub = needs_calibration(config.model) and bool(calibration_sources(config.model.calibration.text, root).hub)
    if mirror_serves_all(config.eval.specs, root) and not asks_hub:
        os.environ["HF_HUB_OFFLINE"] = "1"  # must be set before the libraries are imported
    assert isinstance(config.processes, int)  # `fc_eval.machine.settled` has made sure
    with (
        joined(config.processes, config.device, config.ranks) as processes,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(sys.stdout if processes.is_first else nowhere),
    ):
        yield processes


def main(path: str) -> int:
    """Carries out the run of one folder; a user's mistake is one line and its own exit status."""
    die_with_parent()
    try:
        tree = RunFolder(Path(path), "").read_config()
        folder = RunFolder(Path(path), tree["fingerprint"])
        config = RunConfig.from_dict(tree["config"])
        count = int(config.processes) * config.ranks
        if count != 1 and not is_launched():
            return launch(count, "fc_eval.run", path)
        with _one_of(config) as processes:
            carry_out(folder, config, tree, processes)
    except FcEvalError as error:
        report_error(error)
        return USER_ERROR_EXIT
    except LostProcessError as error:
        print(error, file=sys.stderr, flush=True)
        return LOST_EXIT
    except OSError as error:
        if not is_disk_error(error):
            raise
        report_error(os_error(error))
        return USER_ERROR_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
