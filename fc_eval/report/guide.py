"""How to read a report: only what its own numbers need."""

from collections.abc import Sequence

from fc_eval.report.groups import Group


def guide(groups: Sequence[Group]) -> tuple[tuple[str, str], ...]:
    """Terms and their explanations, in the order in which a reader meets them."""
    evals = [info for group in groups for info in group.evals.values()]
    kinds = {info.kind for info in evals}
    metrics = {d.metric for group in groups for pair in group.pairs for d in pair.deltas}
    entries = [
        (
            "bits",
            "Effective bits per value on the wire: 8 x encoded bytes / values, the mean over the stages, with scales, "
            "zero points and padding counted. INT4 with groups of 128 costs 4.25 bits, not 4." + _padding(groups),
        ),
        (
            "wire ratio",
            "Bytes that the busiest rank sends without quantization, divided by the bytes that it sends with it.",
        ),
        (
            "Δ ± error",
            "The run minus its baseline on the same windows and questions, with the standard error of that paired "
            "difference. The difficulty of the text is in both and cancels, so the error is usually far smaller "
            "than the baseline's own (marked unpaired), which says how much another text of this size would differ. "
            "About two errors are needed before a difference means something.",
        ),
        (
            "baseline",
            "The same model, tensor-parallel size, samples, batch size and device type with an unquantized all-reduce "
            "that adds the partial sums in fp32 in rank order. 'plain' is the framework's own all-reduce: how far it "
            "lies from the baseline is the noise floor.",
        ),
    ]
    if "perplexity" in kinds:
        entries.append(
            (
                "perplexity",
                "exp of the mean loss per token. Deltas come from ln(PPL / baseline's PPL), window by window; windows "
                "cut from one document count as one unit. p: Student's t.",
            )
        )
    if "task" in kinds:
        entries.append(
            (
                "accuracy",
                "In percent, deltas in points. A question is one document of a task; while a run goes on it counts "
                "requests, of which a question has one per possible answer. lost/gained: questions that only the "
                "baseline, or only the run, got right. p: McNemar's test on these, exact below 25 of them and "
                "otherwise chi-square with continuity correction. The interval is a paired bootstrap. Recovery: the "
                "run's accuracy / the baseline's. An error of 0 says that not one of these questions changed sides, "
                "not that none can.",
            )
        )
    if "layer_error" in kinds:
        entries.append(
            (
                "layer error",
                "What quantization does to one layer's all-reduce. Isolated: the layer is given what the baseline "
                "computes. Accumulated: the quantized model's output beside the baseline's at the same positions. "
                "Before reduce-scatter: each rank's partial sum as it is sent; before all-gather: the sum. MSE: mean "
                "square error; relative error: norm of the error / norm of the signal; SQNR: the same squared, in dB, "
                "'exact' where nothing is lost. Saturated: clamping, not rounding, decided the code. Zero-range: all "
                "elements of the group are equal (asymmetric) or zero.",
            )
        )
    if "kl_mean" in metrics:
        entries.append(
            (
                "KL, same top-1",
                "Mean KL divergence of the run's next-token distribution from the baseline's, and the share of "
                "positions at which both find the same token most likely.",
            )
        )
    if any(info.partial for info in evals):
        entries.append(
            ("partial", "Not all samples of the evaluation were used: compare with nothing outside of this report.")
        )
    if any("(subset)" in info.label for info in evals):
        entries.append(
            (
                "(subset)",
                "The data set at hand holds a part of the documents that the protocol draws from: deltas are sound, "
                "with errors by document, but the value is compared with no published number.",
            )
        )
    return tuple(entries)


def _padding(groups: Sequence[Group]) -> str:
    """Why a format costs more than its nominal bits here, by the example that costs most; empty where none does."""
    found = []
    for record in (pair.record for group in groups for pair in group.pairs):
        bits, nominal = record.wire_number("effective_bits"), record.wire_number("nominal_bits")
        if record.arm.policy == "uniform" and isinstance(record.arm.group_size, int) and bits > nominal + 0.005:
            found.append((bits / nominal, record))
    if not found:
        return ""
    record = max(found, key=lambda item: (item[0], item[1].arm.label))[1]
    bits, nominal = record.wire_number("effective_bits"), record.wire_number("nominal_bits")
    why = "because rows and messages are filled up to whole groups and blocks"
    shape = ((record.config.get("config") or {}).get("model") or {}).get("shape") or {}
    hidden, group = shape.get("hidden"), record.arm.group_size
    in_rows = record.arm.algorithm != "peer"  # the groups of other systems run on over rows
    if in_rows and isinstance(hidden, int) and isinstance(group, int) and hidden % group:
        why = f"because {hidden} values a row are no multiple of {group} and fill {-(-hidden // group)} groups"
    return f" Here {record.arm.label} costs {bits:.2f} instead of {nominal:.2f}, {why}."
