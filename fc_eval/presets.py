"""The configuration folder `conf/`: where it lies, which choices it offers, and what each of them says."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

# Groups of which there is exactly one choice; of `eval` a run has any number.
SINGLE = ("model", "comm", "policy", "launcher")


@cache
def conf_dir() -> Path:
    """The configuration folder: beside the package in a source tree, inside it once installed."""
    installed = Path(__file__).parent / "conf"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "conf"


@cache
def options(group: str) -> tuple[str, ...]:
    """Names of the choices of a configuration group, sorted."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


@cache
def preset(group: str, name: str) -> dict[str, Any]:
    """What one choice of a group says, without Hydra's `defaults`; not to be changed by the caller."""
    return _read(conf_dir() / group / f"{name}.yaml")


@cache
def evaluations(choice: str) -> tuple[str, ...]:
    """Names of the evaluations that a choice of `eval` stands for: its own, or those of the choices that it lists."""
    tree = yaml.safe_load((conf_dir() / "eval" / f"{choice}.yaml").read_text(encoding="utf-8"))
    return (*(name for each in tree.get("defaults", []) for name in evaluations(each)), *tree.get("runs", {}))


@cache
def root_defaults() -> dict[str, Any]:
    """The keys outside of the groups, with their defaults; not to be changed by the caller."""
    return _read(conf_dir() / "config.yaml")


def _read(file: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {key: value for key, value in tree.items() if key != "defaults"}
