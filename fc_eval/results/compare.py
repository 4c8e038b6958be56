"""Which two runs may be compared, and their comparison: `compare_runs`, `pair_runs`, `render_comparison`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fc_eval.errors import FcEvalError
from fc_eval.results.delta import Delta, against_itself, alone, of_questions, of_windows
from fc_eval.results.fingerprint import CALIBRATION
from fc_eval.results.record import RunRecord
from fc_eval.results.text import delta_text, flips_text, interval_text, p_text, text_table, value_text

# How far a baseline may lie from a published perplexity before it is flagged: rounding and kernels explain less.
PUBLISHED_TOLERANCE = {"wikitext2": 0.02, "c4": 0.03, "c4_new": 0.03}


# What differs where a checksum does.
CHECKED = {
    "contents of the model's files": "the contents of the model's files",
    "token_ids_sha256": "the tokens",
    "text_sha256": "the text",
}


@dataclass(frozen=True)
class Paired:
    """A run with its baseline.

    Attributes:
        record: the run.
        baseline: what it is compared with: itself for a baseline, None where it is not among the runs.
        deltas: one per evaluation and metric.
        problem: why there is no comparison, empty where there is one.
    """

    record: RunRecord
    baseline: RunRecord | None
    deltas: tuple[Delta, ...]
    problem: str = ""


def compare_runs(record: RunRecord, baseline: RunRecord) -> list[Delta]:
    """Pairs two runs window by window and question by question.

    Returns:
        One `Delta` per metric of every evaluation of `record`, in its order; without a baseline's numbers where
        `baseline` did not run that evaluation.

    Raises:
        FcEvalError: the runs differ in something that would be mistaken for an effect of communication, did not see
            the same samples, or have no evaluation in common.
    """
    _same_setting(record, baseline)
    deltas = []
    for name, info in record.evals.items():
        if info.kind == "layer_error":
            continue  # a difference from the baseline already, of layers and not of a number
        if name not in baseline.evals:
            deltas += alone(record, name)
        elif info.kind == "perplexity":
            _same_windows(record, baseline, name)
            deltas += of_windows(record, baseline, name)
        else:
            _same_questions(record, baseline, name)
            deltas += of_questions(record, baseline, name)
    return deltas


def pair_runs(records: Iterable[RunRecord]) -> list[Paired]:
    """Pairs every run with the baseline that it names; a missing or unfit one is said, never replaced by another."""
    records = list(records)
    known = {record.fingerprint: record for record in records}
    pairs = []
    for record in records:
        baseline = record if record.is_baseline else known.get(str(record.baseline_fingerprint))
        lone = tuple(delta for name in record.evals for delta in alone(record, name))
        if baseline is record:
            pairs.append(Paired(record, record, tuple(against_itself(record))))
        elif baseline is None:
            why = f"its baseline {str(record.baseline_fingerprint)[:10]} is not among these runs"
            pairs.append(Paired(record, None, lone, why))
        else:
            try:
                pairs.append(Paired(record, baseline, tuple(compare_runs(record, baseline))))
            except FcEvalError as error:
                pairs.append(Paired(record, baseline, lone, str(error)))
    return pairs


def published_flags(record: RunRecord) -> list[str]:
    """Sentences on a baseline's perplexities that are not what was published for the model."""
    flags = []
    for name, published in record.published.items():
        info, tolerance = record.evals.get(name), PUBLISHED_TOLERANCE.get(name)
        if not record.is_baseline or info is None or info.partial or tolerance is None or info.label != name:
            continue  # partial runs and subsets are other texts than the published number's
        value = record.results[name]["perplexity"]
        if not abs(value - published) <= tolerance + 1e-9:  # a decimal tolerance is no exact binary number
            flags.append(
                f"{record.arm.model} {name}: baseline perplexity {value:.3f} is not within {tolerance} of the "
                f"published {published:g}; check window, BOS, dtype and data before trusting a delta"
            )
    return flags


def render_comparison(base: RunRecord, run: RunRecord) -> str:
    """A text table of a run beside the one that it is compared with, for the screen; delta = run - base.

    The deltas are those of `pair_runs`, so a pair shows here what it shows in a report. Where one run is the baseline
    that the other names, it is the base in either order, and the text says so.

    Raises:
        FcEvalError: the two cannot be compared (see `compare_runs`).
    """
    swapped = base.baseline_fingerprint == run.fingerprint
    if swapped:
        base, run = run, base
    header = ["eval", "metric", "samples", "base", "run", "run \N{MINUS SIGN} base, \N{PLUS-MINUS SIGN} paired error"]
    rows = []
    for d in compare_runs(run, base):
        samples = f"{d.samples:,}" + (" (partial)" if d.partial else "")
        row = [d.label, d.metric, samples, value_text(d.baseline, d.metric), value_text(d.value, d.metric)]
        rows.append([*row, delta_text(d), interval_text(d), p_text(d), flips_text(d)])
    lines = [f"base  {_describe(base)}", f"run   {_describe(run)}"]
    lines += ["(the second one given is the baseline of the first, so it is the base)"] if swapped else []
    foot = "accuracies and their deltas in percent; lost: only base was right; gained: only run was right"
    return "\n".join([*lines, "", text_table([*header, "95% interval", "p", "lost/gained"], rows, left=2), "", foot])


