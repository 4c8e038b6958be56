"""Writes the first table of README.md from records, between its two markers.

python scripts/readme_table.py reports/smollm2/runs --tp 4
"""

import argparse
import re
import sys
from pathlib import Path

from fc_eval.errors import FcEvalError
from fc_eval.report.markdown import first_table_markdown
from fc_eval.results.files import read_json
from fc_eval.results.record import load_runs

README = Path(__file__).parents[1] / "README.md"
MARKERS = re.compile(r"(<!-- first-table: (?P<source>.+?) -->\n).*?(\n<!-- /first-table -->)", re.S)


def with_table(text: str, runs: Path, tp: int) -> str:
    """The README with a fresh table of the runs at one W.

    Raises:
        FcEvalError: no finished run, or no place for the table.
    """
    of_this_size = [file.parent for file in runs.glob("*/result.json") if read_json(file)["arm"]["tp"] == tp]
    records = load_runs(of_this_size)[0]  # samples of whole tasks take long to read
    if not records:
        raise FcEvalError(
            f"{runs} holds no finished run with tp={tp}: give the folder of records whose table the README shows"
        )
    if not MARKERS.search(text):
        raise FcEvalError("README.md has no '<!-- first-table: RUNS -->' ... '<!-- /first-table -->'")
    table = first_table_markdown(records)
    return MARKERS.sub(lambda m: f"<!-- first-table: {runs.as_posix()} tp={tp} -->\n{table}{m.group(3)}", text)


def main() -> int:
    """Rewrites README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, metavar="RUNS")
    parser.add_argument("--tp", type=int, default=4, metavar="W", help="of the runs that are shown (default 4)")
    given = parser.parse_args()
    README.write_text(with_table(README.read_text(), given.runs, given.tp))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FcEvalError as error:
        sys.exit(f"error: {error}")
