"""`fc-eval allocate`: from measured layer errors to a policy file, and what it is predicted to cost and to lose.

runs with eval=[wikitext2,layer_error] -> loss model -> cheapest assignment within the budget -> policy=FILE
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import yaml

from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError
from fc_eval.results.allocation import Allocation, Option, allocate, fit_weights, front
from fc_eval.results.compare import Paired, pair_runs
from fc_eval.results.delta import Delta
from fc_eval.results.files import write_atomic
from fc_eval.results.record import load_runs
from fc_eval.results.text import PLUS_MINUS, number, text_table

By = Literal["bits", "bytes"]
# A run that loses more than this, in nats, says nothing about small losses: there they do not add up any more (SmolLM2,
# W = 4: weights fitted to INT6, which loses 0.08 nats, predict 1.35 for INT4, which loses 0.87).
LARGEST_DELTA = 0.5
# Kinds of layers have weights of their own where their shares of the noise differ by this much between runs.
TOLD_APART = 0.5
# A weight is told from 0 by this many of its standard errors.
SURE = 2.0
# Of the names of policies that are written here.
PREFIX = "allocated_"


@dataclass(frozen=True)
class Site:
    """One layer: its name and kind, and of each comm that was measured the noise of its output over the signal."""

    name: str
    kind: str
    hidden: int
    noise: Mapping[str, float]


@dataclass(frozen=True)
class Fitted:
    """A run that the loss model is fitted to: its label, its noise by kind of layer, and its measured delta."""

    label: str
    noise: Mapping[str, float]
    delta: Delta


@dataclass(frozen=True)
class Measured:
    """What the runs say: the layers, what the loss model is fitted to, and how the model was run."""

    sites: tuple[Site, ...]
    fitted: tuple[Fitted, ...]
    pairs: tuple[Paired, ...]
    eval_name: str
    tokens: int

    @property
    def tp(self) -> int:
        """W."""
        return self.pairs[0].record.arm.tp

    @property
    def dtype(self) -> str:
        """'bf16', 'fp16' or 'fp32'."""
        return self.pairs[0].record.arm.dtype


def read_measured(folders: Sequence[Path], eval_name: str | None = None) -> Measured:
    """Reads layer errors and perplexity deltas of the runs in some folders.

    Args:
        folders: as for a report.
        eval_name: the perplexity that the budget is about; None for the first that all uniform runs have.

    Raises:
        FcEvalError: no such runs, or runs of several baselines.
    """
    records, _ = load_runs(folders)
    pairs = [pair for pair in pair_runs(records) if pair.baseline is not None and not pair.problem]
    # Runs that verify an allocation say how good it was; fitting to them would change what they verify.
    arms = [p for p in pairs if p.record.layers and not p.record.is_baseline]
    arms = [p for p in arms if not p.record.arm.policy.startswith(PREFIX)]
    if not arms:
        raise FcEvalError("no run here has layer errors: run several comms with eval=[wikitext2,layer_error] first")
    baselines = dict.fromkeys(pair.record.baseline_fingerprint for pair in arms)
    if len(baselines) > 1:
        raise FcEvalError(f"these runs have {len(baselines)} baselines: give those of one model, tp and evaluations")
    name = eval_name or next((d.eval for d in arms[0].deltas if d.metric == "perplexity"), None)
    sites: dict[str, Site] = {}
    fitted = []
    for pair in arms:
        if (d := _delta(pair, name)) is None:
            raise FcEvalError(
                f"{pair.record.path.name} lacks the perplexity {name or 'of a text'!r} that errors are weighed by: "
                "run all comms with eval=[wikitext2,layer_error]"
            )
        table = next(iter(pair.record.layers.values())).table.query("mode == 'isolated' and part == 'output'")
        # Where there is no signal there is nothing to quantize, and no noise.
        table = table.assign(noise=table["mse"] / table["signal_power"].where(table["signal_power"] > 0, 1.0))
        noise = {str(kind): float(rows["noise"].sum()) for kind, rows in table.groupby("kind", sort=False)}
        fitted.append(Fitted(pair.record.arm.label, noise, d))
        for row in table.to_dict("records"):
            known = sites[row["site"]].noise if row["site"] in sites else {}
            own = {**known, str(row["comm"]): float(row["noise"])}
            sites[row["site"]] = Site(row["site"], row["kind"], int(row["hidden"]), own)
    layers = next(iter(arms[0].record.layers))
    tokens = int(arms[0].record.protocol[layers]["window_tokens"])
    return Measured(tuple(sites.values()), tuple(fitted), tuple(pairs), str(name), tokens)


def _delta(pair: Paired, name: str | None) -> Delta | None:
    return next((d for d in pair.deltas if (d.eval, d.metric) == (name, "perplexity")), None)


def _is_small(d: Delta) -> bool:
    return math.isfinite(d.ln_ratio) and d.ln_ratio < LARGEST_DELTA


def weights_of(measured: Measured) -> dict[str, float]:
    """Nats per unit of noise over signal, by kind of layer, fitted to the runs that lose little.

    One weight for all layers, unless runs with policies (policy=o_proj_only, down_proj_only) tell the kinds apart: the
    errors of all kinds fall alike with every further bit.

    Raises:
        FcEvalError: all of them lose too much, or so little that a weight cannot be told from 0.
    """
    # A run that equals the baseline in every window says nothing of what noise costs.
    usable = [f for f in measured.fitted if _is_small(f.delta) and f.delta.ln_ratio_stderr != 0]
    if not usable:
        raise FcEvalError(
            f"every run here loses {LARGEST_DELTA} nats or more, where errors do not add up: measure finer formats too"
        )
    kinds = list(dict.fromkeys(site.kind for site in measured.sites))
    noise_RK = np.array([[fitted.noise[kind] for kind in kinds] for fitted in usable])
    deltas_R = np.array([fitted.delta.ln_ratio for fitted in usable])
    stderrs_R = np.array([f.delta.ln_ratio_stderr for f in usable])
    if np.isnan(stderrs_R).any():
        raise FcEvalError(
            f"the errors of the losses in {measured.eval_name!r} are not known, as with one window: without them a "
            "loss cannot be told from noise; measure two windows or more (eval.limit)"
        )
    shares_RK = noise_RK / noise_RK.sum(1, keepdims=True)
    is_one = np.ptp(shares_RK, axis=0).max() < TOLD_APART
    weights_K, errors_K = fit_weights(noise_RK.sum(1, keepdims=True) if is_one else noise_RK, deltas_R, stderrs_R)
    vague = [k for k, (weight, error) in enumerate(zip(weights_K, errors_K, strict=True)) if weight < SURE * error]
    if vague:
        names = "all layers" if is_one else " and ".join(kinds[k] for k in vague)
        raise FcEvalError(
            f"what the noise of {names} costs cannot be told from 0 (weight {weights_K[vague[0]]:.3g}, error "
            f"{errors_K[vague[0]]:.2g}): every assignment would seem to lose nothing; measure more windows "
            "(eval.limit) or coarser formats"
        )
    return dict.fromkeys(kinds, float(weights_K[0])) if is_one else dict(zip(kinds, weights_K.tolist(), strict=True))


def options_of(measured: Measured, weights: Mapping[str, float], by: By) -> list[list[Option]]:
    """Every measured comm for every layer, and no quantization; costs add up to mean bits, or to bytes per token."""
    values = sum(site.hidden for site in measured.sites)
    found = []
    for site in measured.sites:
        own = []
        for name in (*site.noise, BASELINE.name):
            traffic = traffic_of(parse_comm(name), measured.tp, measured.tokens, site.hidden, measured.dtype)
            cost = traffic.effective_bits * site.hidden / values
            if by == "bytes":
                cost = traffic.wire_bytes_per_rank / measured.tokens
            own.append(Option(name, cost, weights[site.kind] * site.noise.get(name, 0.0)))
        found.append(own)
    return found


def rules_of(measured: Measured, allocation: Allocation) -> list[dict[str, str]]:
    """Rules of a policy: a layer each, and `*` for the comm that most of them have."""
    names = [option.name for option in allocation.chosen]
    most = Counter(names).most_common(1)[0][0]
    rules = [
        {"match": site.name, "comm": name} for site, name in zip(measured.sites, names, strict=True) if name != most
    ]
    return [*rules, {"match": "*", "comm": most}]


def run_allocate(folders: Sequence[Path], budget: float, by: By, eval_name: str | None, out: Path) -> str:
    """Writes the policy file and returns what to say: the model's fit, the assignment, the command that verifies it.

    Args:
        folders: runs of several comms with layer errors and a perplexity, and their baseline.
        budget: share by which the perplexity may grow, such as 0.01.
        by: what is to be saved: effective bits per value, or bytes that the busiest rank sends.
        eval_name: as for `read_measured`.
        out: the policy file.

    Raises:
        FcEvalError: as `read_measured` and `weights_of`, or a budget that is none.
    """
    if not 0 < budget < math.e - 1:
        raise FcEvalError(f"--budget {budget:g} is not possible: expected a share of the perplexity such as 0.01")
    measured = read_measured(folders, eval_name)
    weights = weights_of(measured)
    options_S = options_of(measured, weights, by)
    found = allocate(options_S, math.log1p(budget))
    assert found is not None  # no quantization is an option of every layer, and loses nothing
    rules = rules_of(measured, found)
    name = f"{PREFIX}{by}_{100 * budget:g}pct".replace(".", "_")
    title = (
        f"# Fewest {by} within {100 * budget:g} % of the perplexity {measured.eval_name}, predicted from layer errors."
    )
    policy = yaml.safe_dump({"name": name, "rules": rules}, sort_keys=False)
    write_atomic(out, f"{title}\n{policy}".encode())
    return "\n\n".join(
        [
            _fit_text(measured, weights),
            _front_text(options_S, by),
            _found_text(measured, found, budget, by, rules),
            f"{out}: a run with the same settings and policy={out} verifies it; then this command shows its loss too",
        ]
    )


def _fit_text(measured: Measured, weights: Mapping[str, float]) -> str:
    rows = []
    for run in measured.fitted:
        predicted = sum(weights[kind] * noise for kind, noise in run.noise.items())
        delta = f"{run.delta.ln_ratio:.5f} {PLUS_MINUS} {number(run.delta.ln_ratio_stderr, 5)}"
        rows.append([run.label, delta, f"{predicted:.5f}", "" if _is_small(run.delta) else "not fitted"])
    said = ", ".join(f"{kind} {weight:.3g}" for kind, weight in weights.items())
    title = f"loss model: nats on {measured.eval_name} = sum over layers of weight x noise / signal; weights: {said}"
    return f"{title}\n\n{text_table(['run', 'measured ln(PPL ratio)', 'predicted', ''], rows)}"


def _front_text(options_S: Sequence[Sequence[Option]], by: By) -> str:
    """Ten points of the front, evenly spaced in steps."""
    points = front(options_S)
    places = sorted({round(k * (len(points) - 1) / 9) for k in range(10)})
    rows = [[number(points[p].cost, 2), f"{100 * math.expm1(min(points[p].loss, 700)):.3g} %"] for p in places]
    return text_table([f"{_unit(by)}", "predicted growth of the perplexity"], rows, left=0)


def _found_text(
    measured: Measured, found: Allocation, budget: float, by: By, rules: Sequence[Mapping[str, str]]
) -> str:
    counts: Counter[tuple[str, str]] = Counter()
    for site, option in zip(measured.sites, found.chosen, strict=True):
        counts[option.name, site.kind] += 1
    rows = [[name, kind, str(count)] for (name, kind), count in sorted(counts.items())]
    lines = [
        f"within {100 * budget:g} %: {found.cost:.2f} {_unit(by)} (no assignment has less than {found.bound:.2f}), "
        f"predicted {100 * math.expm1(found.loss):+.3f} %",
        "",
        text_table(["comm", "layers", "how many"], rows, left=2),
    ]
    wanted = [[rule["match"], rule["comm"]] for rule in rules]
    for pair in measured.pairs:
        settings = pair.record.config.get("config", {})
        d = _delta(pair, measured.eval_name)
        if settings.get("policy") == wanted and d is not None:
            value, error = 100 * math.expm1(d.ln_ratio), 100 * d.ln_ratio_stderr
            said = f"{PLUS_MINUS} {error:.3f} %" if math.isfinite(error) else "% (one window has no error)"
            bits = pair.record.wire_number("effective_bits")
            over = f", more than the budget of {100 * budget:g} %" if d.ln_ratio > math.log1p(budget) else ""
            lines += ["", f"measured by {pair.record.path.name}: {value:+.3f} {said}, {bits:.2f} bits{over}"]
    return "\n".join(lines)


def _unit(by: By) -> str:
    return "effective bits per value" if by == "bits" else "bytes per rank and token"
