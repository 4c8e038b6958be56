"""Builds a report from run folders: `python scripts/report.py RUNS... --out DIR`, the same as `fc-eval report`."""

import sys

from fc_eval.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
