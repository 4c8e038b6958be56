"""One evaluation of one model: perplexity, divergence, layer errors or an lm-eval task, as one kind of result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.divergence import AsBaseline, window_divergences
from fc_eval.evaluate.layer_error import Probe, layer_errors
from fc_eval.evaluate.logits import check_context
from fc_eval.evaluate.perplexity import window_losses
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Progress
from fc_eval.evaluate.spec import EvalSpec, LayerErrorSpec, PerplexitySpec, TaskSpec
from fc_eval.evaluate.windows import build_windows


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found.

    Attributes:
        metrics: perplexity: `perplexity`, `nll` (nats per token), `tokens`, `windows`, and with divergence `kl_mean`,
            `kl_p95`, `kl_max` (nats), `same_top1`; layer errors: `mse` and `relative_error` by kind of layer, mode and
            part; a task: lm-eval's metrics by plain name, such as `acc_norm`.
        samples: windows or documents.
        partial: whether a limit left some out.
        arrays: perplexity only, by window: `nll_sum`, `tokens`, `cluster`, with divergence `kl_mean`, `same_top1`.
        rows: tasks only: one JSON-ready mapping per document.
        layers: layer errors only: one JSON-ready mapping per layer, mode and part.
        protocol: what was evaluated, JSON-ready: data, windows or task version, BOS, hash of all token ids.
    """

    metrics: dict[str, float | int]
    samples: int
    partial: bool
    arrays: dict[str, npt.NDArray[Any]] | None
    rows: list[dict[str, Any]] | None
    protocol: dict[str, Any]
    layers: tuple[dict[str, Any], ...] | None = None


def evaluate(
    model: Any,
    tokenizer: Any,
    spec: EvalSpec,
    *,
    data_root: str | Path | None,
    add_bos_token: bool,
    batch_size: int = 8,
    window_batch: int = 1,
    as_baseline: AsBaseline | None = None,
    probe: Probe | None = None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> EvalResult:
    """Evaluates a model that is ready to run.

    Args:
        model: a causal language model of transformers; what happens inside its layers is none of this function's
            business.
        tokenizer: its tokenizer.
        spec: what to measure.
        data_root: folder that mirrors dataset ids, None for the Hub.
        add_bos_token: one beginning-of-sequence token in front of each text, or none.
        batch_size: requests per forward pass of a task.
        window_batch: windows per forward pass of a perplexity.
        as_baseline: makes a context in which the same model computes as the baseline; asks for divergence as well.
            Only perplexity has a use for it.
        probe: watches the model's layers; layer errors need it.
        progress: called with (done, total) after each batch.
        processes: those that share the batches, each with a model of its own; all of them get the whole result.

    Raises:
        FcEvalError: data or task missing, too short a text, no BOS token where one is asked for.
    """
    root = Path(data_root) if data_root is not None else None
    if isinstance(spec, LayerErrorSpec):
        if probe is None:
            raise FcEvalError(f"evaluation {spec.name!r} of kind layer_error needs a model whose layers can be watched")
        result = _layers(model, tokenizer, spec, root, add_bos_token, window_batch, probe, progress, processes)
    elif isinstance(spec, PerplexitySpec):
        result = _perplexity(
            model, tokenizer, spec, root, add_bos_token, window_batch, as_baseline, progress, processes
        )
    else:
        result = _task(model, tokenizer, spec, root, add_bos_token, batch_size, progress, processes)
    if any(other != result.protocol for other in processes.gather(result.protocol)):
        raise FcEvalError(f"the processes of {spec.name!r} read different data: its files changed, run it again")
    return result


def _perplexity(
    model: Any,
    tokenizer: Any,
    spec: PerplexitySpec,
    root: Path | None,
    add_bos_token: bool,
    window_batch: int,
    as_baseline: AsBaseline | None,
    progress: Progress | None,
    processes: Processes,
) -> EvalResult:
    check_context(model, spec)
    windows = build_windows(spec, tokenizer, data_root=root, add_bos_token=add_bos_token)
    if as_baseline is None:
        losses = window_losses(model, windows, window_batch=window_batch, progress=progress, processes=processes)
        metrics, divergence = losses.metrics(), {}
    else:
        found = window_divergences(
            model, windows, as_baseline, window_batch=window_batch, progress=progress, processes=processes
        )
        losses, metrics = found.losses, found.metrics()
        divergence = {"kl_mean": found.kl.mean(1, dtype=np.float64), "same_top1": found.same_top1.mean(1)}
    arrays = {"nll_sum": losses.nll_sum, "tokens": losses.tokens, "cluster": windows.clusters, **divergence}
    protocol = {**windows.protocol, "window_batch": window_batch}
    return EvalResult(metrics, len(windows.ids), not windows.complete, arrays, None, protocol)


def _layers(
    model: Any,
    tokenizer: Any,
    spec: LayerErrorSpec,
    root: Path | None,
    add_bos_token: bool,
    window_batch: int,
    probe: Probe,
    progress: Progress | None,
    processes: Processes,
) -> EvalResult:
    check_context(model, spec)
    windows = build_windows(spec, tokenizer, data_root=root, add_bos_token=add_bos_token)
    found = layer_errors(
        model,
        windows,
        probe,
        stages=spec.stages,
        window_batch=window_batch,
        progress=progress,
        processes=processes,
    )
    protocol = {**windows.protocol, "window_batch": window_batch, "stages": spec.stages, "notes": list(probe.notes)}
    return EvalResult(found.metrics(), found.windows, not windows.complete, None, None, protocol, found.rows)


def _task(
    model: Any,
    tokenizer: Any,
    spec: TaskSpec,
    root: Path | None,
    add_bos_token: bool,
    batch_size: int,
    progress: Progress | None,
    processes: Processes,
) -> EvalResult:
    # Imported here because lm-eval and what it brings take seconds, and a perplexity needs none of it.
    from fc_eval.evaluate.tasks import run_task

    found = run_task(
        model,
        tokenizer,
        spec,
        data_root=root,
        add_bos_token=add_bos_token,
        batch_size=batch_size,
        progress=progress,
        processes=processes,
    )
    documents = sum(found.protocol["documents"].values())
    return EvalResult(found.metrics, documents, not found.complete, None, found.rows, found.protocol)
