"""Writes the golden vectors of WIRE.md from the scalar oracle of the tests.

    python scripts/make_golden.py               write a missing file; compare an existing one and add what it lacks
    python scripts/make_golden.py --overwrite   replace a file that differs, on purpose

Vectors that differ mean that the contract changed: raise `WIRE_VERSION` (the new version gets a file of its own),
and overwrite only while a version has not been used by anyone. Exit status 1: the file differs and was left alone.
"""

import argparse
import importlib
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Builds, compares, writes; returns the exit status."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    vectors = importlib.import_module("golden_vectors")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overwrite", action="store_true", help="replace a file that differs")
    parser.add_argument("--out", type=Path, default=vectors.FILE, help="the npz file")
    given = parser.parse_args()
    # An existing file keeps its inputs, so that only a change of the arithmetic shows.
    old = vectors.load(given.out) if given.out.exists() else {}
    inputs = {key.removeprefix("input/"): array for key, array in old.items() if key.startswith("input/")}
    new = vectors.build(inputs or None)
    differing = vectors.differences(old, new)
    changed = [key for key in differing if key in old]
    if not differing:
        print(f"{given.out}: unchanged, {len(new)} arrays")
        return 0
    if changed and not given.overwrite:
        print(f"{given.out}: {len(changed)} arrays differ, left alone: {', '.join(changed[:5])} ...", file=sys.stderr)
        return 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(given.out, **new)
    added = len(differing) - len(changed)
    print(f"{given.out}: {len(new)} arrays, {added} added, {len(changed)} changed, {given.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
