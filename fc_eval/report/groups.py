"""Which runs stand in one table: a `Group` shares model, dtype, tensor-parallel size, baseline and samples."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fc_eval.report.setting import differences, setting
from fc_eval.results.compare import Paired
from fc_eval.results.delta import Delta
from fc_eval.results.record import EvalInfo, RunRecord
from fc_eval.results.table import FIVE_TASK_EVAL, FIVE_TASKS, PREFERRED, task_average

# Metrics of a task that may be averaged with those of other tasks, the preferred one first.
ACCURACIES = ("acc_norm", "acc", "exact_match")
# The metric's name of a mean over tasks that takes each task's preferred accuracy.
FIRST_KNOWN = "acc_norm, else acc"


@dataclass(frozen=True)
class Group:
    """Runs that are compared with one baseline, which comes first where it is known.

    Attributes:
        pairs: the runs: baseline, unquantized ones, then by falling bits.
        labels: a short, distinct name of each run's comm.
        slug: the title as a part of file names and links, distinct within a report.
        detail: what tells it from groups of the same title in a report; empty where there are none.
    """

    pairs: tuple[Paired, ...]
    labels: tuple[str, ...]
    slug: str = ""
    detail: str = ""

    @property
    def first(self) -> RunRecord:
        """The run that stands for what all of the group share."""
        return self.pairs[0].record

    def of(self, pairs: Iterable[Paired]) -> "Group":
        """The group with other runs, in the order of a table."""
        kept = sorted(pairs, key=_row_order)
        return replace(self, pairs=tuple(kept), labels=tuple(row_labels([pair.record for pair in kept])))

    @property
    def title(self) -> str:
        """'smollm2, bf16, tp=4, cpu', and the detail where another group is called so."""
        return self.heading()

    def heading(self, tp: bool = True, detail: bool = True) -> str:
        """The title, with or without the tensor-parallel size and the detail."""
        arm = self.first.arm
        weights = [] if arm.weights == "native" else [f"{arm.weights} weights"]
        sizes = [f"tp={arm.tp}"] if tp else []
        text = ", ".join([arm.model, arm.dtype, *weights, *sizes, self.first.device_type])
        return f"{text}; {self.detail}" if detail and self.detail else text

    @property
    def setting_without_tp(self) -> frozenset[tuple[str, str]]:
        """All that its baseline's numbers depend on, but for the tensor-parallel size."""
        return frozenset(item for item in setting(self.first).items() if item[0] != "tp")

    @property
    def evals(self) -> dict[str, EvalInfo]:
        """All evaluations of the group's runs: perplexities, then tasks."""
        return {name: info for pair in self.pairs for name, info in pair.record.evals.items()}

    @property
    def samples(self) -> str:
        """'wikitext2: 16 windows (partial); arc_easy: 2376 questions'."""
        return "; ".join(describe_samples(info) for info in self.evals.values())

    def perplexities(self) -> list[str]:
        """Names of the perplexity evaluations."""
        return [name for name, info in self.evals.items() if info.kind == "perplexity"]

    def accuracy(self, pair: Paired) -> Delta | None:
        """The one accuracy that stands for a run: the five-task average, or the mean over the tasks that were run."""
        tasks = self.tasks()
        if set(FIVE_TASKS) <= set(tasks):
            return task_average(pair.deltas, FIVE_TASKS, ACCURACIES, FIVE_TASK_EVAL, PREFERRED)
        if len(tasks) == 1:
            return next((find(pair, name, metric) for name, metric in tasks.items()), None)
        return task_average(pair.deltas, list(tasks), ACCURACIES, f"mean of {len(tasks)} tasks", FIRST_KNOWN)

    def tasks(self) -> dict[str, str]:
        """Tasks with an accuracy, and which of its accuracies is preferred."""
        known = {(d.eval, d.metric) for pair in self.pairs for d in pair.deltas}
        found = {name: [metric for metric in ACCURACIES if (name, metric) in known] for name in self.evals}
        return {name: metrics[0] for name, metrics in found.items() if metrics}

    def other_tasks(self) -> dict[str, str]:
        """Tasks without an accuracy, such as lm-eval's own wikitext, and the metric that stands for each."""
        found: dict[str, str] = {}
        for d in (d for pair in self.pairs for d in pair.deltas):
            if self.evals[d.eval].kind != "perplexity" and d.eval not in self.tasks():
                found[d.eval] = "word_perplexity" if "word_perplexity" in (d.metric, found.get(d.eval)) else d.metric
        return found


