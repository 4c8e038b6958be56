"""`Delta`: one metric of a run beside its baseline, with its paired error. Everywhere, delta = run - baseline."""

import math
from dataclasses import dataclass, replace

import numpy as np

from fc_eval.results.record import RunRecord
from fc_eval.results.samples import Samples, Windows
from fc_eval.results.statistics import (
    Estimate,
    Floats,
    ln_ppl_ratio,
    mcnemar,
    mean_difference,
    paired_bootstrap,
    ratio_estimate,
    recovery,
)

NAN = math.nan
# Shares between 0 and 1: tables show them in percent and their deltas in points.
SHARES = ("acc", "acc_norm", "exact_match", "same_top1")
_WINDOW_METRICS = ("perplexity", "kl_mean", "kl_p95", "kl_max", "same_top1")


def is_share(metric: str) -> bool:
    """Whether a metric, or an average named after its metrics, is a share between 0 and 1."""
    return metric.split(",")[0].rpartition("/")[2] in SHARES


def stderr_key(metric: str) -> str:
    """Under what name the error of a metric is recorded: 'acc_stderr', 'exact_match_stderr,strict-match'."""
    name, comma, filter_name = metric.partition(",")
    return f"{name}_stderr{comma}{filter_name}"


@dataclass(frozen=True)
class Delta:
    """One metric of a run beside its baseline, in the metric's own unit. Unknown numbers are NaN.

    Attributes:
        eval: name of the evaluation; `label` the one for tables, such as 'c4 (subset)'.
        metric: 'perplexity', 'acc', 'acc_norm', 'kl_mean', ...
        value: of the run; `value_stderr` its own sampling error, unpaired.
        samples: windows or questions; `partial` when these are not all.
        baseline: the same metric of the baseline (0 for KL, 1 for same_top1: what a run has against itself).
        delta: value - baseline; `delta_stderr` its paired standard error.
        low: lower end of the 95 % interval of `delta`; `high` the upper end.
        ln_ratio: ln(value / baseline) of a perplexity; `ln_ratio_stderr` its paired standard error.
        p_value: two-sided, of no difference.
        test: what gave `p_value`: 't', 'exact' or 'chi2' (both McNemar), 'z'; empty where nothing was tested.
        lost: questions that only the baseline got right; `gained`: only the run; None where not counted.
        recovery: value / baseline of an accuracy.
    """

    eval: str
    label: str
    metric: str
    value: float
    value_stderr: float
    samples: int
    partial: bool
    baseline: float = NAN
    delta: float = NAN
    delta_stderr: float = NAN
    low: float = NAN
    high: float = NAN
    ln_ratio: float = NAN
    ln_ratio_stderr: float = NAN
    p_value: float = NAN
    test: str = ""
    lost: int | None = None
    gained: int | None = None
    recovery: float = NAN


def metrics_of(record: RunRecord, name: str) -> list[str]:
    """Names of the metrics of an evaluation; errors and bookkeeping are no metrics."""
    numbers = record.results[name]
    if record.evals[name].kind == "perplexity":
        return [metric for metric in _WINDOW_METRICS if metric in numbers]
    if record.evals[name].kind == "layer_error":
        return []  # these are tables over layers
    return [metric for metric in numbers if not metric.partition(",")[0].endswith("_stderr")]


def alone(record: RunRecord, name: str) -> list[Delta]:
    """The metrics of one evaluation without a baseline."""
    return [_value(record, name, metric) for metric in metrics_of(record, name)]


def against_itself(record: RunRecord) -> list[Delta]:
    """The metrics of a baseline, which differs from itself by exactly nothing."""
    return [
        replace(d, baseline=d.value, delta=0.0, delta_stderr=0.0, low=0.0, high=0.0)
        for name in record.evals
        for d in alone(record, name)
    ]


