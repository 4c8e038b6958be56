"""Writes the first table of README.md from records, between its two markers.

python scripts/readme_table.py reports/smollm2/runs
"""

import argparse
import re
import sys
from pathlib import Path

from fc_eval.errors import FcEvalError
from fc_eval.report.markdown import first_table_markdown
from fc_eval.results.record import load_runs

README = Path(__file__).parents[1] / "README.md"
MARKERS = re.compile(r"(<!-- first-table: (?P<source>\S+) -->\n).*?(\n<!-- /first-table -->)", re.S)


def with_table(text: str, runs: Path, source: str) -> str:
    """The README with a fresh table.

    Raises:
        FcEvalError: no finished run, or no place for the table.
    """
    records, _ = load_runs(runs)
    if not records:
        raise FcEvalError(f"{runs} holds no finished run: give the folder of records whose table the README shows")
    if not MARKERS.search(text):
        raise FcEvalError("README.md has no '<!-- first-table: RUNS -->' ... '<!-- /first-table -->'")
    table = first_table_markdown(records)
    return MARKERS.sub(lambda m: f"<!-- first-table: {source} -->\n{table}{m.group(3)}", text)


def main() -> int:
    """Rewrites README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, metavar="RUNS")
    given = parser.parse_args()
    README.write_text(with_table(README.read_text(), given.runs, given.runs.as_posix()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FcEvalError as error:
        sys.exit(f"error: {error}")
