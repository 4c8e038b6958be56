"""Where the numbers of a report come from: environments, protocols, and each run with the command that repeats it."""

from collections.abc import Iterable
from dataclasses import replace

from fc_eval.report.command import rerun_command
from fc_eval.report.setting import plain
from fc_eval.report.tables import Table, words
from fc_eval.results.record import RunRecord

# Shown apart from the package versions.
_MACHINE = ("device", "device_name", "platform", "threads", "processes")


def environments_table(records: Iterable[RunRecord]) -> Table:
    """The distinct environments, each with the number of runs that it gave."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        machine = ", ".join(str(record.env[key]) for key in _MACHINE[:3] if record.env.get(key))
        if record.env.get("threads"):
            machine += f", threads {record.env['threads']}"
        if record.env.get("processes", 1) != 1:
            machine += f", processes {record.env['processes']}"
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
            text = ", ".join(f"{key}={plain(entries[key])}" for key in sorted(entries) if key != "label")
            seen[info.label, text] = None
    return words(["evaluation", "protocol"], [list(row) for row in sorted(seen)])


def runs_table(records: Iterable[RunRecord]) -> Table:
    """Every run: folder, how it was carried out, reducer calls, seconds, and a command that repeats it."""
    rows = []
    for record in records:
        arm = record.arm
        how = ", ".join(filter(None, [arm.exec, f"codec {arm.codec}", arm.reducer and f"reducer {arm.reducer}"]))
        calls = f"{record.calls.get('total', 0):,}"
        row = [record.path.name, arm.comm_full, how, calls, f"{record.total_s:.0f}", _command(record)]
        rows.append(row)
    table = words(["run", "comm", "carried out", "reducer calls", "seconds", "command"], rows)
    return replace(table, columns=(*table.columns[:-1], replace(table.columns[-1], code=True)))


def _command(record: RunRecord) -> str:
    try:
        return rerun_command(record.config["config"])
    except (KeyError, TypeError, AttributeError, ValueError):  # written by something else than `fc-eval run`
        return "unknown: its config.yaml holds no complete configuration"
