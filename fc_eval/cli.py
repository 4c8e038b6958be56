"""The command line: `fc-eval run` is Hydra's, the other commands are small and plain."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fc_eval.errors import FcEvalError, Terminated

USAGE = """\
usage: fc-eval COMMAND ...

  run [-m] [GROUP=NAME] [KEY=VALUE] ...   evaluate a model under a comm; -m makes a sweep of comma-separated values
  report RUNS ... --out DIR               tables, plots and one HTML page from run folders; --experiment NAME|all
  allocate RUNS ... --budget SHARE        the cheapest format for each layer within a loss budget, from layer errors
  smooth [GROUP=NAME] [KEY=VALUE] ... out=DIR   a checkpoint folder smoothed for model.weights=w8a8
  compare BASE RUN                        paired comparison of two runs, RUN - BASE
  predict gpu=NAME [KEY=VALUE] ...        time to first token that a comm would win, beside its measured loss; --check
  calibrate [KEY=VALUE] ...               a hardware file for predict: this machine's rates, or fitted to measured times
  formats [--tokens T] [--hidden H]       every wire format, its bits, and which codec covers it
  bench NAME [KEY=VALUE] ...              how fast the codecs are; what emulating communication costs
  doctor [KEY=VALUE] ...                  what is installed, found and possible here

examples:
  fc-eval run comm=int4 tp=4
  fc-eval run -m comm=int8,int4_int8,int4 comm.group_size=32,128 tp=2,4,8 'eval=[wikitext2,arc_easy]' out=runs
  fc-eval report runs --out report
`fc-eval run --help` lists the groups and every key.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 fine, 1 something failed, 2 a mistake of the user's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        from fc_eval import __version__

        print(f"fc-eval {__version__}")
        return 0
    handlers = {
        "run": _run,
        "report": _report,
        "allocate": _allocate,
        "smooth": _smooth,
        "compare": _compare,
        "predict": _predict,
        "calibrate": _calibrate,
        "formats": _formats,
        "bench": _bench,
        "doctor": _doctor,
    }
    try:
        if command not in handlers:
            from fc_eval.errors import unknown

            raise unknown("command", command, handlers, hint="`fc-eval --help` describes them")
        return handlers[command](rest)
    except FcEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("stopped; finished evaluations are kept, and the same command goes on after them", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130  # 128 and the number of the signal, as shells have it
    except BrokenPipeError:  # `fc-eval formats | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(rest: list[str]) -> int:
    from fc_eval.commands.run import run
    from fc_eval.launch import sigterm_raises

    with sigterm_raises():
        return run(rest)


def _report(rest: list[str]) -> int:
    from fc_eval.experiment import experiment
    from fc_eval.presets import options
    from fc_eval.report.build import build_report

    parser = argparse.ArgumentParser(
        prog="fc-eval report", description="Tables, plots and one HTML page from run folders."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that `fc-eval run out=RUNS` wrote")
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="where the report goes (default: report)"
    )
    parser.add_argument(
        "--experiment",
        action="append",
        default=[],
        metavar="NAME",
        help="a section on its runs; all: every experiment with runs of its own setting",
    )
    parser.add_argument("--only-experiments", action="store_true", help="leave out the sections on all of the runs")
    given = parser.parse_args(rest)
    names = options("experiment") if "all" in given.experiment else dict.fromkeys(given.experiment)
    if given.only_experiments and not names:
        raise FcEvalError("--only-experiments leaves nothing to report: name an experiment with --experiment NAME|all")
    chosen = [experiment(name) for name in names]
    report = build_report(given.runs, given.out, experiments=chosen, only_experiments=given.only_experiments)
    print(report.summary)
    return 0


def _allocate(rest: list[str]) -> int:
    from fc_eval.commands.allocate import run_allocate

    parser = argparse.ArgumentParser(
        prog="fc-eval allocate",
        description="From runs of several comms with eval=[wikitext2,layer_error] to a policy: the cheapest format for "
        "each layer whose predicted loss stays within the budget.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that `fc-eval run out=RUNS` wrote")
    parser.add_argument("--budget", type=float, required=True, metavar="SHARE", help="0.01: 1 %% more perplexity")
    parser.add_argument("--by", choices=("bits", "bytes"), default="bits", help="what is saved (default: bits)")
    parser.add_argument("--eval", metavar="NAME", help="the perplexity that counts (default: the first one)")
    parser.add_argument("--out", type=Path, default=Path("allocated.yaml"), metavar="FILE", help="the policy file")
    given = parser.parse_args(rest)
    print(run_allocate(given.runs, given.budget, given.by, given.eval, given.out))
    return 0


def _smooth(rest: list[str]) -> int:
    from fc_eval.commands.smooth import smooth

    return smooth(rest)


def _compare(rest: list[str]) -> int:
    from fc_eval.results.compare import render_comparison
    from fc_eval.results.record import load_run

    parser = argparse.ArgumentParser(prog="fc-eval compare", description="Paired comparison of two runs: RUN - BASE.")
    parser.add_argument("base", type=Path, metavar="BASE", help="the run folder that is compared with, first")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder that is compared")
    given = parser.parse_args(rest)
    print(render_comparison(load_run(given.base), load_run(given.run)))
    return 0


def _formats(rest: list[str]) -> int:
    from fc_eval.commands.formats import formats_table

    parser = argparse.ArgumentParser(prog="fc-eval formats", description="Every wire format and what it costs.")
    parser.add_argument("names", nargs="*", metavar="FORMAT", help="names to show (default: all bases)")
    parser.add_argument("--tokens", type=int, default=2048, help="T, rows (default 2048)")
    parser.add_argument("--hidden", type=int, default=4096, help="H, columns (default 4096)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (default bf16)")
    given = parser.parse_args(rest)
    print(formats_table(given.names, given.tokens, given.hidden, given.dtype))
    return 0


def _predict(rest: list[str]) -> int:
    from fc_eval.predict.command import predict_command

    return predict_command(rest)


def _calibrate(rest: list[str]) -> int:
    from fc_eval.commands.calibrate import calibrate

    return calibrate(rest)


def _bench(rest: list[str]) -> int:
    from fc_eval.bench.command import bench

    return bench(rest)


def _doctor(rest: list[str]) -> int:
    from fc_eval.commands.doctor import doctor

    parser = argparse.ArgumentParser(
        prog="fc-eval doctor", description="What is installed, found and possible here; asks the network for little."
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="those of the run that is planned")
    return doctor(parser.parse_args(rest).overrides)


if __name__ == "__main__":
    sys.exit(main())