def of_windows(record: RunRecord, baseline: RunRecord, name: str) -> list[Delta]:
    """Deltas of a perplexity evaluation whose windows are the same in both runs."""
    windows, base = record.windows[name], baseline.windows[name]
    ratio = ln_ppl_ratio(windows.nll_sum, base.nll_sum, windows.tokens, windows.cluster)
    deltas = []
    for found in alone(record, name):
        if found.metric == "perplexity":
            deltas.append(_with_ratio(found, baseline.results[name]["perplexity"], ratio))
        elif found.metric in ("kl_mean", "same_top1"):
            own = 0.0 if found.metric == "kl_mean" else 1.0
            deltas.append(replace(found, baseline=own, delta=found.value - own, delta_stderr=found.value_stderr))
        else:
            deltas.append(found)
    return deltas


def of_questions(record: RunRecord, baseline: RunRecord, name: str) -> list[Delta]:
    """Deltas of a task whose questions are the same, at the same places, in both runs."""
    deltas = []
    for found in alone(record, name):
        if found.metric not in baseline.results[name]:
            deltas.append(found)
            continue
        base = baseline.results[name][found.metric]
        found = replace(found, baseline=base, delta=found.value - base, recovery=recovery(found.value, base))
        pair = _paired_values(record, baseline, name, found.metric)
        deltas.append(_with_questions(found, *pair) if pair else found)
    return deltas


def _value(record: RunRecord, name: str, metric: str) -> Delta:
    info, value = record.evals[name], record.results[name][metric]
    stderr = record.results[name].get(stderr_key(metric), NAN)
    if name in record.windows:
        stderr = _window_stderr(record.windows[name], metric, value)
    return Delta(name, info.label, metric, value, stderr, info.samples, info.partial)


def _window_stderr(windows: Windows, metric: str, value: float) -> float:
    tokens_n = windows.tokens.astype(np.float64)
    if metric == "perplexity":
        return value * ratio_estimate(windows.nll_sum, tokens_n, windows.cluster).stderr
    means_n = {"kl_mean": windows.kl_mean, "same_top1": windows.same_top1}.get(metric)
    return NAN if means_n is None else ratio_estimate(means_n * tokens_n, tokens_n, windows.cluster).stderr


def _with_ratio(found: Delta, base: float, ratio: Estimate) -> Delta:
    low, high = (base * math.expm1(end) if abs(end) < 700 else NAN for end in (ratio.low, ratio.high))
    return replace(
        found,
        baseline=base,
        delta=found.value - base,
        delta_stderr=found.value * ratio.stderr,  # delta method: base * exp(r) has the derivative value in r
        low=low,
        high=high,
        ln_ratio=ratio.value,
        ln_ratio_stderr=ratio.stderr,
        p_value=ratio.p_value,
        test="t" if math.isfinite(ratio.p_value) else "",
    )


def _paired_values(record: RunRecord, baseline: RunRecord, name: str, metric: str) -> tuple[Floats, Floats] | None:
    """Per-question values of both runs, where the metric is their mean; None for other kinds of metrics."""
    found = []
    for run in (record, baseline):
        samples: Samples = run.samples[name]
        if metric not in samples.metrics:
            return None
        values_n = samples.metrics[metric]
        # The harness may have summed in another order; a metric that is no mean differs by far more.
        if not math.isclose(float(values_n.mean()), run.results[name][metric], rel_tol=1e-6, abs_tol=1e-9):
            return None
        found.append(values_n)
    return found[0], found[1]


def _with_questions(found: Delta, values_n: Floats, base_n: Floats) -> Delta:
    difference_n = values_n - base_n
    mean = mean_difference(difference_n)
    low, high = paired_bootstrap(difference_n)
    found = replace(found, delta_stderr=mean.stderr, low=low, high=high)
    if not np.isin(values_n, (0.0, 1.0)).all() or not np.isin(base_n, (0.0, 1.0)).all():
        return replace(found, p_value=mean.p_value, test="t" if math.isfinite(mean.p_value) else "")
    table = mcnemar(lost=int((difference_n < 0).sum()), gained=int((difference_n > 0).sum()))
    return replace(found, p_value=table.p_value, test=table.test, lost=table.lost, gained=table.gained)
