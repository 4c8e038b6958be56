"""What a command line says beside the configuration of its runs: where they go, and how many are carried out by whom.

None of this changes what a run is, except that the CPU threads of a run that does not give them are a share of the CPUs
that its launcher leaves to it (`fc_eval.machine`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fc_eval.errors import FcEvalError, unknown
from fc_eval.settings import build, check_scalars

LAUNCHERS = ("local", "joblib", "submitit")


@dataclass(frozen=True)
class LauncherConfig:
    """Who carries the runs out: the `launcher` group as composed. All but `name` belong to `submitit`.

    Attributes:
        name: a choice of `LAUNCHERS`.
        executor: `slurm`, or `local` for processes of this machine.
        gpus: GPUs of each job.
        cpus: CPUs of each job.
        mem_gb: memory of each job, None for what the partition gives.
        timeout_min: minutes after which a job is ended; it is queued again and goes on with what is missing.
        partition: of Slurm, as `account`, `qos` and `constraint`; None leaves them to the cluster.
        options: further parameters of submitit by its own names (`slurm_exclude`, `slurm_setup`, ...).
    """

    name: str = "local"
    executor: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    mem_gb: float | None = None
    timeout_min: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_scalars("launcher", self)
        if self.name not in LAUNCHERS:
            raise unknown("launcher", self.name, LAUNCHERS)
        if self.name == "submitit" and self.executor not in ("slurm", "local"):
            raise FcEvalError(f"launcher.executor={self.executor} is not possible: expected slurm or local")
        if self.on_cluster and self.gpus is None:
            raise FcEvalError("launcher.gpus is missing: say how many GPUs each job asks Slurm for, 0 for none")
        if self.on_cluster and self.cpus is None:
            raise FcEvalError("launcher.cpus is missing: say how many CPUs each job asks Slurm for")
        for name, least in (("gpus", 0), ("cpus", 1), ("mem_gb", 1), ("timeout_min", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise FcEvalError(f"launcher.{name}={value} is not possible: expected at least {least}")
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise FcEvalError(
                f"launcher.options={self.options!r} is not possible: expected submitit's own parameters, as in "
                "+launcher.options.slurm_exclude=node7"
            )

    @property
    def on_cluster(self) -> bool:
        """Whether jobs run on other machines than this one."""
        return self.name == "submitit" and self.executor == "slurm"


@dataclass(frozen=True)
class Job:
    """What a command line says beside the configuration of a run; all but `out` hold for a whole sweep.

    Attributes:
        out: folder of the run folders.
        fail_fast: stop a sweep at the first failed run.
        dry_run: only say what would run.
        retries: how often a run that failed is tried again.
        jobs: runs at a time; None for one, and for all of them where a cluster queues them.
        launcher: who carries them out.
        tracking: the experiment tracker that finished runs are logged to (`fc_eval.sweep.tracking`), 'none' for none.
    """

    out: str = "runs"
    fail_fast: bool = False
    dry_run: bool = False
    retries: int = 0
    jobs: int | None = None
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    tracking: str = "none"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Job":
        """Its own keys of the mapping that Hydra composed.

        Raises:
            FcEvalError: a value that is not possible.
        """
        own = {key: mapping[key] for key in JOB_KEYS if key in mapping}
        if "launcher" in own:
            own["launcher"] = build("launcher", LauncherConfig, own["launcher"])
        job = build("", cls, own)
        if not job.out.strip():
            raise FcEvalError("out= names no folder: give the one of the run folders with out=DIR, as in out=runs")
        if job.retries < 0:
            raise FcEvalError(f"retries={job.retries} is not possible: expected a whole number, at least 0")
        if job.jobs is not None and job.jobs < 1:
            raise FcEvalError(f"jobs={job.jobs} is not possible: expected a whole number of runs at a time, at least 1")
        return job

    @property
    def at_a_time(self) -> int | None:
        """Runs at a time, None where nothing limits them here."""
        return self.jobs if self.jobs is not None or self.launcher.on_cluster else 1


JOB_KEYS = tuple(field.name for field in fields(Job))
