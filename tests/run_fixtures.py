"""Run folders made by hand, with deltas that are known: `write_run` and a few sets of runs.

Window losses of an arm are the baseline's plus `shift` nats per token, alternately `spread` more and less, so that
ln(PPL ratio) is exactly `shift` and its standard error over n independent windows exactly spread / sqrt(n - 1).
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fc_eval.results.store import RunFolder

TOKENS = 2047
HIDDEN = 576


@dataclass(frozen=True)
class Task:
    """Questions 0..right-1 were right in the baseline; the arm loses the first `lost` of them and gains `gained`."""

    questions: int = 200
    right: int = 120
    lost: int = 0
    gained: int = 0
    has_norm: bool = True


@dataclass(frozen=True)
class Run:
    """One run to write; `comm` is a preset name, `base` the fingerprint of its baseline, None for a baseline."""

    comm: str = "fp32_ordered"
    base: str | None = None
    label: str = "baseline (fp32 ordered)"
    reduce: str | None = None
    gather: str | None = None
    bits: float = 16.0
    shift: float = 0.0
    spread: float = 0.0
    windows: int = 16
    texts: tuple[str, ...] = ("wikitext2",)
    tasks: dict[str, Task] = field(default_factory=dict)
    divergence: bool = False
    tp: int = 4
    model: str = "smollm2"
    weights: str = "native"
    dtype: str = "bf16"
    partial: bool = True
    device: str = "cpu"
    batch_size: int = 8
    protocol: dict[str, object] = field(default_factory=dict)
    published: dict[str, float] | None = None
    notes: tuple[str, ...] = ()
    policy: str = "uniform"
    codec: str = "reference"
    nonfinite: int = 0
    clusters: int | None = None
    mean_nll: float = 3.0

    @property
    def fingerprint(self) -> str:
        """A stable identity, as the real one is: equal settings, equal fingerprint."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def arm_of(self, base: "Run", **changes: object) -> "Run":
        """This run as an arm of `base`, with its samples and protocol."""
        same = {
            k: getattr(base, k) for k in ("windows", "texts", "tp", "model", "weights", "dtype", "partial", "clusters")
        }
        return replace(self, base=base.fingerprint, **(same | changes))


def quantized(base: Run, comm: str, bits: float, shift: float, **changes: object) -> Run:
    """A two-step arm of `base`; `comm` is 'int4' or 'int4_int8', group size 128 unless `group` is given."""
    group = changes.pop("group", 128)
    first, _, second = comm.partition("_")
    alias = "INT6 " if comm == "int4_int8" else ""
    name = first.upper() if not second else f"{alias}({first.upper()} reduce, {second.upper()} gather)"
    run = Run(
        comm=comm,
        label=f"{name} g{group}",
        reduce=f"{first}-g{group}-asym",
        gather=f"{second or first}-g{group}-asym",
        bits=bits,
        shift=shift,
        spread=0.2 * abs(shift) + 0.0002,
        tasks=base.tasks,
    )
    return run.arm_of(base, **changes)


def _config(run: Run) -> dict[str, object]:
    """The configuration as `RunConfig.as_dict` gives it."""
    limit = run.windows if run.partial else None
    specs = [
        {
            "kind": "perplexity",
            "name": text,
            "protocol": text,
            "window_tokens": TOKENS + 1,
            "path": None,
            "limit": limit,
        }
        for text in run.texts
    ]
    specs += [{"kind": "task", "name": name, "task": name, "num_fewshot": 0, "limit": limit} for name in run.tasks]
    group = run.reduce.split("-g")[1].split("-")[0] if run.reduce else "128"
    first, second = ((text or "").split("-")[0] or None for text in (run.reduce, run.gather))
    return {
        "model": {"name": run.model, "dtype": run.dtype},
        "comm": {
            "algorithm": "two_step" if run.reduce else run.comm,
            "reduce": first,
            "gather": None if second == first else second,
            "group_size": None if group == "128" else int(group) if group.isdigit() else group,
            "node_size": None,
        },
        "policy": [],
        "policy_name": run.policy,
        "tp": run.tp,
        "exec": "emulated",
        "codec": "auto",
        "device": run.device.split(":")[0],
        "data_root": None,
        "seed": 0,
        "threads": None,
        "eval": {"specs": specs, "batch_size": run.batch_size, "window_batch": 1, "divergence": run.divergence},
    }


