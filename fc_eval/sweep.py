"""The parent of all runs: fingerprints, skips what is done, starts one child per run. Imports no tensor library.

A child that raises, exits, runs out of memory or is killed leaves the others alone: its folder says how it ended, and
the same command tries only the missing runs again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fc_eval.child import run_child
from fc_eval.config import UNIFORM, RunConfig
from fc_eval.contents import Contents, contents, pinned
from fc_eval.errors import FcEvalError, os_error, os_reason
from fc_eval.foresight import check_ahead
from fc_eval.launch import USER_ERROR_EXIT
from fc_eval.machine import settled
from fc_eval.results.fingerprint import fingerprint
from fc_eval.results.record import RunRecord, read_run
from fc_eval.results.state import is_run, unfinished
from fc_eval.results.store import RunFolder, RunStore

State = Literal["done", "skipped", "failed", "planned"]


@dataclass(frozen=True)
class Outcome:
    """How one run ended: `state`, its folder, seconds spent, the error's last lines when it failed, and whether that is
    a mistake which the user can mend.
    """

    state: State
    folder: RunFolder
    seconds: float = 0.0
    error: str | None = None
    mistake: bool = False


@dataclass(frozen=True)
class Plan:
    """A run with its identity resolved: device settled, files hashed, branches on the Hub replaced by commits."""

    config: RunConfig
    name: str
    fingerprint: str
    contents: Contents


def plan(config: RunConfig) -> Plan:
    """Settles the device and the processes, and computes the fingerprint.

    Raises:
        FcEvalError: a file that is missing, or a GPU asked for where there is none.
    """
    config = settled(config)
    if config.is_baseline:
        config = config.baseline()  # however it was asked for, it is the same run
    config = replace(config, model=pinned(config.model))
    found = contents(config)
    identity = fingerprint(config.identity(), {"model": found.model, "data": found.data})
    return Plan(config, _name(config), identity, found)


def _name(config: RunConfig) -> str:
    """What a run folder is called: readable, and short enough for a file system; the fingerprint tells runs apart."""
    comm = config.comm.build()
    groups = dict.fromkeys(fmt.group_size for fmt in (comm.reduce, comm.gather) if fmt is not None)
    parts = [config.model.name, comm.short_name, *(f"g{group}" for group in groups)]
    parts += [] if config.policy_name == UNIFORM else [config.policy_name]
    parts += [f"tp{config.tp}" if config.exec == "emulated" else f"ranks{config.tp}"]
    parts += [spec.name for spec in config.eval.specs]
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in "-".join(parts))[:120]


def execute(
    config: RunConfig,
    store: RunStore,
    *,
    dry_run: bool = False,
    retries: int = 0,
    earlier: Sequence[Outcome] = (),
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Makes sure that a run and the baseline it is compared with are in the store, computing only what is missing.

    Args:
        config: the run.
        store: where runs are kept; a dry run changes nothing there.
        dry_run: only say what would run.
        retries: how often a run that failed is tried again; a mistake of the user's is not.
        earlier: what became of the runs before this one in the same sweep: each is tried, and told of, once.
        say: takes one line on each run.

    Returns:
        One outcome per run, the baseline first. A failed baseline leaves its run undone, because a run without
        its baseline says nothing.

    Raises:
        FcEvalError: the configuration refers to something that is not there, or cannot work.
    """
    known = {outcome.folder.path: outcome for outcome in earlier}
    target = plan(config)
    check_ahead(target.config)
    plans = [target] if config.is_baseline else [plan(config.baseline()), target]
    outcomes: list[Outcome] = []
    for index, item in enumerate(plans):
        baseline = plans[0].fingerprint if index else None
        folder = store.folder(item.name, item.fingerprint)
        if outcomes and outcomes[-1].state == "failed":
            why = f"its baseline {outcomes[-1].folder.path.name} failed"
            outcomes.append(Outcome("failed", folder, error=why, mistake=outcomes[-1].mistake))
            break
        outcomes.append(known.get(folder.path) or _ensure(item, baseline, folder, store, dry_run, retries, say))
    return outcomes


