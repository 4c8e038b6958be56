"""lm-eval's answers as plain metrics and JSON-ready rows. Knows lm-eval's result shapes, imports nothing of it."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The value in JSON's own types: numpy scalars and arrays unwrapped, tuples as lists, anything else as text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def metric_name(metric: str, filter_name: str) -> str:
    """`acc` for lm-eval's 'acc,none'; 'exact_match,strict-match' stays, because its filter is part of what it means."""
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def sample_row(sample: Mapping[str, Any], task: str) -> dict[str, Any]:
    """One document under one filter: ids and hashes, target, metrics, and what the model answered.

    `choice_logprobs` are the log-likelihoods of the choices in nats; `loglikelihood` is that of a whole document;
    `response` is generated text. Rows of two runs are paired by `task`, `doc_id`, `filter`, and must agree in
    `doc_hash`.
    """
    row = {
        "task": task,
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"],
        "filter": sample["filter"],
    }
    row |= {metric: plain(sample[metric]) for metric in sample["metrics"]}
    answers = plain(sample["filtered_resps"])
    if answers and isinstance(answers[0], list) and len(answers[0]) == 2 and isinstance(answers[0][1], bool):
        row["choice_logprobs"] = [logprob for logprob, _greedy in answers]
        row["choice_is_greedy"] = [greedy for _logprob, greedy in answers]
    elif answers and isinstance(answers[0], float):
        row["loglikelihood"] = answers[0]
        return row  # its target is the document itself, which the hash stands for
    else:
        row["response"] = answers[0] if len(answers) == 1 else answers
    row["target"] = plain(sample["target"])
    return row


def summarize(
    aggregated: Mapping[str, Any], rows: list[dict[str, Any]], group: str | None = None
) -> dict[str, float | int]:
    """Metrics of a task or group by plain name, with the standard error of those that are a mean over documents.

    Args:
        aggregated: lm-eval's own numbers, keyed 'metric,filter'.
        rows: all rows of the task or of the group's tasks.
        group: name of the group, None for a task. Groups that weigh their tasks equally have a number that is not the
            mean over documents; it is called 'group/metric' so that nobody takes it for one.
    """
    metrics: dict[str, float | int] = {}
    for key, value in aggregated.items():
        metric, comma, filter_name = key.rpartition(",")
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not comma or not number or metric.endswith("_stderr"):
            continue
        value, name = plain(value), metric_name(metric, filter_name)
        values = [row[metric] for row in rows if row["filter"] == filter_name and metric in row]
        if not values or not all(isinstance(item, int | float) for item in values):
            metrics[name] = value
            continue
        mean = statistics.fmean(values)
        # Other aggregations (perplexity, corpus scores) have per-document values too, but are not their mean; sums in
        # another order differ in the last bits.
        if not math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12):
            metrics[name if group is None else f"{group}/{name}"] = value
            continue
        metrics[name] = value
        if len(values) > 1:
            error = statistics.stdev(values, mean) / math.sqrt(len(values))
            metrics[metric_name(f"{metric}_stderr", filter_name)] = error
    return metrics
