"""The command line that repeats a recorded run: its configuration, written as what differs from the defaults."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from fc_eval.presets import options, preset, root_defaults

# Text that Hydra reads back as text without quotes.
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_TEXT = frozenset({"null", "true", "false", "nan", "inf"})
_NO_PRESET = "local", "custom"  # of models, of policies

Tree = Mapping[str, Any]


def rerun_command(settings: Tree) -> str:
    """A command for a shell; composed, it gives the same configuration again, but for the number of processes.

    Args:
        settings: the configuration as a run records it (`RunConfig.as_dict`).
    """
    known = {"model", "comm", "policy", "policy_name", "tp", "eval", "data_root"}
    known.add("processes")  # as many as there are GPUs: it changes no number
    defaults = root_defaults()
    parts = [*_model(settings["model"]), *_comm(settings["comm"])]
    parts += _policy(settings["policy"], settings["policy_name"])
    parts.append(f"tp={override_text(settings['tp'])}")
    parts += _differences("", {k: v for k, v in settings.items() if k not in known}, defaults)
    parts += _evals(settings["eval"]["specs"])
    parts += _differences("eval.", {k: v for k, v in settings["eval"].items() if k != "specs"}, defaults["eval"])
    if settings["data_root"] is not None:
        parts.append(f"data.root={override_text(settings['data_root'])}")
    return " ".join(["fc-eval run", *map(shlex.quote, parts)])


def _model(model: Tree) -> Iterator[str]:
    name = model["name"]
    known = name in options("model")
    yield f"model={name if known else _NO_PRESET[0]}"
    yield from _differences("model.", model, preset("model", name if known else _NO_PRESET[0]))


def _comm(comm: Tree) -> list[str]:
    """The preset that leaves the least to be said."""

    def said(name: str) -> list[str]:
        return [f"comm={name}", *_differences("comm.", comm, preset("comm", name))]

    base = str(comm["reduce"]).partition("-")[0]
    return said(min(options("comm"), key=lambda name: (len(said(name)), preset("comm", name)["reduce"] != base, name)))


def _policy(rules: Sequence[Sequence[str]], name: str) -> Iterator[str]:
    entries = [{"match": match, "comm": comm} for match, comm in rules]
    if name in options("policy") and preset("policy", name)["rules"] == entries:
        if entries:
            yield f"policy={name}"
        return
    yield f"policy.rules={override_text(entries)}"
    if name != _NO_PRESET[1]:
        yield f"policy.name={override_text(name)}"


def _evals(specs: Sequence[Tree]) -> Iterator[str]:
    """Presets by name, then entries of `eval.runs`, then tasks: the order that Hydra gives them, too."""
    presets = list(takewhile(_is_preset, specs))
    tasks = list(takewhile(lambda spec: spec["kind"] == "task", reversed(specs[len(presets) :])))[::-1]
    between = specs[len(presets) : len(specs) - len(tasks)]
    limits = {spec["limit"] for spec in specs}
    shared = limits.pop() if len(limits) == 1 else None  # eval.limit holds for all that have none of their own
    yield f"eval=[{','.join(spec['name'] for spec in presets)}]"
    for spec in presets:
        own = {key: value for key, value in spec.items() if key != "name" and (key, value) != ("limit", shared)}
        yield from _differences(f"eval.runs.{spec['name']}.", own, preset("eval", spec["name"])["runs"][spec["name"]])
    if between:
        yield f"+eval.runs={override_text({spec['name']: _entry(spec, shared, without=('name',)) for spec in between})}"
    if tasks:
        yield f"eval.tasks={override_text([_task(spec, shared) for spec in tasks])}"
    if shared is not None:
        yield f"eval.limit={shared}"


def _is_preset(spec: Tree) -> bool:
    """Whether `conf/eval` has an evaluation of this name and kind."""
    entry = preset("eval", spec["name"]).get("runs", {}).get(spec["name"]) if spec["name"] in options("eval") else None
    return entry is not None and entry["kind"] == spec["kind"]


def _entry(spec: Tree, shared: int | None, without: Sequence[str]) -> dict[str, Any]:
    """What an evaluation says of itself that is no default."""
    return {
        key: value
        for key, value in spec.items()
        if key not in without and value is not None and (key, value) not in (("limit", shared), ("num_fewshot", 0))
    }


def _task(spec: Tree, shared: int | None) -> str | dict[str, Any]:
    """A task as an entry of `eval.tasks`: its name alone where that says all."""
    entry = _entry(spec, shared, without=("kind",))
    return str(spec["task"]) if entry == {"name": spec["task"], "task": spec["task"]} else entry


def _differences(above: str, given: Tree, defaults: Tree) -> Iterator[str]:
    """Overrides for whatever is not as in the defaults; a key that these lack is null there."""
    for key, value in given.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _differences(f"{above}{key}.", value, default)
        elif value != default:
            yield f"{'' if key in defaults else '+'}{above}{key}={override_text(value)}"


def override_text(value: Any) -> str:
    """A value in Hydra's grammar, as it stands behind KEY=."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{override_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(override_text, value)) + "]"
    if not isinstance(value, str):
        return repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    value = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)  # no interpolation
    # A backslash means itself unless a quote follows, be it the closing one.
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (r"\"" if found[2] else ""), value)
    return f'"{escaped}"'
