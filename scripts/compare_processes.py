"""One run by one process and by several: whether the records are equal, and how much faster several are.

    python scripts/compare_processes.py OUT [KEY=VALUE ...]      overrides as for `fc-eval run`, processes=N among them

Exits with status 1 when a byte differs. Everything that is measured is compared; times and the number of processes are
what may differ.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fc_eval.compose import compose_one
from fc_eval.machine import settled
from fc_eval.results.files import read_json
from fc_eval.results.store import RunFolder, RunStore
from fc_eval.sweep.execute import execute


def measured(folder: RunFolder) -> dict[str, Any]:
    """All that a run found, by file: bytes, and of JSON what is in it but for how it was carried out."""
    files = [*folder.path.glob("windows_*"), *folder.path.glob("samples_*")]
    found: dict[str, Any] = {path.name: path.read_bytes() for path in files}
    for path in folder.path.glob("evals/*.json"):
        found[path.name] = read_json(path)
        del found[path.name]["seconds"]
    result = folder.read_result()
    del result["time"], result["env"]["processes"], result["env"]["threads"]
    return found | {"result.json": result}


def main() -> int:
    """Runs both, compares, prints one line per run and the ratio of times."""
    out, overrides = Path(sys.argv[1]), sys.argv[2:]
    config = settled(compose_one(overrides))
    if config.processes == 1:
        print("this machine gives one process: say processes=N")
        return 2
    seconds: dict[str, list[float]] = {}
    records: dict[str, list[dict[str, Any]]] = {}
    for processes in (1, config.processes):
        store = RunStore(out / f"processes{processes}")
        store.prepare()
        for outcome in execute(replace(config, processes=processes), store):
            if outcome.state == "failed":
                print(f"failed: {outcome.error}")
                return 1
            name = outcome.folder.path.name
            seconds.setdefault(name, []).append(float(outcome.folder.read_result()["time"]["total_s"]))
            records.setdefault(name, []).append(measured(outcome.folder))
    different = 0
    for name, (alone, shared) in records.items():
        unequal = sorted(file for file in alone.keys() | shared.keys() if alone.get(file) != shared.get(file))
        different += len(unequal)
        words = f"{', '.join(unequal)} DIFFER" if unequal else f"{len(alone)} files equal"
        one, several = seconds[name]
        print(f"{name}: {words}; {one:.1f} s by 1, {several:.1f} s by {config.processes}: {one / several:.2f} times")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
