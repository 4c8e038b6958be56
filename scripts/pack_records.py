"""Copies finished runs as records fit to be committed: small, and free of the machine's own paths and names.

    python scripts/pack_records.py RUNS ... --out reports/NAME/runs

Samples keep what pairing needs (task, document, hash, numbers) and are gzipped; logs stay behind; folders of data are
written as DIR. What is left is read by `fc-eval report` and `fc-eval compare` like any other run.
"""

import argparse
import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.results.files import write_atomic, write_json
from fc_eval.results.record import load_runs
from fc_eval.results.store import RunFolder

HASH_DIGITS = 8  # of 64: with the number of the question, 32 bits tell whether it is still the same one


def slim(row: dict[str, Any]) -> dict[str, Any]:
    """What pairing and the statistics read of one row of samples."""
    kept = {key: row[key] for key in ("task", "doc_id", "filter") if key in row}
    numbers = {key: value for key, value in row.items() if isinstance(value, (int, float)) and key not in kept}
    return kept | {"doc_hash": str(row["doc_hash"])[:HASH_DIGITS]} | numbers


def pack(source: RunFolder, target: RunFolder) -> None:
    """Copies one finished run."""
    shutil.rmtree(target.path, ignore_errors=True)
    tree = source.read_config()
    if tree["config"]["data_root"] is not None:
        tree["config"]["data_root"] = "DIR"
    if tree["config"]["model"]["path"] is not None:
        tree["config"]["model"]["path"] = Path(tree["config"]["model"]["path"]).name
    target.write_config(tree)
    target.write_result(source.read_result())
    status = source.status()
    write_json(target.path / "status.json", {k: v for k, v in status.items() if k not in ("pid", "host", "child")})
    for windows in source.path.glob("windows_*.npz"):
        shutil.copyfile(windows, target.path / windows.name)
    for layers in source.path.glob("layers_*.csv"):
        shutil.copyfile(layers, target.path / layers.name)
    for samples in source.path.glob("samples_*.jsonl"):
        lines = [json.dumps(slim(json.loads(line)), sort_keys=True) for line in samples.read_text().splitlines()]
        # mtime=0: the same samples give the same bytes
        write_atomic(target.path / f"{samples.name}.gz", gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def main() -> int:
    """Packs every finished run below the folders given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    records, problems = load_runs(given.runs)
    for record in records:
        pack(RunFolder(record.path, record.fingerprint), RunFolder(given.out / record.path.name, record.fingerprint))
    for problem in problems:
        print(f"left out: {problem.name}: {problem.state}: {problem.reason}")
    print(f"{len(records)} runs in {given.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FcEvalError as error:
        sys.exit(f"error: {error}")
