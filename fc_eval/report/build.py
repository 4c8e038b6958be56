"""From run folders to a report: Markdown, CSV, plots, and one HTML page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fc_eval.errors import FcEvalError
from fc_eval.experiment import Experiment
from fc_eval.report.html import page_html
from fc_eval.report.layers import layers_frame
from fc_eval.report.markdown import page_markdown
from fc_eval.report.page import make_page
from fc_eval.results.compare import pair_runs
from fc_eval.results.record import RunRecord, load_runs
from fc_eval.results.state import Problem
from fc_eval.results.table import pairs_table


@dataclass(frozen=True)
class Report:
    """What was written. `runs` counts finished runs; `problems` are the others."""

    html: Path
    markdown: Path
    csv: Path
    plots: tuple[Path, ...]
    runs: int
    warnings: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def summary(self) -> str:
        """A few lines for the screen."""
        lines = [
            f"{self.html}: {self.runs} runs; beside it {self.markdown.name}, {self.csv.name}, {len(self.plots)} plots"
        ]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"{problem.state}: {problem.name}: {' '.join(problem.reason.split())}" for problem in self.problems]
        return "\n".join(lines)


def build_report(
    run_dirs: Path | Iterable[Path],
    out_dir: Path,
    include_partial: bool = True,
    experiments: Sequence[Experiment] = (),
    only_experiments: bool = False,
) -> Report:
    """Writes `report.html`, `report.md`, `results.csv`, `plots/` and, where layer errors were measured, `layers.csv`.

    The same runs give the same bytes.

    Args:
        run_dirs: one or several folders of runs.
        out_dir: where the report goes; made if it is not there, files of an older report are replaced.
        include_partial: whether evaluations of a part of their samples count.
        experiments: those that get a section of their own: of several, where runs have its own setting; one that is
            asked for alone, where its comms are among the runs at all.
        only_experiments: whether the sections on all of the runs are left out.

    Raises:
        FcEvalError: a missing or empty RUNS folder, no finished run, none of the one experiment that is asked for, or
            an `out_dir` that cannot be written.
    """
    folders = [run_dirs] if isinstance(run_dirs, (str, Path)) else list(run_dirs)
    records, problems = load_runs(Path(folder) for folder in folders)
    if not include_partial:
        records, left_out = _complete_only(records)
        problems += left_out
    if not records:
        raise _nothing(folders, problems)
    pairs = pair_runs(records)
    page = make_page(pairs, problems, experiments, only_experiments)
    if (len(experiments) == 1 or only_experiments) and not page.experiments:
        if len(experiments) != 1:
            raise FcEvalError("none of these runs belongs to one of the experiments: leave out --only-experiments")
        name = experiments[0].name
        raise FcEvalError(
            f"none of these runs belongs to the experiment {name}: compute them with "
            f"`fc-eval run -m experiment={name} model=...`, or leave out --experiment"
        )
    out = Path(out_dir)
    try:
        (out / "plots").mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(page_html(page), encoding="utf-8")
        (out / "report.md").write_text(page_markdown(page), encoding="utf-8")
        pairs_table(pairs).to_csv(out / "results.csv", index=False, lineterminator="\n")
        layers = layers_frame([pair.record for pair in pairs])
        if layers is None:
            (out / "layers.csv").unlink(missing_ok=True)  # of an older report
        else:
            layers.to_csv(out / "layers.csv", index=False, lineterminator="\n")
        plots = [path for plot in page.plots for path in plot.save(out / "plots")]
    except OSError as error:
        raise FcEvalError(
            f"the report cannot be written to {out} ({error.strerror or error}): choose another folder with --out DIR"
        ) from None
    return Report(
        out / "report.html",
        out / "report.md",
        out / "results.csv",
        tuple(plots),
        len(records),
        page.warnings,
        tuple(problems),
    )


def _complete_only(records: list[RunRecord]) -> tuple[list[RunRecord], list[Problem]]:
    kept, left_out = [], []
    for record in records:
        evals = {name: info for name, info in record.evals.items() if not info.partial}
        if evals:
            kept.append(replace(record, evals=evals))
        else:
            left_out.append(Problem(record.path.name, "left out", "all its evaluations are partial"))
    return kept, left_out


def _nothing(folders: list[Path], problems: list[Problem]) -> FcEvalError:
    where = ", ".join(str(folder) for folder in folders) or "no folder"
    if not problems:
        return FcEvalError(f"no run in {where}: expected a folder that `fc-eval run out=RUNS` wrote")
    first = problems[0]
    return FcEvalError(
        f"no finished run in {where}: {len(problems)} without numbers, the first is {first.name}, {first.state} "
        f"({' '.join(first.reason.split())}): run it again with the same command"
    )
