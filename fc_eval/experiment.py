"""An experiment: one table or figure of a paper as a file, `conf/experiment/NAME.yaml`. No tensor library.

The file holds what an `fc-eval run -m` would say (`run`: keys with one value; `sweep`: keys with several) and what a
reader of the numbers must know. It is no part of a run: a run does not know for which experiment it was computed, so
several experiments share it, and a report finds the runs of an experiment by their comm, policy and evaluations.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.errors import FcEvalError, unknown
from fc_eval.presets import evaluations, options, preset
from fc_eval.settings import build, checked_mapping

# What a report may show of an experiment beside its table of runs.
_PLOTS = ("bits", "accuracy_bits", "group_size", "grid", "forest", "tp", "context", "layers")
SHOWS = (*_PLOTS, "pareto", "budget", "equal", "cost")
UNIFORM = "uniform"


@dataclass(frozen=True)
class Published:
    """One published number.

    Attributes:
        model: name of the model preset.
        eval: evaluation, or 'five-task average'.
        value: perplexity, or accuracy in percent.
        comm: comm by name.
        weights: how the model's weights were stored.
        source: where it stands; None for the experiment's own source.
    """

    model: str
    eval: str
    value: float
    comm: str = BASELINE.name
    weights: str = "native"
    source: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One file of `conf/experiment`.

    Attributes:
        name: of the file.
        title: a heading.
        source: paper, table or figure.
        asks: the question.
        fixed: what the paper fixed.
        ours: what it left open, by setting: our choice and the reason.
        run: keys with one value, as on the command line.
        sweep: keys with several; comms with braces expanded.
        finding: what the paper found, in words.
        shows: plots and tables of the report's section, of `SHOWS`.
        published: numbers to put beside ours.

    Raises:
        FcEvalError: an unknown comm or entry of `shows`, a sweep without comms, or no evaluation.
    """

    name: str
    title: str
    source: str
    asks: str
    fixed: str
    ours: Mapping[str, str]
    run: Mapping[str, Any]
    sweep: Mapping[str, tuple[Any, ...]]
    finding: str
    shows: tuple[str, ...]
    published: tuple[Published, ...] = field(default=())

    def __post_init__(self) -> None:
        for entry in self.shows:
            if entry not in SHOWS:
                raise unknown(f"entry of shows in experiment {self.name}:", entry, SHOWS)
        if not self.sweep.get("comm"):
            raise FcEvalError(f"experiment {self.name} sweeps over no comm: give it sweep.comm=[...]")
        if "eval" not in self.run:
            raise FcEvalError(f"experiment {self.name} evaluates nothing: give it run.eval=[...]")
        for comm in [*self.sweep["comm"], *(row.comm for row in self.published)]:
            parse_comm(comm)

    @property
    def comms(self) -> tuple[str, ...]:
        """Full names of the comms that it compares, the baseline left out."""
        names = (parse_comm(comm).name for comm in self.sweep["comm"])
        return tuple(name for name in dict.fromkeys(names) if name != BASELINE.name)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that it compares."""
        return tuple(self.sweep.get("policy", (self.run.get("policy", UNIFORM),)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its tensor-parallel sizes; none where that is left to the command line."""
        return tuple(self.sweep.get("tp", (self.run["tp"],) if "tp" in self.run else ()))

    @property
    def weights(self) -> str | None:
        """How it stores the model's weights; None where that is left to the command line."""
        weights = self.run.get("model.weights")
        return None if weights is None else str(weights)

    @property
    def evals(self) -> tuple[str, ...]:
        """Names of its evaluations, groups of them resolved."""
        chosen = self.run["eval"]
        return tuple(name for each in ([chosen] if isinstance(chosen, str) else chosen) for name in evaluations(each))

    def overrides(self, given: frozenset[str] = frozenset()) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Keys and values in front of a command line's; a key that this gives, and those below it, are left to it.

        A model that is chosen by name leaves the experiment its keys below `model`: how weights are stored.

        Args:
            given: keys that the command line gives.
        """
        for key, values in {**{key: (value,) for key, value in self.run.items()}, **self.sweep}.items():
            bare = key.lstrip("+")
            if not any(bare == other or (bare.startswith(f"{other}.") and other != "model") for other in given):
                yield key, values


@cache
def experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        FcEvalError: there is none (with the nearest names), or its file says something that is not possible.
    """
    if name not in options("experiment"):
        raise unknown("experiment", name, options("experiment"), hint="`fc-eval run --help` lists them")
    tree = dict(preset("experiment", name))
    tree["sweep"] = {key: _values(name, key, values) for key, values in tree.get("sweep", {}).items()}
    tree["published"] = tuple(build(f"{name}.published", Published, row) for row in tree.get("published", []))
    tree["shows"] = tuple(tree.get("shows", ()))
    for key in ("title", "source", "asks", "fixed", "finding"):
        tree[key] = " ".join(str(tree.get(key, "")).split())
    known = ("title", "source", "asks", "fixed", "ours", "run", "sweep", "finding", "shows", "published")
    return Experiment(name=name, **checked_mapping(name, tree, known, known))


def _values(name: str, key: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise FcEvalError(f"sweep.{key}={values!r} of experiment {name} is not possible: expected a list")
    return tuple(dict.fromkeys(one for value in values for one in (braces(value) if key == "comm" else [value])))


def braces(text: str) -> list[str]:
    """Every text that a shell's braces stand for.

    >>> braces("int{8,4}-g32{,-sym}")
    ['int8-g32', 'int8-g32-sym', 'int4-g32', 'int4-g32-sym']
    """
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        return [text]
    before, after = text[: found.start()], text[found.end() :]
    return [whole for choice in found.group(1).split(",") for whole in braces(before + choice + after)]
