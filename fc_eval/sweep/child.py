"""One run as a child process: its command and environment, its heartbeat, and how it ended, in words."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import fc_eval
from fc_eval.errors import FcEvalError, Terminated
from fc_eval.launch import KILLED_EXIT, USER_ERROR_EXIT
from fc_eval.results.store import HEARTBEAT_S, RunFolder

TAIL_LINES = 20
# A child with several processes stops them before it ends, and gives them 30 s (torchrun's agent does); one that takes
# longer is killed.
STOP_S = 45.0


@dataclass(frozen=True)
class Ending:
    """How a child ended: its exit status, negative where a signal killed it, seconds spent, and the error in words."""

    code: int
    seconds: float
    error: str | None


class Halt:
    """Ends the children of all threads: a thread that waits for its child cannot be interrupted itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._reason: BaseException | None = None

    def __call__(self, reason: BaseException) -> None:
        """Stops every child, and lets no other start: their threads raise `reason`."""
        with self._lock:
            self._reason = reason
            children = list(self._children)
        for child in children:
            child.terminate()
        for child in children:
            _stop(child)

    def check(self) -> None:
        """Raises the reason where all is to end."""
        if self._reason is not None:
            raise self._reason

    def watch(self, child: "subprocess.Popen[bytes]") -> None:
        """Counts a child among those to be stopped; raises where all is to end already."""
        with self._lock:
            self._children.add(child)
        self.check()


@dataclass(frozen=True)
class Seat:
    """Where a child sits among others.

    Attributes:
        environment: variables of its own.
        named: whether the name of its run stands in front of each of its lines on the screen.
        halt: what ends it.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    named: bool = False
    halt: Halt = field(default_factory=Halt)


def child_command(folder: RunFolder) -> list[str]:
    """The command that carries out the run of a folder."""
    return [sys.executable, "-m", "fc_eval.run", str(folder.path)]


def child_environment() -> dict[str, str]:
    """The environment of a child: the user's own, but nothing is imported from the folder that he happens to be in."""
    # Threads that sleep while they wait: on a machine with other work, spinning ones made a forward pass several
    # times slower (2 cores, load 7: above 35 s instead of 12 s), and on an idle one the difference is small.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", "FC_EVAL_PARENT": str(os.getpid()), "PYTHONSAFEPATH": "1"}
    root, here = Path(fc_eval.__file__).parents[1], Path.cwd()
    if root == here and {"", str(here)} & set(sys.path):  # started as `python -m` in a source tree, which is meant
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else str(root)
    return environment


def run_child(folder: RunFolder, seat: Seat) -> Ending:
    """Carries out the run of a folder that is said to be running; what it prints goes to the screen and to its log.

    Raises:
        KeyboardInterrupt: the user or the system (`Terminated`) stopped this process; the child has ended, too.
        BaseException: the reason of `seat.halt`; the child has ended.
        FcEvalError, OSError: the folder cannot be written; the child has ended.
    """
    started = time.time()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    prefix = f"{folder.path.name}: ".encode() if seat.named else b""
    environment = child_environment() | dict(seat.environment)
    with folder.log_path.open("ab") as log:
        process = subprocess.Popen(
            child_command(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        beat = threading.Event()
        heart = threading.Thread(target=_heartbeat, args=(folder, process.pid, beat), daemon=True)
        heart.start()
        try:
            seat.halt.watch(process)
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                sys.stderr.buffer.write(prefix + line)  # one write: lines of two children do not mix
                sys.stderr.flush()
                tail.append(line.decode(errors="replace").rstrip())
            code = process.wait()
            if code:
                seat.halt.check()
            if code in (-signal.SIGINT, 128 + signal.SIGINT):  # a Ctrl-C reaches all processes of a terminal at once
                raise KeyboardInterrupt
        except BaseException as stop:
            _stop(process)
            _end(beat, heart)
            with suppress(FcEvalError):  # the first reason is the one to be told
                folder.set_status("failed", error=why_stopped(stop))
            raise
        _end(beat, heart)
    return Ending(code, time.time() - started, _explain(code, tail))


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def why_stopped(stop: BaseException) -> str:
    """What ended a run from outside, in words."""
    if isinstance(stop, Terminated):
        return "stopped by SIGTERM"
    if isinstance(stop, GeneratorExit):  # nobody asks for the outcomes of a sweep any more
        return "stopped, because another run failed (fail_fast=true)"
    if isinstance(stop, SystemExit):  # what submitit raises in a job that is taken away
        return "stopped by the scheduler; it goes on where that starts it again"
    return "stopped by the user" if isinstance(stop, KeyboardInterrupt) else f"stopped: {stop or type(stop).__name__}"


def _heartbeat(folder: RunFolder, child: int, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        with suppress(FcEvalError, OSError):  # a beat that cannot be written is missed, and the next is tried
            folder.set_status("running", keep=True, child=child)


def _end(beat: threading.Event, heart: threading.Thread) -> None:
    """Waits for the last heartbeat, which must not come after the status that ends the run."""
    beat.set()
    heart.join()


def _explain(code: int, tail: Sequence[str]) -> str | None:
    if code == 0:
        return None
    lines = [line for line in tail if line.strip()]
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    if code in (USER_ERROR_EXIT, KILLED_EXIT) and lines:
        return lines[-1].removeprefix("error: ")
    return f"exit status {code}: " + "\n".join(lines) if lines else f"exit status {code} without a word"
