"""Who carries out planned runs that do not need each other: this process, its threads, joblib, or jobs of submitit.

A launcher takes runs and yields each with its outcome as it ends. Closing it, or a Ctrl-C in it, ends all that still
run. Every one of them calls the same `PlannedRun`, which starts a child process: what fails there fails alone.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from fc_eval.errors import FcEvalError
from fc_eval.job import Job, LauncherConfig
from fc_eval.launch import die_with
from fc_eval.machine import Room, gpu_count
from fc_eval.sweep.child import STOP_S, Halt, Seat, why_stopped
from fc_eval.sweep.optional import optional
from fc_eval.sweep.planned_run import Outcome, PlannedRun

Ended = Generator[tuple[PlannedRun, Outcome], None, None]
Launcher = Callable[[Sequence[PlannedRun]], Ended]

POLL_S = 0.5
# Seconds in which a process that was just killed lets go of its lock.
LOCK_TRIES = 3
JOB_FOLDER = ".submitit"


def launcher_of(job: Job) -> Launcher:
    """The launcher that a command line asks for.

    Raises:
        FcEvalError: its package is not installed, or it cannot work on this machine.
    """
    config, at_a_time = job.launcher, job.at_a_time
    if config.name == "submitit":
        return partial(_submitted, executor=_executor(config, job.out), at_a_time=at_a_time)
    assert at_a_time is not None  # only a cluster has no limit
    if config.name == "joblib":
        return partial(_in_processes, joblib=optional("joblib", "launcher=joblib"), at_a_time=at_a_time)
    return one_by_one if at_a_time == 1 else partial(_side_by_side, at_a_time=at_a_time)


def room_of(job: Job) -> Room:
    """What a run may use under the launcher that a command line asks for."""
    config, jobs = job.launcher, 1 if job.launcher.on_cluster else job.at_a_time or 1
    if config.name != "submitit":
        return Room(jobs)
    # A job sees as many GPUs as it asks for, whatever there are.
    return Room(jobs, None if config.cpus is None else jobs * config.cpus, jobs * (config.gpus or 0))


def check_room(run: PlannedRun, job: Job) -> None:
    """Makes sure that runs side by side do not all take the first GPU.

    Raises:
        FcEvalError: they would.
    """
    deals_out = job.launcher.name == "local" or job.launcher.on_cluster
    if run.plan.config.device == "cuda" and not deals_out and job.at_a_time != 1:
        raise FcEvalError(
            f"launcher={job.launcher.name} does not deal out the GPUs of this machine: use launcher=local, or jobs=1"
        )


def one_by_one(runs: Sequence[PlannedRun], say: Callable[[str], None] = print) -> Ended:
    """This process alone: the launcher of a command line that asks for none."""
    for run in runs:
        yield run, run(say=say)


def _side_by_side(runs: Sequence[PlannedRun], at_a_time: int) -> Ended:
    """Threads of this process, each of which waits for its child."""
    halt = Halt()
    free: SimpleQueue[Mapping[str, str]] = SimpleQueue()
    for environment in seats(runs, at_a_time):
        free.put(environment)

    def carry_out(run: PlannedRun) -> Outcome:
        environment = free.get()
        try:
            return run(Seat(environment, named=True, halt=halt))
        finally:
            free.put(environment)

    with ThreadPoolExecutor(at_a_time) as pool:
        futures = {pool.submit(carry_out, run): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as stop:
            for future in futures:
                future.cancel()
            halt(stop)
            raise


def seats(runs: Sequence[PlannedRun], at_a_time: int) -> list[dict[str, str]]:
    """The environment of each run at a time: an even share of the GPUs, and of the CPUs that feed them."""
    if not any(run.plan.config.device == "cuda" for run in runs):
        return [{} for _ in range(at_a_time)]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(index) for index in range(gpu_count())]
    room = Room(jobs=at_a_time)
    share = room.gpu_share()
    threads = os.environ.get("OMP_NUM_THREADS") or str(room.cpu_share())
    return [
        {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[(seat * share + index) % len(gpus)] for index in range(share)),
            "OMP_NUM_THREADS": threads,
        }
        for seat in range(at_a_time)
    ]


def _in_processes(runs: Sequence[PlannedRun], joblib: Any, at_a_time: int) -> Ended:
    """Worker processes of joblib, each of which waits for its child."""
    parallel = joblib.Parallel(at_a_time, backend="loky", batch_size=1, return_as="generator_unordered")
    left = dict(enumerate(runs))
    outcomes = parallel(joblib.delayed(_numbered)(number, run, os.getpid()) for number, run in left.items())
    try:
        for number, outcome in outcomes:
            yield left.pop(number), outcome
    except BaseException as stop:
        outcomes.close()  # kills its workers, and with them their children
        _mark_stopped(left.values(), stop)
        raise


def _numbered(number: int, run: PlannedRun, parent: int) -> tuple[int, Outcome]:
    if os.getpid() != parent:  # joblib starts no worker where one run is carried out at a time
        die_with(parent)  # a worker that outlived it would go on with what the same command takes up again
    return number, run(Seat(named=True))


def _executor(config: LauncherConfig, out: str) -> Any:
    """The executor of submitit; its own files go beside the run folders."""
    submitit = optional("submitit", "launcher=submitit")
    slurm = {name: getattr(config, name) for name in ("partition", "account", "qos", "constraint")}
    asked = {
        "name": "fc_eval",
        "gpus_per_node": config.gpus,
        "cpus_per_task": config.cpus,
        "mem_gb": config.mem_gb,
        "timeout_min": config.timeout_min,
        **{f"slurm_{name}": value for name, value in slurm.items()},
        **config.options,
    }
    try:
        executor = submitit.AutoExecutor(f"{out}/{JOB_FOLDER}", cluster=config.executor)
        executor.update_parameters(**{name: value for name, value in asked.items() if value is not None})
    except (RuntimeError, NameError, AssertionError, ValueError, TypeError) as error:
        raise FcEvalError(
            f"submitit refuses launcher.executor={config.executor}: {' '.join(str(error).split())}"
        ) from None
    return executor


class _Resumable:
    """A run as submitit's jobs call it; one that is taken away is queued again, and keeps what it finished."""

    def __init__(self, run: PlannedRun) -> None:
        self.run = run

    def __call__(self) -> Outcome:
        return self.run()

    def checkpoint(self) -> Any:
        """What is queued again."""
        return optional("submitit", "launcher=submitit").helpers.DelayedSubmission(self)


