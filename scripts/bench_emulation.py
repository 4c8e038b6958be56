"""The same as `fc-eval bench emulation`, which says what is measured: fc_eval/bench/emulation.py.

python scripts/bench_emulation.py model=smollm2 comm=int4 tp=4
python scripts/bench_emulation.py shape=llama3_8b layers=2 comm=int4 tp=8 device=cuda
"""

import sys

from fc_eval.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "emulation", *sys.argv[1:]]))
