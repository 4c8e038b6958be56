"""Where the numbers of a report come from: environments, protocols, and each run with the command that repeats it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fc_eval.report.tables import Table, words
from fc_eval.results.record import EVAL_ORDER, RunRecord

# Evaluations that are asked for by name; any other task goes through eval.tasks.
PRESETS = (*EVAL_ORDER, "everyday", "wikitext_words")
# Shown apart from the package versions.
_MACHINE = ("device", "device_name", "platform", "threads")


def environments_table(records: Iterable[RunRecord]) -> Table:
    """The distinct environments, each with the number of runs that it gave."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        machine = ", ".join(str(record.env[key]) for key in _MACHINE[:3] if record.env.get(key))
        if record.env.get("threads"):
            machine += f", threads {record.env['threads']}"
        packages = ", ".join(f"{key} {record.env[key]}" for key in sorted(record.env) if key not in _MACHINE)
        counts[machine, packages] = counts.get((machine, packages), 0) + 1
    rows = [[str(count), machine, packages] for (machine, packages), count in sorted(counts.items())]
    return words(["runs", "machine", "versions"], rows)


def protocols_table(records: Iterable[RunRecord]) -> Table:
    """The distinct protocols of each evaluation: data, windows, BOS, hash of the token ids, ..."""
    seen: dict[tuple[str, str], None] = {}
    for record in records:
        for name, info in record.evals.items():
            entries = record.protocol.get(name, {})
            text = ", ".join(f"{key}={_plain(entries[key])}" for key in sorted(entries) if key != "label")
            seen[info.label, text] = None
    return words(["evaluation", "protocol"], [list(row) for row in sorted(seen)])


def runs_table(records: Iterable[RunRecord]) -> Table:
    """Every run: folder, how it was carried out, reducer calls, seconds, and a command that repeats it."""
    rows = []
    for record in records:
        arm = record.arm
        how = ", ".join(filter(None, [arm.exec, f"codec {arm.codec}", arm.reducer and f"reducer {arm.reducer}"]))
        calls = f"{record.calls.get('total', 0):,}"
        row = [record.path.name, arm.comm_full, how, calls, f"{record.total_s:.0f}", rerun_command(record)]
        rows.append(row)
    return words(["run", "comm", "carried out", "reducer calls", "seconds", "command"], rows)


def rerun_command(record: RunRecord) -> str:
    """The command line that asks for this run, without what is local to a machine (data.root, model.path, out).

    `config.yaml` in the run's folder holds every setting; this names those that differ between runs.
    """
    arm = record.arm
    settings = record.config.get("config", record.config)
    parts = [
        "fc-eval run",
        f"model={arm.model}",
        f"model.dtype={arm.dtype}",
        *_comm(settings.get("comm") or {}, arm.comm),
    ]
    parts += [] if arm.policy == "uniform" else [f"policy={arm.policy}"]
    parts += [f"tp={arm.tp}", f"exec={arm.exec}", f"device={record.device_type}"]
    parts += [f"{key}={settings[key]}" for key in ("seed", "threads") if settings.get(key)]
    parts += _evals((settings.get("eval") or {}).get("specs") or [{"name": name} for name in record.evals])
    batch, windows = record.batch_size
    parts += [f"eval.{key}={value}" for key, value in (("batch_size", batch), ("window_batch", windows)) if value]
    if any("kl_mean" in numbers for numbers in record.results.values()):
        parts.append("eval.divergence=true")
    return " ".join(parts)


def _evals(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Presets, other lm-eval tasks, the limit where all share one, and what differs from a preset's defaults."""
    presets = [str(spec["name"]) for spec in specs if spec["name"] in PRESETS]
    others = [str(spec.get("task") or spec["name"]) for spec in specs if spec["name"] not in PRESETS]
    parts = [f"eval=[{','.join(presets)}]"] + ([f"eval.tasks=[{','.join(others)}]"] if others else [])
    limits = {spec.get("limit") for spec in specs}
    if len(limits) == 1 and None not in limits:
        parts.append(f"eval.limit={limits.pop()}")
    for spec in specs:
        for key, default in (("window_tokens", 2048), ("num_fewshot", 0)):
            if spec["name"] in PRESETS and spec.get(key, default) != default:
                parts.append(f"eval.runs.{spec['name']}.{key}={spec[key]}")
    return parts


def _comm(comm: Mapping[str, Any], name: str) -> list[str]:
    """The preset, and whatever of its fields is not told by its name."""
    preset = str(comm.get("name") or name)
    parts = [f"comm={preset}"]
    if comm.get("reduce") not in (None, preset):
        parts += [f"comm.{key}={comm[key]}" for key in ("algorithm", "reduce", "gather") if comm.get(key)]
    return parts + [f"comm.{key}={comm[key]}" for key in ("group_size", "node_size") if comm.get(key)]


def _plain(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