def _submitted(runs: Sequence[PlannedRun], executor: Any, at_a_time: int | None) -> Ended:
    waiting = deque(runs)
    running: dict[Any, PlannedRun] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (at_a_time or len(runs)):
                run = waiting.popleft()
                with _heeds_interrupts():
                    job = executor.submit(_Resumable(run))
                running[job] = run
                print(f"> {run.name}: job {job.job_id} of submitit", flush=True)
            ended = [job for job in running if job.done()]
            for job in ended:
                yield running[job], _result(job, running[job])
                del running[job]
            if not ended:
                time.sleep(POLL_S)
    except BaseException as stop:
        for job in running:
            job.cancel(check=False)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and not all(job.done() for job in running):
            time.sleep(POLL_S)
        _mark_stopped(running.values(), stop)
        raise


@contextmanager
def _heeds_interrupts() -> Iterator[None]:
    """What is started here heeds SIGINT, by which submitit cancels local jobs.

    A script's background job ignores it, and so does all that it starts.
    """
    here = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handler
    ignored = here and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _result(job: Any, run: PlannedRun) -> Outcome:
    """What a job returned; one that was killed returned nothing."""
    try:
        outcome: Outcome = job.result()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = (
            f"job {job.job_id} of submitit gave no outcome ({lines[0] if lines else error!r}): see {job.paths.stderr}"
        )
        _mark_failed(run, text)
        return Outcome("failed", run.folder, error=text)
    return outcome


def _mark_stopped(runs: Iterable[PlannedRun], stop: BaseException) -> None:
    """Says in the folders of runs that were ended from outside why they ended."""
    for run in runs:
        _mark_failed(run, why_stopped(stop))


def _mark_failed(run: PlannedRun, why: str) -> None:
    """Says in the folder of a run that had begun why it ended, unless another command is computing it."""
    asked = 0

    def waiting() -> None:
        nonlocal asked
        asked += 1
        if asked > LOCK_TRIES:
            raise FcEvalError("another process holds its lock")

    with suppress(FcEvalError, OSError):  # it had not begun
        if run.folder.status()["state"] == "running":
            with run.store.lock(run.plan.fingerprint, waiting):
                if run.folder.status()["state"] == "running":  # that other command may have finished it meanwhile
                    run.folder.set_status("failed", error=why)
