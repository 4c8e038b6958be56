"""From what ran to what is recorded: the summaries of single evaluations, and `result.json` made of them."""

import math
import platform
from collections.abc import Mapping
from typing import Any

import torch

from fc_eval.collective.peer_rules import RULES
from fc_eval.config import RunConfig
from fc_eval.evaluate.processes import Processes
from fc_eval.evaluate.run import EvalResult
from fc_eval.evaluate.spec import EvalSpec
from fc_eval.models.half_products import multiplies_in_fp32
from fc_eval.models.load import LoadedModel
from fc_eval.parallel.self_check import SelfCheck
from fc_eval.parallel.stats import CommStats
from fc_eval.results.fingerprint import package_versions
from fc_eval.results.store import SCHEMA
from fc_eval.weights.int8 import way_of_products
from fc_eval.wire.format import WIRE_VERSION
from fc_eval.wire.layout import DTYPE_BYTES, nominal_bits


def eval_summary(spec: EvalSpec, result: EvalResult, stats: CommStats, seconds: float) -> dict[str, Any]:
    """One finished evaluation as JSON: its numbers, its protocol, what its all-reduces cost, the time it took."""
    return {
        "schema": SCHEMA,
        "seconds": seconds,
        "kind": spec.kind,
        "label": result.protocol.get("label", spec.name),
        "metrics": {key: _finite(value) for key, value in result.metrics.items()},
        "samples": result.samples,
        "partial": result.partial,
        "protocol": result.protocol,
        "comm": {
            "tokens": stats.tokens,
            "elements": stats.elements,
            "effective_bits": stats.effective_bits,
            "wire_bytes_per_rank": stats.wire_bytes_per_rank,
            "qdq_rounds": stats.qdq_rounds,
            "differing_values": stats.differing_values,
            "stages": [
                {
                    "stage": stage.stage,
                    "elements": stage.elements,
                    "encoded_bytes": stage.encoded_bytes,
                    "bytes_per_rank": list(stage.bytes_per_rank),
                    "nonfinite_groups": stage.nonfinite_groups,
                }
                for stage in stats.stages
            ],
            "forwards": stats.forwards,
            "calls": dict(stats.calls),
            "unquantized_calls": stats.unquantized_calls,
            "codec": stats.codec,
            "notes": list(stats.notes),
        },
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no Inf; a number that is neither is written as null."""
    return value if math.isfinite(value) else None


def _wire(config: RunConfig, comms: list[Mapping[str, Any]], hidden: int) -> dict[str, Any]:
    """Bits and bytes over all evaluations of a run; bits are weighted by the values that they were spent on."""
    elements = sum(c["elements"] for c in comms)
    tokens = sum(c["tokens"] for c in comms)
    sent = sum(c["wire_bytes_per_rank"] for c in comms)
    stages: dict[str, dict[str, Any]] = {}
    for stage in (stage for c in comms for stage in c["stages"]):
        kept = stages.setdefault(stage["stage"], dict(stage) | {"bytes_per_rank": [0] * config.tp})
        if kept["bytes_per_rank"] != [0] * config.tp:
            for key in ("elements", "encoded_bytes", "nonfinite_groups"):
                kept[key] += stage[key]
        kept["bytes_per_rank"] = [a + b for a, b in zip(kept["bytes_per_rank"], stage["bytes_per_rank"], strict=True)]
    comm = config.comm.build()
    dtype = config.model.dtype
    nominal = [nominal_bits(fmt, dtype, hidden) for fmt in (comm.reduce, comm.gather) if fmt is not None]
    if comm.peer is not None:
        nominal = [comm.peer.nominal_bits(hidden)]
    nominal = nominal or [8.0 * DTYPE_BYTES[dtype]]
    # Without quantization a two-step all-reduce sends (W - 1) / W of the tensor in each of its two stages.
    unquantized = 2 * (config.tp - 1) * elements * DTYPE_BYTES[dtype] // config.tp
    return {
        "effective_bits": sum(c["effective_bits"] * c["elements"] for c in comms) / elements if elements else 0.0,
        "nominal_bits": sum(nominal) / len(nominal),
        "wire_bytes_per_rank": sent,
        "wire_bytes_per_token": sent / tokens if tokens else 0.0,
        "unquantized_bytes_per_rank": unquantized,
        "wire_ratio": unquantized / sent if sent else None,
        "stages": list(stages.values()),
        "qdq_rounds": max((c["qdq_rounds"] for c in comms), default=0),
        "differing_values": sum(c.get("differing_values", 0) for c in comms),
    }


def result_of(
    *,
    config: RunConfig,
    tree: Mapping[str, Any],
    summaries: Mapping[str, Mapping[str, Any]],
    loaded: LoadedModel,
    hidden: int,
    check: SelfCheck,
    reducer: str | None,
    processes: Processes,
    setup_s: float,
) -> dict[str, Any]:
    """`result.json` of a finished run; `hidden` is the width of what is reduced, `tree` what `config.yaml` holds.

    Its `total_s` is the time spent on what it holds: each evaluation's own, whichever attempt computed it, and
    `setup_s`, what the attempt that finished the run took to load and check the model. Time of attempts that came to
    nothing does not count.
    """
    comm = config.comm.build()
    first, last = comm.peer or comm.reduce, comm.peer or comm.gather
    if comm.peer is not None and RULES[comm.peer.system].one_step:
        last = None
    comms = [summary["comm"] for summary in summaries.values()]
    calls: dict[str, int] = {}
    for site, count in (item for c in comms for item in c["calls"].items()):
        calls[site] = calls.get(site, 0) + count
    wire = _wire(config, comms, hidden)
    codecs = sorted({c["codec"] for c in comms if c["codec"]})
    device = next(loaded.model.parameters()).device
    return {
        "schema": SCHEMA,
        "status": "done",
        "fingerprint": tree["fingerprint"],
        "baseline_fingerprint": tree["baseline_fingerprint"],
        "contents": {"model": tree["model_files"], "data": tree["data"]},
        "arm": {
            "model": config.model.name,
            "weights": config.model.weights_label,
            "dtype": config.model.dtype,
            "comm": comm.short_name,
            "comm_full": comm.name,
            "label": ", ".join(filter(None, [comm.label, config.policy_label])),
            "algorithm": comm.algorithm,
            "reduce_format": first.name if first else None,
            "gather_format": last.name if last else None,
            "group_size": first.group_size if first else None,
            "policy": config.policy_name,
            "policy_rules": [list(rule) for rule in config.policy],
            "tp": config.tp,
            "exec": config.exec,
            "plan": config.split_plan,
            "codec": "+".join(codecs) or "none",
            "reducer": reducer,
        },
        "results": {name: summary["metrics"] for name, summary in summaries.items()},
        "evals": {
            name: {key: summary[key] for key in ("kind", "label", "samples", "partial")}
            for name, summary in summaries.items()
        },
        "wire": wire,
        "calls": {
            "forwards": sum(c["forwards"] for c in comms),
            "sites": len(calls),
            "total": sum(calls.values()),
            "per_site": calls,
        },
        "nonfinite_groups": {stage["stage"]: stage["nonfinite_groups"] for stage in wire["stages"]},
        "env": package_versions()
        | {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "wire_version": WIRE_VERSION,
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "products": "fp32" if multiplies_in_fp32(loaded.model) else config.model.dtype,
            "threads": torch.get_num_threads(),
            "processes": processes.count,
        }
        | ({"int8_products": way_of_products(device)} if config.model.weights == "w8a8" else {}),
        "protocol": {name: summary["protocol"] for name, summary in summaries.items()},
        "published": dict(config.model.published) if config.model.published else None,
        "notes": list(dict.fromkeys([*loaded.notes, *tree["unknown"], *(note for c in comms for note in c["notes"])])),
        "self_check": {"relative_error": check.relative_error, "bound": check.bound, "same_top1": check.same_top1},
        "time": {
            "total_s": setup_s + sum(summary["seconds"] for summary in summaries.values()),
            "setup_s": setup_s,
            "evals_s": {name: summary["seconds"] for name, summary in summaries.items()},
        },
    }
