"""One planned run and how it comes about, in whichever process or job carries it out. Imports no tensor library.

A child that raises, exits, runs out of memory or is killed leaves the others alone: its folder says how it ended, and
the same command tries only the missing runs again.
"""

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fc_eval.errors import FcEvalError, os_error
from fc_eval.launch import USER_ERROR_EXIT
from fc_eval.results.record import RunRecord, read_run
from fc_eval.results.state import is_run
from fc_eval.results.store import RunFolder, RunStore
from fc_eval.sweep.child import Seat, run_child
from fc_eval.sweep.plan import Plan, plan

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
class PlannedRun:
    """A run that is to be in the store. It can be pickled, and called wherever the store is.

    Attributes:
        plan: what it is.
        baseline: the run that it is compared with, None for a baseline.
        folder: where it is kept.
        retries: how often it is tried again after it failed; a mistake of the user's is not.
    """

    plan: Plan
    baseline: "PlannedRun | None"
    folder: RunFolder
    retries: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.path.name

    @property
    def store(self) -> RunStore:
        """The store of its folder."""
        return RunStore(self.folder.path.parent)

    def is_done(self, say: Callable[[str], None]) -> bool:
        """Whether the folder holds the whole run; one whose files do not read is said, and will be computed again."""
        if not is_run(self.folder.path):
            return False
        found = read_run(self.folder.path)
        if isinstance(found, RunRecord):
            return found.fingerprint == self.folder.fingerprint
        if found.state == "broken":
            say(f"! {found.name}: broken: {found.reason}")
        return False

    def __call__(self, seat: Seat | None = None, say: Callable[[str], None] = print) -> Outcome:
        """Computes it in a child process, unless another process just did.

        Args:
            seat: where the child sits among others; None where it has this process for itself.
            say: takes a line for each attempt.
        """
        seat = seat or Seat()
        try:
            with self.store.lock(self.plan.fingerprint, _waiting(self.name, seat, say)):
                if self.is_done(lambda text: None):  # another process finished it while this one waited for the lock
                    say(f"= {self.name}: done by another process")
                    return Outcome("skipped", self.folder)
                say(f"> {self.name}")
                outcome = self._compute(seat)
                for attempt in range(self.retries):  # finished evaluations are kept: only the rest is computed again
                    if outcome.state != "failed" or outcome.mistake:
                        break
                    say(f"> {self.name}: failed, retry {attempt + 1} of {self.retries}: {outcome.error}")
                    outcome = self._compute(seat)
                return outcome
        except FcEvalError as error:
            return Outcome("failed", self.folder, error=str(error), mistake=True)
        except BrokenPipeError:  # nobody reads what is said any more
            raise
        except OSError as error:  # the folder or the log cannot be written
            return Outcome("failed", self.folder, error=str(os_error(error, self.folder.path)), mistake=True)
        except Exception as error:
            traceback.print_exception(error)
            text = f"{type(error).__name__}: {error}; this is a defect of fc-eval, see the traceback"
            return Outcome("failed", self.folder, error=text)

    def _compute(self, seat: Seat) -> Outcome:
        """Runs the child and judges what it left."""
        folder = self.folder
        folder.set_status("running", child=None)  # first: a folder without a status is broken for whoever looks at it
        write_plan(self.plan, self.baseline.plan.fingerprint if self.baseline else None, folder)
        ending = run_child(folder, seat)
        error = ending.error
        if self._files_changed():
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

    def _files_changed(self) -> bool:
        """Whether the files of the run are no longer those that its fingerprint was made of."""
        try:
            return plan(self.plan.config).fingerprint != self.plan.fingerprint
        except FcEvalError:  # one of them is gone
            return True


def _waiting(name: str, seat: Seat, say: Callable[[str], None]) -> Callable[[], None]:
    """What is done each second while another process holds the lock: it is said once."""
    said = False

    def waiting() -> None:
        nonlocal said
        seat.halt.check()
        if not said:
            say(f"~ {name}: waiting for another process that computes it")
        said = True

    return waiting


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