def _describe(run: RunRecord) -> str:
    arm, bits = run.arm, run.wire_number("effective_bits")
    how = f"{arm.exec}, codec {arm.codec}" + (f", reducer {arm.reducer}" if arm.reducer else "")
    weights = "" if arm.weights == "native" else f" {arm.weights}"
    return f"{run.path.name}: {arm.model} {arm.dtype}{weights} tp={arm.tp}, {arm.label}, {bits:.2f} bits ({how})"


def _same_setting(a: RunRecord, b: RunRecord) -> None:
    facts = [(key, getattr(a.arm, key), getattr(b.arm, key)) for key in ("model", "dtype", "tp")]
    if (a.arm.comm_full, a.arm.policy) != (b.arm.comm_full, b.arm.policy):  # one difference at a time
        facts.append(("weights", a.arm.weights, b.arm.weights))
    facts += _model_facts(a, b)
    facts.append(("device type", a.device_type, b.device_type))
    facts.append(("batch size (tasks, windows)", a.batch_size, b.batch_size))
    common = [name for name in a.evals if name in b.evals]
    for name in common:
        facts.append((f"kind of {name}", a.evals[name].kind, b.evals[name].kind))
        ours, theirs = a.protocol.get(name, {}), b.protocol.get(name, {})
        for key in sorted(set(ours) | set(theirs)):
            facts.append((f"protocol of {name}: {key}", ours.get(key, "not set"), theirs.get(key, "not set")))
    different = [_difference(what, x, y) for what, x, y in facts if x != y]
    if different:
        raise FcEvalError(
            f"{a.path.name} and {b.path.name} cannot be compared, they differ in {', '.join(different)}: "
            "compare runs that differ only in communication, or only in how weights are stored"
        )
    if not common:
        raise FcEvalError(
            f"{a.path.name} ran {', '.join(a.evals)} and {b.path.name} ran {', '.join(b.evals)}: "
            "expected at least one evaluation in common"
        )


def _model_facts(a: RunRecord, b: RunRecord) -> list[tuple[str, object, object]]:
    """Where the weights come from and what they are: two models may share a name. Older records say less."""
    ours, theirs = (run.config.get("config", run.config).get("model") or {} for run in (a, b))
    keys = ("hub_id", "revision", "package", "tiny", "attn_implementation", "add_bos_token")
    facts: list[tuple[str, object, object]] = [
        (f"model.{key}", ours[key], theirs[key]) for key in keys if key in ours and key in theirs
    ]
    our_files, their_files = (run.config.get("model_files") for run in (a, b))
    if our_files is not None and their_files is not None:
        facts.append(("contents of the model's files", _own_files(our_files), _own_files(their_files)))
    return facts


def _difference(what: str, x: object, y: object) -> str:
    """One difference in words; checksums say that contents differ, and nothing to a reader."""
    if what in CHECKED:
        return CHECKED[what]
    *_, key = what.rpartition(": ")
    if key in CHECKED:
        return f"{CHECKED[key]} of {what.removeprefix('protocol of ').removesuffix(f': {key}')}"
    return f"{what} ({_short(x)} and {_short(y)})"


def _own_files(lines: Sequence[str]) -> list[str]:
    """Those of the checkpoint, without the text that smoothing looks at, which belongs to how weights are stored."""
    return [line for line in lines if not str(line).startswith(CALIBRATION)]


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) > 24 else text


def _same_windows(a: RunRecord, b: RunRecord, name: str) -> None:
    x, y = a.windows[name], b.windows[name]
    for what, same in (
        (f"window count ({len(x.tokens)} and {len(y.tokens)})", len(x.tokens) == len(y.tokens)),
        ("tokens per window", x.tokens.tolist() == y.tokens.tolist()),
        ("documents of the windows", x.cluster.tolist() == y.cluster.tolist()),
    ):
        if not same:
            raise FcEvalError(
                f"{a.path.name} and {b.path.name} differ in the {what} of {name}: run both on the same text"
            )


def _same_questions(a: RunRecord, b: RunRecord, name: str) -> None:
    ours, theirs = a.samples[name].doc_hash, b.samples[name].doc_hash
    if ours != theirs:
        lone = sorted(set(ours) ^ set(theirs))
        which = (
            f"{len(lone)} are in one run only, such as {lone[0][:12]}" if lone else "some stand more often in one run"
        )
        raise FcEvalError(
            f"{a.path.name} and {b.path.name} did not answer the same questions of {name} "
            f"({len(ours)} and {len(theirs)}; {which}): run both with the same data and eval.limit"
        )
