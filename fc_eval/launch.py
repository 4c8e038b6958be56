"""Several processes for one run, started with torchrun's own agent; and how processes end together.

`launch` runs a module in N processes with torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...) and
watches them: when one ends badly the others are stopped within seconds, and one line says which one and why.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from fc_eval.errors import FcEvalError, Terminated
from fc_eval.machine import cpu_count

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# What a process exits with after a mistake that the user can mend; when it lost the others, and one of them has more
# to say; and when one that it started was killed, of which its last line says all there is to say.
USER_ERROR_EXIT, LOST_EXIT, KILLED_EXIT = 2, 3, 4
_MARK = "FC_EVAL_LAUNCHED"


def is_launched() -> bool:
    """Whether `launch` started this process, so that it is one of several."""
    return _MARK in os.environ


def die_with_parent() -> None:
    """Ends this process when its supervisor dies, so that nobody writes to a folder that another run takes up.

    A Ctrl-C is the supervisor's to handle: this process ends without a traceback.
    """
    parent = os.environ.get("FC_EVAL_PARENT")
    if parent is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(int(parent))


def die_with(parent: int) -> None:
    """Has the system kill this process when its parent dies, however that happens; on Linux only."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated` in the block, as Ctrl-C raises KeyboardInterrupt: what runs is ended and told.

    Only the main thread can say so; elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report_error(error: FcEvalError) -> None:
    """Says what the user should mend: on the screen, or to `launch`, so that one process of several says it."""
    if not is_launched():
        print(f"error: {error}", flush=True)
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def launch(count: int, module: str, *arguments: str) -> int:
    """Runs `python -m MODULE ARGUMENTS` in `count` processes of this machine, and waits for them.

    CPU threads are divided among them, unless OMP_NUM_THREADS says how many each has.

    Returns:
        0 when all ended well; otherwise an exit status of its own kind, after one line on the cause.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # the agent's own words; the cause is said below
    os.environ |= {_MARK: str(count), "FC_EVAL_PARENT": str(os.getpid())}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // count)))
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on one machine, whatever its name resolves to
    # The agent watches for signals only once its processes run; until then they must not leave the folder behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="fc_eval_launch_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            return _explain(error, count)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except KeyboardInterrupt as stop:
            return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    return 0


def _explain(error: "ChildFailedError", count: int) -> int:
    """Finds who failed first. Those that the agent stopped, and those that only lost the others, are no cause."""

    def no_cause(failure: "ProcessFailure") -> bool:
        return failure.exitcode in (-signal.SIGTERM, LOST_EXIT)

    index, cause = min(error.failures.items(), key=lambda item: (no_cause(item[1]), item[1].timestamp, item[0]))
    if cause.exitcode == USER_ERROR_EXIT:
        said = cause.message["message"] if isinstance(cause.message, dict) else cause.message
        print(f"error: {said.removeprefix(f'{FcEvalError.__name__}: ')}", flush=True)
        return USER_ERROR_EXIT
    who = f"process {index} of {count} (counted from 0)"
    if cause.exitcode == LOST_EXIT:
        print(f"{who} lost the others, which did not end: they may hang; see above", flush=True)
    elif cause.exitcode < 0:
        hint = " (the system does this when memory runs out)" if cause.exitcode == -signal.SIGKILL else ""
        print(f"error: {who} was killed by {cause.signal_name()}{hint}; the others were stopped", flush=True)
        return KILLED_EXIT
    else:
        print(f"{who} ended with exit status {cause.exitcode}; the others were stopped", flush=True)
    return 1
