"""Hydra composes: overrides as on the command line become one plain mapping per job of a sweep.

Only Hydra's grammar and its composing are used. What it would do beside that (working folders, log files, launchers)
has no place here: a run is a child process with a folder of its own.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fc_eval.comm_config import named_comm
from fc_eval.config import CUSTOM, RunConfig
from fc_eval.errors import FcEvalError, os_error, unknown
from fc_eval.experiment import experiment
from fc_eval.presets import SINGLE, conf_dir, options, preset
from fc_eval.report.command import override_text

HINTS = {
    "eval": "any other lm-eval task goes in eval.tasks=[name]",
    "model": "any other model: model=local model.path=FOLDER_OR_GGUF",
}
GROUPS = (*SINGLE, "eval")
EXPERIMENT = "experiment"


def compose_one(overrides: Sequence[str]) -> RunConfig:
    """The configuration of one run from overrides as on the command line.

    Raises:
        FcEvalError: an override that composes to nothing sensible.
    """
    return RunConfig.from_mapping(compose_mappings(overrides, sweep=False)[0])


def compose_mappings(overrides: Sequence[str], sweep: bool) -> list[dict[str, Any]]:
    """One mapping per job: several only with `sweep`, which takes every combination of comma-separated values.

    `experiment=NAME` stands for the overrides of `conf/experiment/NAME.yaml`, in front of those given.

    Raises:
        FcEvalError: a command line that cannot be read or composed.
    """
    with _sentences(), _hydra():
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(list(overrides))
        named = [override for override in parsed if override.key_or_group == EXPERIMENT]
        given = [override for override in parsed if override.key_or_group != EXPERIMENT]
        own = [choice for override in named for choice in _experiments(override, sweep)]
        known = frozenset(override.key_or_group for override in given)
        composed: dict[tuple[str, ...], dict[str, Any]] = {}
        jobs = []
        for lines in [_lines(name, known, sweep) for name in own] or [[]]:
            choices = [_choices(override, sweep) for override in [*parser.parse_overrides(lines), *given]]
            jobs += [_compose(parser, list(job), composed) for job in itertools.product(*choices)]
        return jobs


def _experiments(override: Override, sweep: bool) -> list[str]:
    """The names that `experiment=` gives, one or several."""
    names = [each.partition("=")[2] for each in _choices(override, sweep)]
    value = None if override.is_sweep_override() else override.value()
    if value is not None and not isinstance(value, str):
        raise FcEvalError(f"{override.input_line} is not possible: choose by name, {EXPERIMENT}=NAME")
    return names


def _lines(name: str, given: frozenset[str], sweep: bool) -> list[str]:
    """An experiment as overrides, without what the command line gives itself."""
    found = experiment(name)
    lines = [(key, values) for key, values in found.overrides(given)]
    if not sweep and any(len(values) > 1 for _, values in lines):
        raise FcEvalError(f"{EXPERIMENT}={name} is a sweep, which needs -m: fc-eval run -m {EXPERIMENT}={name}")
    return [f"{key}={','.join(map(override_text, values))}" for key, values in lines]


def _choices(override: Override, sweep: bool) -> list[str]:
    """The values of one override, as overrides: one, or as many as its sweep has."""
    line = str(override.input_line)
    if not override.is_sweep_override():
        return [line]
    if not sweep:
        group = override.key_or_group
        together = f"; one run with all of them: '{group}=[{line.partition('=')[2]}]'" if group == "eval" else ""
        raise FcEvalError(
            f"{line} gives several values: a sweep over them needs -m, as in fc-eval run -m {line}{together}"
        )
    if not override.is_discrete_sweep():
        raise FcEvalError(f"{line} has no end of values: expected a list of them, such as a,b or range(1,5)")
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _compose(
    parser: OverridesParser, overrides: list[str], composed: dict[tuple[str, ...], dict[str, Any]]
) -> dict[str, Any]:
    """One job.

    Args:
        parser: Hydra's.
        overrides: of this job, each with one value.
        composed: what was composed before, by overrides: jobs that differ in the name of a comm share it.
    """
    lines: list[str] = []
    comm: dict[str, Any] | None = None
    policy_file: str | None = None
    for override in parser.parse_overrides(overrides):
        _check_group(override)
        value = override.value()
        if override.key_or_group == "comm" and isinstance(value, str) and value not in options("comm"):
            comm = asdict(named_comm(value))  # a name of its own, such as int4-g32-sym: any preset has the same keys
            lines.append("comm=int4")
        elif override.key_or_group == "policy" and isinstance(value, str) and value.endswith((".yaml", ".yml")):
            policy_file = value
        else:
            lines.append(str(override.input_line))
    key = tuple(lines)
    if key not in composed:
        tree = OmegaConf.to_container(hydra.compose("config", lines), resolve=True, throw_on_missing=True)
        assert isinstance(tree, dict)
        composed[key] = {str(key): value for key, value in tree.items()}
    tree = copy.deepcopy(composed[key])
    if comm is not None:
        own = {line.partition("=")[0].lstrip("+") for line in lines}
        tree["comm"] |= {key: value for key, value in comm.items() if f"comm.{key}" not in own}
    if policy_file is not None:
        tree["policy"] = _policy_file(policy_file)
    policy = tree.get("policy")
    if isinstance(policy, dict) and (name := policy.get("name")) in options("policy"):
        rules = preset("policy", name)["rules"]
        policy["name"] = name if policy.get("rules") == rules else CUSTOM  # a name stands for its preset's rules only
    return tree


def _policy_file(path: str) -> Any:
    """A policy of the user's own, as `fc-eval allocate` writes them."""
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise os_error(error, Path(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FcEvalError(f"policy file {path!r} is no YAML ({' '.join(str(error).split())[:120]})") from None


def _check_group(override: Override) -> None:
    """Makes sure that a group is chosen by name; Hydra would let the last of several names win."""
    group, value = override.key_or_group, override.value()
    if group.split("/")[0] == "hydra" or group.startswith("hydra."):
        raise FcEvalError(f"{override.input_line}: Hydra's own settings have no effect here, leave them out")
    if group not in GROUPS or override.is_delete():
        return
    if group in SINGLE and isinstance(value, list):
        each = ",".join(map(str, value))
        raise FcEvalError(
            f"{override.input_line}: a run has one {group}; a run of each is a sweep, fc-eval run -m {group}={each}"
        )
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        several = f" or {group}=[NAME,NAME]" if group not in SINGLE else ""
        raise FcEvalError(f"{override.input_line} is not possible: choose by name, {group}=NAME{several}")


@contextmanager
def _sentences() -> Iterator[None]:
    """Turns what Hydra and OmegaConf raise into one sentence."""
    try:
        yield
    except OverrideParseException as error:
        raise FcEvalError(
            f"{error.override!r} could not be read: expected KEY=VALUE; a value with special characters needs quotes "
            "inside of the shell's, as in \"out='my runs'\""
        ) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(str(error)) from None


def _translate(message: str) -> FcEvalError:
    missing = re.search(r"Could not (?:find|load) '(\w+)/([^']*)'", message)
    if missing:
        group, name = missing.groups()
        return unknown(group, name, options(group), hint=HINTS.get(group, ""))
    refused = re.search(r"Could not override '([^']+)'", message)
    if refused and refused.group(1) not in (known := known_keys()):
        return unknown("key", refused.group(1), known, hint="`fc-eval run --cfg` prints all keys")
    if refused:
        return FcEvalError(
            f"{refused.group(1)} is not part of what was chosen (`fc-eval run --cfg` prints that), or its value has a "
            "key that is not known there"
        )
    if deleted := re.search(r"Could not delete from config\. '([^']+)' does not exist", message):
        key = deleted.group(1)
        return FcEvalError(
            f"~{key} is not possible: {key} is null or not part of what was chosen (`fc-eval run --cfg` prints that), "
            "so there is nothing to leave out"
        )
    if merged := re.search(r"Error merging override (\S+?)=(.*)", message):
        key, value = merged.groups()
        return FcEvalError(
            f"{key}={value} is not possible: the value is of another kind than the one that {key} has "
            "(`fc-eval run --cfg` prints that)"
        )
    return FcEvalError("the command line could not be composed: " + " ".join(message.split()))


def known_keys() -> list[str]:
    """Every key of the default configuration in dotted form, mappings included."""
    with _hydra():
        tree = OmegaConf.to_container(hydra.compose("config"), resolve=True)
    assert isinstance(tree, dict)
    return sorted(_dotted(tree))


def _hydra() -> Any:
    """Hydra at work on `conf/`; it holds its state in a global, so this does not nest."""
    return hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir().resolve()))


def _dotted(tree: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{above}{key}.")
