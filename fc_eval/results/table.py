"""All numbers of a set of runs as one table, a row a number, and the averages over tasks."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from fc_eval.results.compare import Paired, pair_runs
from fc_eval.results.delta import Delta
from fc_eval.results.record import RunRecord
from fc_eval.results.statistics import mean_of_independent, normal_p_value, recovery

# fmt: off
COLUMNS = (
    "model", "weights", "eval", "metric", "comm", "algorithm", "reduce_format", "gather_format", "group_size", "tp",
    "exec", "codec", "reducer", "dtype", "effective_bits", "nominal_bits", "wire_bytes_per_rank", "value", "baseline",
    "delta", "delta_stderr", "samples", "partial", "ln_ratio", "ln_ratio_stderr", "p_value", "recovery", "policy",
    "wire_ratio", "label", "fingerprint", "baseline_fingerprint", "value_stderr", "low", "high", "p_test", "lost",
    "gained", "problem",
)
# fmt: on

FIVE_TASKS = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande")
FIVE_TASK_EVAL = "five-task average"
# The average that Flash Communication's numbers fit: acc_norm where a task defines it, acc for WinoGrande.
PREFERRED = "acc_norm, acc for winogrande"


def task_average(
    deltas: Iterable[Delta], tasks: Sequence[str], metrics: Sequence[str], eval_name: str, name: str
) -> Delta | None:
    """The unweighted mean over tasks, with the paired error of independent tasks.

    Args:
        deltas: of one run.
        tasks: evaluations to average over.
        metrics: of each task, the first of these that it has counts.
        eval_name: what the average is called as an evaluation.
        name: what it is called as a metric.

    Returns:
        None unless every task has one of the metrics.
    """
    by_key = {(d.eval, d.metric): d for d in deltas}
    parts = []
    for task in tasks:
        part = next((by_key[task, metric] for metric in metrics if (task, metric) in by_key), None)
        if part is None:
            return None
        parts.append(part)
    if not parts:
        return None
    value, value_stderr = mean_of_independent([p.value for p in parts], [p.value_stderr for p in parts])
    base, _ = mean_of_independent([p.baseline for p in parts], [0.0] * len(parts))
    delta, stderr = mean_of_independent([p.delta for p in parts], [p.delta_stderr for p in parts])
    reach = 1.959964 * stderr  # the normal distribution's 97.5 % point: questions are many
    itself = all(p.delta == 0 and not p.test for p in parts)
    return Delta(
        eval=eval_name,
        label=eval_name,
        metric=name,
        value=value,
        value_stderr=value_stderr,
        samples=sum(p.samples for p in parts),
        partial=any(p.partial for p in parts),
        baseline=base,
        delta=delta,
        delta_stderr=stderr,
        low=delta - reach,
        high=delta + reach,
        p_value=normal_p_value(delta / stderr) if stderr > 0 else math.nan,
        test="z" if stderr > 0 else "",
        lost=None if any(p.lost is None for p in parts) else sum(p.lost or 0 for p in parts),
        gained=None if any(p.gained is None for p in parts) else sum(p.gained or 0 for p in parts),
        recovery=math.nan if itself else recovery(value, base),
    )


def five_task_averages(deltas: Sequence[Delta]) -> list[Delta]:
    """The two averages over PIQA, ARC-easy, ARC-challenge, HellaSwag and WinoGrande; none unless all five were run."""
    both = (
        task_average(deltas, FIVE_TASKS, ("acc_norm", "acc"), FIVE_TASK_EVAL, PREFERRED),
        task_average(deltas, FIVE_TASKS, ("acc",), FIVE_TASK_EVAL, "acc"),
    )
    return [average for average in both if average is not None]


def results_table(records: Iterable[RunRecord]) -> pd.DataFrame:
    """One row per number, in the columns `COLUMNS`.

    Runs are paired with the baseline that they name. Where that is missing or unfit, `baseline` and `delta` are NaN
    and `problem` says why. A perplexity's `delta` is value - baseline, its error from `ln_ratio` by the delta method.
    `eval` holds the label ('c4 (subset)'), so that different texts never share a name.
    """
    return pairs_table(pair_runs(records))


def pairs_table(pairs: Iterable[Paired]) -> pd.DataFrame:
    """`results_table` of runs that are paired already."""
    rows = [_row(pair, d) for pair in pairs for d in [*pair.deltas, *five_task_averages(pair.deltas)]]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table["group_size"] = pd.Series([row["group_size"] for row in rows], dtype=object)  # whole numbers, 'token', none
    return table.astype(dict.fromkeys(("wire_bytes_per_rank", "lost", "gained"), "Int64"))


def _row(pair: Paired, d: Delta) -> dict[str, object]:
    record, arm = pair.record, pair.record.arm
    own = ("model", "weights", "comm", "algorithm", "reduce_format", "gather_format", "group_size", "tp", "exec")
    wire = ("effective_bits", "nominal_bits", "wire_bytes_per_rank", "wire_ratio")
    numbers = ("metric", "value", "baseline", "delta", "delta_stderr", "samples", "partial", "ln_ratio")
    more = ("ln_ratio_stderr", "p_value", "recovery", "value_stderr", "low", "high", "lost", "gained")
    row: dict[str, object] = {key: getattr(arm, key) for key in (*own, "codec", "reducer", "dtype", "policy", "label")}
    row |= {key: record.wire_number(key) for key in wire}
    row |= {key: getattr(d, key) for key in (*numbers, *more)}
    row |= {"eval": d.label, "p_test": d.test, "problem": pair.problem}
    return row | {"fingerprint": record.fingerprint, "baseline_fingerprint": record.baseline_fingerprint}