def _ensure(
    item: Plan,
    baseline: str | None,
    folder: RunFolder,
    store: RunStore,
    dry_run: bool,
    retries: int,
    say: Callable[[str], None],
) -> Outcome:
    name = folder.path.name
    if _done(folder, say):
        say(f"= {name}: done before")
        return Outcome("skipped", folder)
    if dry_run:
        seconds = _estimate(item, store)
        say(f"+ {name}: would run, {f'about {seconds:.0f} s' if seconds else 'time unknown'}")
        return Outcome("planned", folder, seconds or 0.0)
    try:
        with store.lock(item.fingerprint, lambda: say(f"~ {name}: waiting for another process that computes it")):
            if _done(folder, lambda text: None):  # another process finished it while this one waited for the lock
                say(f"= {name}: done by another process")
                return Outcome("skipped", folder)
            say(f"> {name}")
            outcome = _compute(item, baseline, folder)
            for attempt in range(retries):  # finished evaluations are kept, so that only the rest is computed again
                if outcome.state != "failed" or outcome.mistake:
                    break
                say(f"> {name}: failed, retry {attempt + 1} of {retries}: {outcome.error}")
                outcome = _compute(item, baseline, folder)
            return outcome
    except FcEvalError as error:
        return Outcome("failed", folder, error=str(error), mistake=True)
    except BrokenPipeError:  # nobody reads what is said any more
        raise
    except OSError as error:  # the folder or the log cannot be written
        return Outcome("failed", folder, error=str(os_error(error, folder.path)), mistake=True)


def _done(folder: RunFolder, say: Callable[[str], None]) -> bool:
    """Whether a folder holds the whole run; one whose files do not read is said and computed again."""
    if not is_run(folder.path):
        return False
    found = read_run(folder.path)
    if isinstance(found, RunRecord):
        return found.fingerprint == folder.fingerprint
    if found.state == "broken":
        say(f"! {found.name}: broken: {found.reason}")
    return False


def _estimate(item: Plan, store: RunStore) -> float | None:
    """Seconds that a finished run of the same model, device and evaluations took, None where there is none."""
    wanted = _what_takes_time(item.config.as_dict())
    times = []
    for file in store.root.glob("*/result.json"):
        with suppress(FcEvalError, OSError, KeyError, TypeError, ValueError):  # a report says what is broken
            key, seconds = _time_of(file, file.stat().st_mtime_ns)
            times += [seconds] if key == wanted else []
    return max(times) if times else None


@cache
def _time_of(result: Path, changed_ns: int) -> tuple[tuple[Any, ...], float]:
    """What took time in a finished run, and how many seconds; remembered until the file changes."""
    folder = RunFolder(result.parent, "")
    return _what_takes_time(folder.read_config()["config"]), float(folder.read_result()["time"]["total_s"])


def _what_takes_time(config: Mapping[str, Any]) -> tuple[Any, ...]:
    specs = [{key: value for key, value in spec.items() if key != "path"} for spec in config["eval"]["specs"]]
    return config["model"]["name"], config["device"], config["tp"], config.get("processes", 1), specs


def write_plan(item: Plan, baseline: str | None, folder: RunFolder) -> None:
    """Writes what the child of a run reads: its configuration, and what it is made of."""
    folder.write_config(
        {
            "config": item.config.as_dict(),
            "baseline_fingerprint": baseline,
            "model_files": list(item.contents.model),
            "data": {name: list(lines) for name, lines in item.contents.data.items()},
            "commits": dict(item.contents.commits),
            "unknown": list(item.contents.unknown),
        }
    )


def _compute(item: Plan, baseline: str | None, folder: RunFolder) -> Outcome:
    """Runs the child and judges what it left."""
    write_plan(item, baseline, folder)
    ending = run_child(folder)
    error = ending.error
    if _files_changed(item):
        folder.discard_results()
        error = "its model or data files changed while it ran, so its numbers were thrown away: run it again"
    if error is None:
        folder.set_status("done")
        found = read_run(folder.path)
        if isinstance(found, RunRecord):
            return Outcome("done", folder, ending.seconds)
        error = f"it left no result that reads: {found.reason}"
    with suppress(FcEvalError):  # where the disk is full, the child's own words say what did not fit
        folder.set_status("failed", error=error)
    return Outcome("failed", folder, ending.seconds, error, mistake=ending.code == USER_ERROR_EXIT)


def _files_changed(item: Plan) -> bool:
    """Whether the files of a run are no longer those that its fingerprint was made of."""
    try:
        return plan(item.config).fingerprint != item.fingerprint
    except FcEvalError:  # one of them is gone
        return True


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
                unfinished(path, time.time())
                RunFolder(path, "").read_config()
            except FcEvalError as error:
                yield path.name, str(error).replace(f"{path}/", "")
            except OSError as error:
                yield path.name, os_reason(error, path)
