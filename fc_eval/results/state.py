"""Whether a run folder holds a finished run, and if not, why: `Problem`."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fc_eval.errors import FcEvalError
from fc_eval.results.files import read_json
from fc_eval.results.store import HEARTBEAT_S, SCHEMA

# A heartbeat missed so many times means that nobody works on the folder any more.
MISSED_BEATS = 4
# Anything of a run in a folder makes it a run folder; all others below RUNS are left alone.
_MARKS = ("status.json", "result.json", "config.yaml", "log.txt", "evals")


@dataclass(frozen=True)
class Problem:
    """A run that gives no numbers: its folder's name, its state, and why."""

    name: str
    state: Literal["failed", "running", "dead", "broken", "left out"]
    reason: str


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, finished or not; one that may not be looked into counts as one."""
    try:
        return any((path / mark).exists() for mark in _MARKS)
    except OSError:
        return True


def unfinished(path: Path, now: float) -> Problem | None:
    """None for a run that is done, otherwise what became of it.

    Args:
        path: the run folder.
        now: seconds since 1970, against which the heartbeat is judged.

    Raises:
        FcEvalError: the folder is missing, or its status says nothing or is of another schema.
    """
    if not path.is_dir():
        raise FcEvalError("it is not a folder: expected one below the RUNS of `fc-eval run out=RUNS`")
    if not (path / "status.json").exists():
        raise FcEvalError("it has no status.json, so the run never began: run it again")
    status = read_schema(path / "status.json")
    state = status.get("state")
    if state == "done":
        return None
    if state == "failed":
        return Problem(path.name, "failed", str(status.get("error") or "no reason was kept; see log.txt"))
    if state != "running":
        raise FcEvalError(f"status.json says {state!r}, expected running, done or failed")
    beat = status.get("heartbeat")
    silent_s = now - (beat if isinstance(beat, (int, float)) else 0)
    gone = status.get("host") == socket.gethostname() and not _alive(status.get("pid"))
    if gone or silent_s > MISSED_BEATS * HEARTBEAT_S:
        who = f"process {status.get('pid')} on {status.get('host')}"
        return Problem(path.name, "dead", f"{who} ended without a word; the same command takes the run up again")
    return Problem(path.name, "running", "not finished yet")


def read_schema(path: Path) -> dict[str, Any]:
    """A JSON file of the schema that is known here.

    Raises:
        FcEvalError: missing, incomplete, or of another schema.
    """
    value = read_json(path)
    schema = value.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise FcEvalError(f"{path} has schema {schema}, newer than the {SCHEMA} known here: update fc-eval")
    if schema != SCHEMA:
        raise FcEvalError(f"{path} has schema {schema!r}, expected {SCHEMA}: it is not of this program")
    return value


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
