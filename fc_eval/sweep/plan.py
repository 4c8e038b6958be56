"""A run with its identity resolved, before anything of it is computed. Imports no tensor library."""

from dataclasses import dataclass, replace

from fc_eval.config import UNIFORM, RunConfig
from fc_eval.machine import Room, settled
from fc_eval.results.fingerprint import fingerprint
from fc_eval.sweep.contents import Contents, contents, pinned


@dataclass(frozen=True)
class Plan:
    """A run with its identity resolved: device settled, files hashed, branches on the Hub replaced by commits."""

    config: RunConfig
    name: str
    fingerprint: str
    contents: Contents


def plan(config: RunConfig, room: Room | None = None) -> Plan:
    """Settles the device and the processes, and computes the fingerprint.

    Args:
        config: the run.
        room: what it may use, None for all of this machine.

    Raises:
        FcEvalError: a file that is missing, or a GPU asked for where there is none.
    """
    config = settled(config, room)
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
    model = config.model
    strength = "" if model.smoothing is None else f"-{model.smoothing:g}"
    weights = [] if model.weights == "native" else [f"{model.weights}{strength}"]
    parts = [model.name, *weights, comm.short_name, *(f"g{group}" for group in groups)]
    parts += [] if config.policy_name == UNIFORM else [config.policy_name]
    parts += [f"tp{config.tp}" if config.exec == "emulated" else f"ranks{config.tp}"]
    parts += [spec.name for spec in config.eval.specs]
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in "-".join(parts))[:120]