def describe_samples(info: EvalInfo) -> str:
    """'c4 (subset): 256 windows', with '(partial)' where these are not all."""
    unit = ("question" if info.kind == "task" else "window") + ("" if info.samples == 1 else "s")
    return f"{info.label}: {info.samples:,} {unit}" + (" (partial)" if info.partial else "")


def find(pair: Paired, name: str, metric: str) -> Delta | None:
    """The delta of one evaluation and metric, None where the run does not have it."""
    return next((d for d in pair.deltas if d.eval == name and d.metric == metric), None)


def group_pairs(pairs: Iterable[Paired]) -> list[Group]:
    """Splits runs by the baseline that they name, and orders groups and the runs in them."""
    by_baseline: dict[str, list[Paired]] = {}
    for pair in pairs:
        by_baseline.setdefault(pair.record.baseline_fingerprint or pair.record.fingerprint, []).append(pair)
    return arranged([Group((), ()).of(members) for members in by_baseline.values()])


def arranged(groups: Iterable[Group]) -> list[Group]:
    """Groups in order, each with a slug and, where several have one title, what tells it from the others."""
    groups = sorted((replace(group, slug="", detail="") for group in groups), key=_group_order)
    slugs = distinct([file_name(group.title) for group in groups])
    groups = [replace(group, slug=slug) for group, slug in zip(groups, slugs, strict=True)]
    return _with_details(groups)


def file_name(title: str) -> str:
    """A title as a part of file names and links."""
    return re.sub(r"[^\w.-]+", "_", title.replace("=", ""))


def distinct(names: Sequence[str]) -> list[str]:
    """The names, counted where they repeat; counts, unlike fingerprints, stay when a run is repeated."""
    found: list[str] = []
    for name in names:
        count = next(n for n in itertools.count(1) if (name if n == 1 else f"{name}_{n}") not in found)
        found.append(name if count == 1 else f"{name}_{count}")
    return found


def _with_details(groups: Sequence[Group]) -> list[Group]:
    """Says in what groups differ that have one title apart from the tensor-parallel size."""
    found = list(groups)
    for title in dict.fromkeys(group.heading(tp=False) for group in groups):
        places = [i for i, group in enumerate(groups) if group.heading(tp=False) == title]
        settings = [{k: v for k, v in setting(groups[i].first).items() if k != "tp"} for i in places]
        for i, text in zip(places, differences(settings), strict=True):
            found[i] = replace(groups[i], detail=text)
    titles = [group.title for group in found]
    return [
        group if titles.count(group.title) == 1 else replace(group, detail=_with_baseline(group)) for group in found
    ]


def _with_baseline(group: Group) -> str:
    """The detail of a group that no setting tells from another: the fingerprint of its baseline."""
    baseline = group.first.baseline_fingerprint or group.first.fingerprint
    return ", ".join(filter(None, [group.detail, f"baseline {baseline[:10]}"]))


def _row_order(pair: Paired) -> tuple[object, ...]:
    record = pair.record
    bits = record.wire_number("effective_bits")
    quantized = record.arm.reduce_format is not None
    return not record.is_baseline, quantized, -bits if bits == bits else 0.0, record.arm.label, record.fingerprint


def _group_order(group: Group) -> tuple[object, ...]:
    arm = group.first.arm
    identity = group.first.baseline_fingerprint or group.first.fingerprint
    return arm.model, arm.weights, arm.dtype, arm.tp, group.first.device_type, group.samples, identity


def row_labels(records: Sequence[RunRecord]) -> list[str]:
    """Each run's label; runs of one label are told apart by how they were carried out, or by their fingerprint."""
    labels = [record.arm.label for record in records]
    for key in ("policy", "exec", "reducer", "codec"):
        for label in {text for text in labels if labels.count(text) > 1}:
            same = [i for i, text in enumerate(labels) if text == label]
            if len({getattr(records[i].arm, key) for i in same}) > 1:
                for i in same:
                    labels[i] += f", {key} {getattr(records[i].arm, key)}"
    return [
        text if labels.count(text) == 1 else f"{text} [{record.fingerprint[:6]}]"
        for text, record in zip(labels, records, strict=True)
    ]
