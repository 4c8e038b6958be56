"""`fc-eval run`: Hydra composes each job of a sweep, `sweep.execute` carries it out in a child process."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError, unknown
from fc_eval.results.store import RunStore
from fc_eval.sweep import Outcome, execute, summarize

HINTS = {
    "comm": "formats with suffixes go in comm.reduce=... and comm.gather=..., and comm.group_size=32 sets both",
    "eval": "any other lm-eval task goes in eval.tasks=[name]",
    "model": "any other model: model=local model.path=FOLDER_OR_GGUF",
}


def conf_dir() -> Path:
    """The configuration folder: beside the package in a source tree, inside it once installed."""
    installed = Path(__file__).parent / "conf"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "conf"


def options(group: str) -> list[str]:
    """Names of the choices of a configuration group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def run(overrides: Sequence[str]) -> int:
    """Composes and runs every job of a command line.

    Returns:
        0 when all runs are done, 1 when one failed.

    Raises:
        FcEvalError: a command line that composes to nothing sensible.
    """
    outcomes: list[Outcome] = []
    mistakes: list[str] = []

    def job(cfg: DictConfig) -> None:
        if (mistakes or any(o.state == "failed" for o in outcomes)) and cfg.fail_fast is True:
            return
        try:
            for key in ("dry_run", "fail_fast"):
                if not isinstance(cfg[key], bool):
                    raise FcEvalError(f"{key}={cfg[key]!r} is not possible: expected true or false")
            store = RunStore(Path(cfg.out))
            store.prepare()
            mapping = OmegaConf.to_container(cfg, resolve=True)
            assert isinstance(mapping, dict)
            config = RunConfig.from_mapping({str(key): value for key, value in mapping.items()})
            outcomes.extend(execute(config, store, dry_run=cfg.dry_run))
        except FcEvalError as error:
            mistakes.append(str(error))
            print(f"error: {error}", file=sys.stderr)

    compose(job, overrides)
    if not outcomes and not mistakes:
        return 0  # Hydra printed what was asked for (--help, --cfg, ...)
    if not outcomes:
        return 2
    status = summarize(outcomes)
    for mistake in mistakes:
        print(f"not run: {mistake}")
    _print_table(outcomes)
    return 2 if mistakes and not status else status


def compose_one(overrides: Sequence[str]) -> RunConfig:
    """The configuration of one run from overrides as on the command line, for tools beside `fc-eval run`.

    Raises:
        FcEvalError: an override that composes to nothing sensible.
    """
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf_dir().resolve())):
            mapping = OmegaConf.to_container(hydra.compose("config", list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(str(error)) from None
    assert isinstance(mapping, dict)
    return RunConfig.from_mapping({str(key): value for key, value in mapping.items()})


def compose(job: Any, overrides: Sequence[str]) -> None:
    """Lets Hydra compose the overrides and call `job` once per combination; its errors become one sentence."""
    decorated = hydra.main(version_base="1.3", config_path=str(conf_dir().resolve()), config_name="config")(job)
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["fc-eval run", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra prints and exits by itself
    try:
        decorated()
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(str(error)) from None
    except OSError as error:
        raise FcEvalError(
            f"out={error.filename} is not writable ({error.strerror}): choose another folder with out=DIR"
        ) from None
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _translate(message: str) -> FcEvalError:
    missing = re.search(r"Could not (?:find|load) '([\w]+)/([^']*)'", message)
    if missing:
        group, name = missing.groups()
        return unknown(group, name, options(group), hint=HINTS.get(group, ""))
    if re.search(r"Could not override '(experiment|exec|[\w.@/]+)'", message):
        key = re.search(r"Could not override '([^']+)'", message)
        assert key is not None
        return unknown("key", key.group(1), _keys(), hint="`fc-eval run --cfg job` prints all keys")
    return FcEvalError("the command line could not be read: " + " ".join(message.split()))


def _keys() -> list[str]:
    tree = OmegaConf.load(conf_dir() / "config.yaml")
    keys = ["model", "comm", "policy", "eval", "comm.algorithm", "comm.reduce", "comm.gather", "comm.group_size"]
    keys += ["comm.node_size", "model.path", "model.dtype", "model.add_bos_token", "model.attn_implementation"]
    assert isinstance(tree, DictConfig)
    for name, value in tree.items():
        key = str(name)
        if key not in ("defaults", "hydra"):
            keys += [f"{key}.{inner!s}" for inner in value] if isinstance(value, DictConfig) else [key]
    return keys


def _print_table(outcomes: list[Outcome]) -> None:
    from fc_eval.report.terminal import terminal_table
    from fc_eval.results.record import load_run

    folders = {o.folder.path: o.folder for o in outcomes if o.state in ("done", "skipped")}
    if folders:
        print()
        print(terminal_table([load_run(path) for path in folders]))