def _windows(run: Run, text: str) -> dict[str, np.ndarray]:
    n = run.windows
    base_n = TOKENS * (run.mean_nll + 0.25 * np.sin(np.arange(n) + len(text)))
    sign_n = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    arrays = {
        "nll_sum": base_n + TOKENS * (run.shift + run.spread * sign_n),
        "tokens": np.full(n, TOKENS),
        "cluster": np.arange(n) % (run.clusters or n),
    }
    if run.divergence and run.base:
        arrays["kl_mean"] = np.full(n, 0.5 * run.shift) + 0.05 * run.shift * sign_n
        arrays["same_top1"] = 1 - np.full(n, run.shift) - 0.1 * run.shift * sign_n
    return arrays


def _perplexity(run: Run, arrays: dict[str, np.ndarray]) -> dict[str, float | None]:
    nll = float(arrays["nll_sum"].sum() / arrays["tokens"].sum())
    numbers = {
        "perplexity": float(np.exp(nll)) if nll < 700 else None,
        "nll": nll,
        "tokens": int(arrays["tokens"].sum()),
        "windows": run.windows,
    }
    if "kl_mean" in arrays:
        kl_n = arrays["kl_mean"]
        numbers |= {"kl_mean": float(kl_n.mean()), "kl_p95": 3 * float(kl_n.mean()), "kl_max": 40 * float(kl_n.mean())}
        numbers["same_top1"] = float(arrays["same_top1"].mean())
    return numbers


def _answers(task: Task, is_arm: bool) -> np.ndarray:
    right_n = (np.arange(task.questions) < task.right).astype(float)
    if is_arm:
        right_n[: task.lost] = 0
        right_n[task.right : task.right + task.gained] = 1
    return right_n


def _rows(name: str, task: Task, is_arm: bool) -> list[dict[str, object]]:
    rows = []
    for i, acc in enumerate(_answers(task, is_arm)):
        digest = hashlib.sha256(f"{name}{i}".encode()).hexdigest()
        row: dict[str, object] = {"doc_id": i, "doc_hash": digest, "acc": float(acc)}
        rows.append(row | ({"acc_norm": float(acc)} if task.has_norm else {}))
    return rows


def write_run(runs: Path, run: Run, name: str | None = None) -> Path:
    """Writes a finished run folder through the store that real runs use; returns its path."""
    folder = RunFolder(
        runs / (name or f"{run.model}-{run.comm}-{run.policy}-tp{run.tp}-{run.fingerprint[:8]}"), run.fingerprint
    )
    folder.set_status("running")
    tree = {"config": _config(run), "fingerprint": run.fingerprint, "baseline_fingerprint": run.base}
    folder.write_config(tree)
    results, evals, protocol = {}, {}, {}
    for text in run.texts:
        arrays = _windows(run, text)
        results[text] = _perplexity(run, arrays)
        label = "c4 (subset)" if text == "c4" else text
        evals[text] = {"kind": "perplexity", "label": label, "samples": run.windows, "partial": run.partial}
        digest = hashlib.sha256(text.encode()).hexdigest()
        protocol[text] = {"token_sha256": digest, "window_tokens": TOKENS + 1, "bos": False} | run.protocol
        folder.save_eval(text, {}, arrays, None)
    for task_name, task in run.tasks.items():
        rows = _rows(task_name, task, run.base is not None)
        acc = float(np.mean([row["acc"] for row in rows]))
        stderr = (acc * (1 - acc) / (len(rows) - 1)) ** 0.5
        results[task_name] = {"acc": acc, "acc_stderr": stderr}
        if task.has_norm:
            results[task_name] |= {"acc_norm": acc, "acc_norm_stderr": stderr}
        evals[task_name] = {"kind": "task", "label": task_name, "samples": len(rows), "partial": run.partial}
        protocol[task_name] = {"task": task_name, "num_fewshot": 0, "add_bos_token": False} | run.protocol
        folder.save_eval(task_name, {}, None, rows)
    folder.write_result(_result(run, results, evals, protocol))
    folder.set_status("done")
    return folder.path


