"""The parent of all runs: plans them, skips what is done, has a launcher carry out the rest, and says how it went.

Imports no tensor library. Baselines come before what is compared with them, so that no two runs wait for one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError, os_reason
from fc_eval.launch import USER_ERROR_EXIT
from fc_eval.machine import Room
from fc_eval.results.state import is_run, unfinished
from fc_eval.results.store import RunFolder, RunStore
from fc_eval.sweep.estimate import estimate
from fc_eval.sweep.foresight import check_ahead
from fc_eval.sweep.launchers import Launcher, one_by_one
from fc_eval.sweep.plan import plan
from fc_eval.sweep.planned_run import Outcome, PlannedRun


def planned(config: RunConfig, store: RunStore, room: Room | None = None, retries: int = 0) -> list[PlannedRun]:
    """A run and the baseline that it is compared with, the baseline first; a baseline stands alone.

    Args:
        config: the run.
        store: where runs are kept.
        room: what a run may use, None for all of this machine.
        retries: how often a run that failed is tried again.

    Raises:
        FcEvalError: the configuration refers to something that is not there, or cannot work.
    """
    target = plan(config, room)
    check_ahead(target.config)
    folder = store.folder(target.name, target.fingerprint)
    if config.is_baseline:
        return [PlannedRun(target, None, folder, retries)]
    other = plan(config.baseline(), room)
    baseline = PlannedRun(other, None, store.folder(other.name, other.fingerprint), retries)
    return [baseline, PlannedRun(target, baseline, folder, retries)]


def execute(
    config: RunConfig, store: RunStore, *, retries: int = 0, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Makes sure that a run and its baseline are in the store, computing what is missing, one after the other.

    Returns:
        One outcome per run, the baseline first.

    Raises:
        FcEvalError: as `planned`.
    """
    return carry_out(planned(config, store, retries=retries), partial(one_by_one, say=say), say=say)


def carry_out(
    runs: Sequence[PlannedRun],
    launcher: Launcher,
    *,
    fail_fast: bool = False,
    finished: Callable[[RunFolder], None] = lambda folder: None,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Makes sure that runs are in their stores: each is tried, and told of, once.

    Args:
        runs: what is to be there, in any order; all baselines are among them.
        launcher: carries out those that are missing.
        fail_fast: stops everything at the first run that fails.
        finished: takes the folder of each run that was computed, when it is done.
        say: takes one line on each run.

    Returns:
        One outcome per run, in the order of `runs`; with `fail_fast`, of those that ended. A failed baseline leaves
        its runs undone, because a run without its baseline says nothing.
    """
    unique = list({run.folder.path: run for run in runs}.values())
    outcomes: dict[Path, Outcome] = {}
    for wave in ([run for run in unique if run.baseline is None], [run for run in unique if run.baseline is not None]):
        missing = [run for run in wave if not _settled_before(run, outcomes, say)]
        with closing(launcher(missing)) as ended:
            for run, outcome in ended:
                outcomes[run.folder.path] = outcome
                say(f"{_how(outcome, run)} ({len(outcomes)} of {len(unique)})")
                if outcome.state == "done":
                    finished(outcome.folder)
                if fail_fast and outcome.state == "failed":
                    break
        if fail_fast and any(outcome.state == "failed" for outcome in outcomes.values()):
            break
    return [outcomes[run.folder.path] for run in unique if run.folder.path in outcomes]


def _settled_before(run: PlannedRun, outcomes: dict[Path, Outcome], say: Callable[[str], None]) -> bool:
    """Whether nothing is to be computed, because the run is done or its baseline failed; notes that."""
    base = outcomes.get(run.baseline.folder.path) if run.baseline is not None else None
    if base is not None and base.state == "failed":
        why = f"its baseline {base.folder.path.name} failed"
        outcomes[run.folder.path] = Outcome("failed", run.folder, error=why, mistake=base.mistake)
    elif run.is_done(say):
        say(f"= {run.name}: done before")
        outcomes[run.folder.path] = Outcome("skipped", run.folder)
    return run.folder.path in outcomes


def _how(outcome: Outcome, run: PlannedRun) -> str:
    if outcome.state == "failed":
        return f"! {run.name}: failed: {(outcome.error or '').splitlines()[-1]}"
    return f". {run.name}: done" + (f" in {outcome.seconds:.0f} s" if outcome.state == "done" else "")


def foretell(runs: Sequence[PlannedRun], say: Callable[[str], None] = print) -> list[Outcome]:
    """Says of each run whether it is done, or would run and how long that may take; changes nothing."""
    outcomes = []
    for run in {run.folder.path: run for run in runs}.values():
        if run.is_done(say):
            say(f"= {run.name}: done before")
            outcomes.append(Outcome("skipped", run.folder))
            continue
        seconds = estimate(run)
        say(f"+ {run.name}: would run, {f'about {seconds:.0f} s' if seconds else 'time unknown'}")
        outcomes.append(Outcome("planned", run.folder, seconds or 0.0))
    return outcomes


def summarize(outcomes: list[Outcome], say: Callable[[str], None] = print) -> int:
    """Says how a sweep went; returns the exit status: 0 when nothing failed, 2 when only mistakes were in the way."""
    unique: dict[str, Outcome] = {}
    for outcome in outcomes:
        kept = unique.get(outcome.folder.fingerprint)
        if kept is None or kept.state == "skipped":
            unique[outcome.folder.fingerprint] = outcome
    counts: dict[str, int] = {}
    for outcome in unique.values():
        counts[outcome.state] = counts.get(outcome.state, 0) + 1
    say("runs: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    for outcome in unique.values():
        if outcome.state == "failed":
            say(f"failed: {outcome.folder.path.name}: {outcome.error}")
    for name, reason in _broken({outcome.folder.path for outcome in unique.values()}):
        say(f"broken: {name}: {reason}")
    failed = [outcome for outcome in unique.values() if outcome.state == "failed"]
    return 0 if not failed else USER_ERROR_EXIT if all(outcome.mistake for outcome in failed) else 1


def _broken(mine: set[Path]) -> Iterator[tuple[str, str]]:
    """Other runs in the same stores whose status or configuration does not read, and why."""
    for root in {path.parent for path in mine}:
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            if path in mine or path.name.startswith(".") or not path.is_dir() or not is_run(path):
                continue
            try:
                problem = unfinished(path, time.time())
                if problem is None or problem.state != "running":  # one that has just begun may have no configuration
                    RunFolder(path, "").read_config()
            except FcEvalError as error:
                yield path.name, str(error).replace(f"{path}/", "")
            except OSError as error:
                yield path.name, os_reason(error, path)
