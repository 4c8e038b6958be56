"""What this machine has, and what `auto` in a configuration means here. Imports no tensor library."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fc_eval.config import MAX_THREADS, RunConfig
from fc_eval.errors import FcEvalError


def cpu_count() -> int:
    """CPUs that this process may use."""
    with suppress(AttributeError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(processes: int, cpus: int) -> int:
    """CPU threads of each process where a run does not say: OMP_NUM_THREADS, or an even share of the CPUs.

    Raises:
        FcEvalError: OMP_NUM_THREADS is no number of threads.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # later numbers are for nested regions
    if not given:
        return min(MAX_THREADS, max(1, cpus // processes))
    if not given.isdecimal() or not 1 <= int(given) <= MAX_THREADS:
        raise FcEvalError(
            f"OMP_NUM_THREADS={given!r} in the environment is not possible: expected 1 to {MAX_THREADS}; unset it, or "
            "say threads=N"
        )
    return int(given)


@cache
def gpu_count() -> int:
    """CUDA devices that torch sees, asked in a process of its own so that this one stays free of torch."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    probe = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    found = subprocess.run([sys.executable, "-P", "-c", probe], check=False, capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else 0


@dataclass(frozen=True)
class Room:
    """What the runs of a command may use.

    Attributes:
        jobs: runs that share it at a time, each with an even share.
        cpus: CPUs, None for those of this machine.
        gpus: GPUs, None for those that torch sees here.
    """

    jobs: int = 1
    cpus: int | None = None
    gpus: int | None = None

    def cpu_share(self) -> int:
        """CPUs of each run, at least 1."""
        return max(1, (cpu_count() if self.cpus is None else self.cpus) // self.jobs)

    def gpu_share(self) -> int:
        """GPUs of each run: 0 where there are none, and at least 1, which several runs may then have to share."""
        gpus = self.all_gpus()
        return max(1, gpus // self.jobs) if gpus else 0

    def all_gpus(self) -> int:
        """GPUs of all runs."""
        return gpu_count() if self.gpus is None else self.gpus


def settled(config: RunConfig, room: Room | None = None) -> RunConfig:
    """The same run with `auto` replaced by what this machine has, or by its share of it beside other runs.

    A GPU computes the same bits beside others, so the number of groups is no part of what a run is. On a CPU the
    order of sums follows the number of threads, so it is always settled there.

    Raises:
        FcEvalError: a GPU asked for where there is none, more processes than GPUs, or an impossible OMP_NUM_THREADS.
    """
    room = room or Room()
    if config.device == "cuda" and not room.all_gpus():
        if room.gpus is not None:
            raise FcEvalError("device=cuda but no job asks for a GPU: say how many with launcher.gpus=N, or device=cpu")
        raise FcEvalError("device=cuda but torch sees no CUDA device: use device=cpu, or install a CUDA build of torch")
    if config.device == "auto":
        config = replace(config, device="cuda" if room.all_gpus() else "cpu")
    gpus = room.gpu_share() if config.device == "cuda" else 0
    if config.processes == "auto":
        config = replace(config, processes=1 if config.model.device_map else max(1, gpus // config.ranks))
    assert isinstance(config.processes, int)
    found = f"torch sees {gpus}" if room == Room() else f"a run has {gpus} (jobs={room.jobs})"
    if gpus and config.ranks > gpus:
        raise FcEvalError(
            f"exec=tp with tp={config.tp} needs as many GPUs, but {found}: use exec=emulated or device=cpu"
        )
    if config.processes > 1 and gpus and config.processes * config.ranks > gpus:
        each = f" of {config.ranks} GPUs each" if config.ranks > 1 else ""
        raise FcEvalError(f"processes={config.processes}{each} needs as many GPUs, but {found}: use processes=auto")
    if config.device == "cpu" and config.threads is None:
        config = replace(config, threads=threads_each(config.processes * config.ranks, room.cpu_share()))
    return config


def share_note(config: RunConfig, room: Room) -> str | None:
    """What to say of a run whose threads follow from the others beside it, None where they do not."""
    shared, alone = settled(config, room), settled(config, replace(room, jobs=1))
    if shared.device != "cpu" or shared.threads == alone.threads:
        return None
    return (
        f"threads={shared.threads} for each run, its share of the CPUs with jobs={room.jobs}; on a CPU the threads are "
        f"part of what a run is, and one without jobs= has {alone.threads} here: give threads=N to share runs with it"
    )
