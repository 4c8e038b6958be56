"""The parent of all runs: fingerprints, skips what is done, starts one child per run. Imports no tensor library.

A child that raises, exits, runs out of memory or is killed leaves the others alone: its folder says how it ended, and
the same command tries only the missing runs again.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.sources import data_files
from fc_eval.launch import USER_ERROR_EXIT
from fc_eval.machine import settled
from fc_eval.models.config import model_files
from fc_eval.results.fingerprint import files_digest, fingerprint
from fc_eval.results.record import RunRecord, read_run
from fc_eval.results.state import is_run
from fc_eval.results.store import HEARTBEAT_S, RunFolder, RunStore

TAIL_LINES = 20
# A child with several processes stops them before it ends; one that takes longer is killed.
STOP_S = 10.0

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
    """A run with its identity resolved: device settled, files hashed."""

    config: RunConfig
    name: str
    fingerprint: str
    model_files: tuple[str, ...]


def plan(config: RunConfig) -> Plan:
    """Settles the device and the processes, and computes the fingerprint.

    Raises:
        FcEvalError: a file that is missing, or a GPU asked for where there is none.
    """
    config = settled(config)
    if config.is_baseline:
        config = config.baseline()  # however it was asked for, it is the same run
    root = Path(config.data_root) if config.data_root else None
    files = {
        "model": files_digest(model_files(config.model)),
        # By evaluation: which file belongs to which one counts, not only which files there are.
        "data": [
            digest for spec in config.eval.specs for digest in [spec.name, *files_digest(data_files([spec], root))]
        ],
    }
    evals = "-".join(spec.name for spec in config.eval.specs)
    comm = config.comm.build()
    group = f"-g{comm.reduce.group_size}" if comm.reduce else ""
    policy = "" if config.policy_name == "uniform" else f"-{config.policy_name}"
    name = f"{config.model.name}-{comm.short_name}{group}{policy}-tp{config.tp}-{evals}"
    return Plan(
        config,
        "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120],
        fingerprint(config.identity(), files),
        tuple(files["model"]),
    )


def execute(
    config: RunConfig, store: RunStore, *, dry_run: bool = False, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Makes sure that a run and the baseline it is compared with are in the store, computing only what is missing.

    Returns:
        One outcome per run, the baseline first. A failed baseline leaves its run undone, because a run without
        its baseline says nothing.

    Raises:
        FcEvalError: the configuration refers to something that is not there.
    """
    target = plan(config)
    plans = [target] if config.is_baseline else [plan(config.baseline()), target]
    outcomes: list[Outcome] = []
    for index, item in enumerate(plans):
        baseline = plans[0].fingerprint if index else None
        if outcomes and outcomes[-1].state == "failed":
            why = f"its baseline {outcomes[-1].folder.path.name} failed"
            folder = store.folder(item.name, item.fingerprint)
            outcomes.append(Outcome("failed", folder, error=why, mistake=outcomes[-1].mistake))
            break
        outcomes.append(_ensure(item, baseline, store, dry_run, say))
    return outcomes


def _ensure(item: Plan, baseline: str | None, store: RunStore, dry_run: bool, say: Callable[[str], None]) -> Outcome:
    folder = store.folder(item.name, item.fingerprint)
    name = folder.path.name
    if _done(folder, say):
        say(f"= {name}: done before")
        return Outcome("skipped", folder)
    if dry_run:
        seconds = _estimate(item, store)
        say(f"+ {name}: would run, {f'about {seconds:.0f} s' if seconds else 'time unknown'}")
        return Outcome("planned", folder, seconds or 0.0)
    with store.lock(item.fingerprint, lambda: say(f"~ {name}: waiting for another process that computes it")):
        if _done(folder, lambda text: None):  # another process finished it while this one waited for the lock
            say(f"= {name}: done by another process")
            return Outcome("skipped", folder)
        say(f"> {name}")
        return _run_child(item, baseline, folder)


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
    for file in sorted(store.root.glob("*/result.json")):
        with suppress(FcEvalError, KeyError, TypeError, ValueError):  # whoever reports on them says what is broken
            folder = RunFolder(file.parent, "")
            if _what_takes_time(folder.read_config()["config"]) == wanted:
                times.append(float(folder.read_result()["time"]["total_s"]))
    return max(times) if times else None


def _what_takes_time(config: Mapping[str, Any]) -> tuple[Any, ...]:
    specs = [{key: value for key, value in spec.items() if key != "path"} for spec in config["eval"]["specs"]]
    return config["model"]["name"], config["device"], config["tp"], config.get("processes", 1), specs


def child_command(folder: RunFolder) -> list[str]:
    """The command that carries out the run of a folder."""
    return [sys.executable, "-m", "fc_eval.run", str(folder.path)]


def _run_child(item: Plan, baseline: str | None, folder: RunFolder) -> Outcome:
    folder.write_config(
        {
            "config": item.config.as_dict(),
            "baseline_fingerprint": baseline,
            "model_files": list(item.model_files),
        }
    )
    started = time.time()
    folder.set_status("running", child=None)
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    # Threads that sleep while they wait: on a machine with other work, spinning ones made a forward pass several
    # times slower (2 cores, load 7: above 35 s instead of 12 s), and on an idle one the difference is small.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", "FC_EVAL_PARENT": str(os.getpid())}
    with folder.log_path.open("ab") as log:
        process = subprocess.Popen(
            child_command(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        beat = threading.Event()
        heart = threading.Thread(target=_heartbeat, args=(folder, process.pid, beat), daemon=True)
        heart.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
                tail.append(line.decode(errors="replace").rstrip())
            code = process.wait()
        except BaseException:
            _stop(process)
            folder.set_status("failed", error="stopped by the user")
            raise
        finally:
            beat.set()
            heart.join()
    seconds = time.time() - started
    if _files_changed(item):
        folder.discard_results()
        error = "its model or data files changed while it ran, so its numbers were thrown away: run it again"
        folder.set_status("failed", error=error)
        return Outcome("failed", folder, seconds, error)
    if code == 0 and (folder.path / "result.json").exists():
        folder.set_status("done")
        return Outcome("done", folder, seconds)
    error = _explain(code, tail)
    folder.set_status("failed", error=error)
    return Outcome("failed", folder, seconds, error, mistake=code == USER_ERROR_EXIT)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _files_changed(item: Plan) -> bool:
    """Whether the files of a run are no longer those that its fingerprint was made of."""
    try:
        return plan(item.config).fingerprint != item.fingerprint
    except (FcEvalError, OSError):  # one of them is gone
        return True


def _heartbeat(folder: RunFolder, child: int, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        folder.set_status("running", keep=True, child=child)


def _explain(code: int, tail: deque[str]) -> str:
    lines = [line for line in tail if line.strip()]
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    if code == USER_ERROR_EXIT and lines:
        return lines[-1].removeprefix("error: ")
    return f"exit status {code}: " + "\n".join(lines) if lines else f"exit status {code} without a word"


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
    failed = [outcome for outcome in unique.values() if outcome.state == "failed"]
    return 0 if not failed else USER_ERROR_EXIT if all(outcome.mistake for outcome in failed) else 1
