"""`fc-eval run`: every run of a sweep is composed, checked and planned, then `sweep.carry_out` has it run."""

import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import yaml

from fc_eval.compose import EXPERIMENT, GROUPS, compose_mappings, compose_one
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError, os_error, unknown
from fc_eval.experiment import experiment
from fc_eval.job import Job
from fc_eval.launch import USER_ERROR_EXIT
from fc_eval.machine import share_note
from fc_eval.presets import conf_dir, options
from fc_eval.results.store import RunStore
from fc_eval.sweep.execute import carry_out, foretell, planned, summarize
from fc_eval.sweep.launchers import check_room, launcher_of, room_of
from fc_eval.sweep.planned_run import Outcome, PlannedRun
from fc_eval.sweep.tracking import tracker_of

__all__ = ["compose_one", "help_text", "run"]

FLAGS = {"-m": "sweep", "--multirun": "sweep", "--cfg": "cfg", "-h": "help", "--help": "help"}


def run(arguments: Sequence[str]) -> int:
    """Runs every job of a command line.

    Returns:
        0 when all runs are done, 1 when one failed, 2 when one could not be run because of a mistake of the user's.

    Raises:
        FcEvalError: a command line that composes to nothing sensible.
    """
    flags, overrides = _split(arguments)
    if "help" in flags:
        print(help_text())
        return 0
    mappings = compose_mappings(overrides, sweep="sweep" in flags)
    if "cfg" in flags:
        print(
            "---\n".join(yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True) for mapping in mappings), end=""
        )
        return 0
    refused = Refused()
    composed: list[tuple[RunConfig, Job]] = []
    for mapping in mappings:
        with refused:
            composed.append((RunConfig.from_mapping(mapping), Job.from_mapping(mapping)))
    if not composed:
        return refused.status
    job = _shared([own for _, own in composed])
    launcher, room, tracker = launcher_of(job), room_of(job), tracker_of(job.tracking)
    runs: list[PlannedRun] = []
    notes: dict[str | None, None] = {}
    for config, own in composed:  # all of them before the first one runs: a mistake should not show after hours
        with refused:
            store = RunStore(Path(own.out))
            store.check() if job.dry_run else store.prepare()
            runs += planned(config, store, room, job.retries)
            check_room(runs[-1], job)
            notes[share_note(config, room)] = None
    if not runs or (job.fail_fast and refused):
        return refused.status
    for note in filter(None, notes):
        print(note)
    outcomes = foretell(runs) if job.dry_run else carry_out(runs, launcher, fail_fast=job.fail_fast, finished=tracker)
    status = summarize(outcomes)
    if job.dry_run:
        print(_how_to_run(arguments, [config for config, _ in composed]))
    for reason in [*refused.mistakes, *refused.defects]:
        print(f"not run: {reason}")
    _print_table(outcomes)
    return status if status == 1 or not refused else refused.status


def _shared(jobs: Sequence[Job]) -> Job:
    """What holds for a whole command line."""
    first = jobs[0]
    for job in jobs[1:]:
        for field in fields(Job):
            values = getattr(first, field.name), getattr(job, field.name)
            if field.name != "out" and values[0] != values[1]:
                raise FcEvalError(f"{field.name} holds for a whole sweep, but several values are given: choose one")
    return first


class Refused:
    """Jobs that could not be run. As a context it lets one of them fail by itself: the others go on."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.defects: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.mistakes or self.defects)

    @property
    def status(self) -> int:
        """Exit status: 1 for a defect of this program, 2 where there are only mistakes of the user's."""
        return 1 if self.defects else USER_ERROR_EXIT

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, BrokenPipeError) or not isinstance(error, Exception):
            return False
        if isinstance(error, (FcEvalError, OSError)):
            text = str(os_error(error) if isinstance(error, OSError) else error)
            if text not in self.mistakes:  # said once, however many jobs share it
                self.mistakes.append(text)
                print(f"error: {text}", file=sys.stderr)
        else:
            traceback.print_exception(error)
            self.defects.append(f"{type(error).__name__}: {error}; this is a defect of fc-eval, see the traceback")
        return True


def _split(arguments: Sequence[str]) -> tuple[set[str], list[str]]:
    """Flags by meaning, and overrides; `--cfg job`, as Hydra has it, is `--cfg`."""
    flags: set[str] = set()
    overrides: list[str] = []
    for index, argument in enumerate(arguments):
        if argument in FLAGS:
            flags.add(FLAGS[argument])
        elif argument.startswith("-"):
            raise unknown("flag", argument, FLAGS, hint="`fc-eval run --help` describes them")
        elif not (argument == "job" and index and arguments[index - 1] == "--cfg"):
            overrides.append(argument)
    return flags, overrides


def _how_to_run(arguments: Sequence[str], configs: Sequence[RunConfig]) -> str:
    """The command that computes what a dry run planned, and what models on the Hub may ask for."""
    command = shlex.join(["fc-eval", "run", *(each for each in arguments if each.partition("=")[0] != "dry_run")])
    hubs = dict.fromkeys(c.model.hub_id for c in configs if c.model.hub_id and not c.model.path)
    notes = [f" ({hub}: accept its licence on the Hub and set HF_TOKEN, or add model.path=FOLDER)" for hub in hubs]
    return f"to run: {command}{''.join(notes)}"


def help_text() -> str:
    """How to use `fc-eval run`: flags, the choices of each group, the experiments, and every key with its meaning."""
    experiments = "\n".join(f"  {name}: {experiment(name).title}" for name in options(EXPERIMENT))
    groups = "\n".join(f"  {group}: {', '.join(options(group))}" for group in GROUPS)
    _, _, keys = (conf_dir() / "config.yaml").read_text(encoding="utf-8").partition("- _self_\n\n")
    return f"""\
usage: fc-eval run [-m] [--cfg] [GROUP=NAME] [KEY=VALUE] ...

  -m, --multirun  a sweep: every combination of comma-separated values, as in comm=int8,int4 tp=2,4
  --cfg           print the composed configuration of each job instead of running it
  -h, --help      this text

groups, chosen by name ('eval=[a,b]' takes several; quote it, because a shell may read the brackets):
{groups}
  comm may be any other, too: int4-g32-sym, ring:int8-g64, one_step:mxfp4-g8-e5m0, int4-g128/int8-g32+min64

experiments of the papers, as in fc-eval run -m experiment=NAME model=...; any key of theirs can be given otherwise:
{experiments}

keys, with their defaults (a group's own keys: `fc-eval run --cfg`, or the files below {conf_dir()}):
{keys}"""


def _print_table(outcomes: list[Outcome]) -> None:
    from fc_eval.report.terminal import terminal_table
    from fc_eval.results.record import load_run

    folders = {o.folder.path: o.folder for o in outcomes if o.state in ("done", "skipped")}
    if folders:
        print()
        print(terminal_table([load_run(path) for path in folders]))
