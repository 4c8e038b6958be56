"""Writes the tables of README.md from what was measured, each between two markers that name its source.

python scripts/readme_table.py
"""

import re
import sys
from pathlib import Path

from fc_eval.bench.allreduce_page import times_table
from fc_eval.bench.allreduce_rows import read_places
from fc_eval.errors import FcEvalError
from fc_eval.report.markdown import first_table_markdown, markdown_table
from fc_eval.results.files import read_json
from fc_eval.results.record import load_runs

ROOT = Path(__file__).parents[1]
MARKERS = re.compile(
    r"(?P<head><!-- (?P<name>\w+)-table: (?P<source>.+?) -->\n).*?(?P<tail><!-- /(?P=name)-table -->)", re.S
)

# Of the measured all-reduces: where, which lines of which link, how these begin, and message sizes.
PLACE = ("NVIDIA H200", 2)
TITLE = "two H200, NVLink"
LINES = (
    ("peer", "NCCL"),
    ("peer", "PyTorch symmetric memory, two-shot"),
    ("peer", "one-step INT4 g128"),
    ("peer", "two-step INT4 g128"),
    ("peer", "one-step INT8 g128"),
    ("staged", "NCCL"),
    ("staged", "two-step INT4 g128"),
)
BEGINNINGS = {"peer": "", "staged": "without peer access: "}
SIZES = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))


def with_tables(text: str, root: Path) -> str:
    """The README with fresh tables.

    Raises:
        FcEvalError: a table has no place, or its source lacks what it shows.
    """
    tables = {"first": _first_table, "allreduce": _allreduce_table}
    found = [match["name"] for match in MARKERS.finditer(text)]
    if sorted(found) != sorted(tables):
        raise FcEvalError(
            f"README.md has the tables {', '.join(found) or 'none'}: expected each of {', '.join(tables)} once, "
            "between '<!-- NAME-table: SOURCE -->' and '<!-- /NAME-table -->'"
        )
    return MARKERS.sub(lambda m: f"{m['head']}{tables[m['name']](root, m['source'])}\n{m['tail']}", text)


def _first_table(root: Path, source: str) -> str:
    """Of runs at one W: 'reports/smollm2/runs tp=4'."""
    runs, _, tp = source.partition(" tp=")
    of_this_size = [
        file.parent for file in (root / runs).glob("*/result.json") if read_json(file)["arm"]["tp"] == int(tp)
    ]
    records = load_runs(of_this_size)[0]  # samples of whole tasks take long to read
    if not records:
        raise FcEvalError(f"{runs} holds no finished run with tp={tp}: name the records whose table the README shows")
    return first_table_markdown(records)


def _allreduce_table(root: Path, source: str) -> str:
    """Of the CSV file of `fc-eval bench allreduce`."""
    found = [place for place in read_places(root / source) if (place.device, place.world_size) == PLACE]
    places = {place.link: place for place in found if place.dtype in ("", "bf16")}  # older rows do not say bf16
    known = {(link, line.label): line for link, place in places.items() for line in place.lines()}
    missing = [" ".join(key) for key in LINES if key not in known]
    if missing:
        raise FcEvalError(f"{source} has no row of {', '.join(missing)}: measure again, or show others in the README")
    return markdown_table(times_table(TITLE, [(f"{BEGINNINGS[key[0]]}{key[1]}", known[key]) for key in LINES], SIZES))


def main() -> int:
    """Rewrites README.md."""
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text(), ROOT))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FcEvalError as error:
        sys.exit(f"error: {error}")