def _result(run: Run, results: dict, evals: dict, protocol: dict) -> dict[str, object]:
    elements = run.windows * (TOKENS + 1) * HIDDEN * 60
    sent = int(elements * run.bits / 8)
    group = run.reduce.split("-g")[1].split("-")[0] if run.reduce else None
    stages = ["reduce"] if run.gather is None else ["reduce", "gather"]
    return {
        "schema": 1,
        "status": "done",
        "fingerprint": run.fingerprint,
        "baseline_fingerprint": run.base,
        "arm": {
            "model": run.model,
            "weights": run.weights,
            "dtype": run.dtype,
            "comm": run.comm,
            "comm_full": f"two_step:{run.reduce}/{run.gather}" if run.reduce else run.comm,
            "label": run.label,
            "algorithm": "two_step" if run.reduce else run.comm,
            "reduce_format": run.reduce,
            "gather_format": run.gather,
            "group_size": int(group) if group and group.isdigit() else group,
            "policy": run.policy,
            "tp": run.tp,
            "exec": "emulated",
            "codec": run.codec,
            "reducer": None,
        },
        "results": results,
        "evals": evals,
        "wire": {
            "effective_bits": run.bits,
            "nominal_bits": run.bits,
            "wire_bytes_per_rank": sent,
            "wire_bytes_per_token": sent / (run.windows * (TOKENS + 1)),
            "unquantized_bytes_per_rank": elements * 2,
            "wire_ratio": 16 / run.bits,
            "stages": [
                {"stage": s, "encoded_bytes": sent // 2, "bytes_per_rank": [sent // 2] * run.tp} for s in stages
            ],
            "qdq_rounds": 2 if run.reduce else 0,
        },
        "calls": {"forwards": run.windows, "sites": 60, "total": 60 * run.windows},
        "nonfinite_groups": dict.fromkeys(stages, run.nonfinite),
        "env": {
            "python": "3.11.0",
            "torch": "2.9.0",
            "transformers": "5.16.0",
            "lm_eval": "0.4.11",
            "fc-eval": "0.1.0",
            "wire_version": 1,
            "device": run.device,
            "platform": "Linux",
        },
        "protocol": protocol,
        "published": run.published,
        "notes": list(run.notes),
        "time": {"total_s": 12.5},
    }


def write_status(runs: Path, name: str, **status: object) -> Path:
    """Writes a folder that holds only a status."""
    path = runs / name
    path.mkdir(parents=True, exist_ok=True)
    whole = {"schema": 1, "fingerprint": name, "name": name, "pid": 2**22 + 7, "host": "elsewhere", "started": 0.0}
    (path / "status.json").write_text(json.dumps(whole | {"heartbeat": 0.0, "ended": None, "error": None} | status))
    return path


def small_set(runs: Path) -> list[Run]:
    """A baseline and two arms with one text and one task."""
    base = Run(tasks={"arc_easy": Task()})
    int8 = quantized(base, "int8", 8.25, 0.0004, tasks={"arc_easy": Task(lost=1, gained=3)})
    int4 = quantized(base, "int4", 4.25, 0.02, tasks={"arc_easy": Task(lost=9, gained=2)})
    for run in (base, int8, int4):
        write_run(runs, run)
    return [base, int8, int4]
