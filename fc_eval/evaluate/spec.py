"""What one evaluation is, as frozen data: a `WindowSpec` over a text, or a `TaskSpec`. No tensors, no data sets."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, ClassVar

from fc_eval.errors import FcEvalError, unknown

# The perplexity protocols of docs and papers; `windows.py` says how each cuts its text.
PROTOCOLS = ("wikitext2", "c4", "c4_new", "text")

# What the papers use; a text that is cut into others says so in its label.
WINDOW_TOKENS = 2048

# Names become file names in a run folder (windows_NAME.npz, samples_NAME.jsonl).
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise FcEvalError(f"evaluation name {name!r} is not possible: expected letters, digits, '_', '-', '+' and '.'")


def _check_count(name: str, key: str, value: Any, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        rest = ", or null for all" if optional else ""
        raise FcEvalError(f"{key}={value!r} of evaluation {name!r}: expected a whole number, at least {least}{rest}")


@dataclass(frozen=True)
class WindowSpec:
    """Windows of fixed length over a text: what perplexity and layer errors have in common.

    Attributes:
        name: its name in records and reports.
        protocol: one of `PROTOCOLS`.
        window_tokens: tokens per window.
        path: `text` only: a local UTF-8 file, None for the embedded text.
        limit: at most so many windows, None for all of the protocol.

    Raises:
        FcEvalError: a value that is not possible.
    """

    kind: ClassVar[str]

    name: str
    protocol: str
    window_tokens: int = WINDOW_TOKENS
    path: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.protocol not in PROTOCOLS:
            raise unknown("perplexity protocol", str(self.protocol), PROTOCOLS)
        _check_count(self.name, "window_tokens", self.window_tokens, 2)
        _check_count(self.name, "limit", self.limit, 1, optional=True)
        if self.path is not None and not isinstance(self.path, str):
            raise FcEvalError(f"path={self.path!r} of evaluation {self.name!r}: expected text, or null")
        if self.path is not None and self.protocol != "text":
            raise FcEvalError(f"path={self.path!r} of evaluation {self.name!r}: only the protocol 'text' reads a file")


@dataclass(frozen=True)
class PerplexitySpec(WindowSpec):
    """Perplexity: of each window, all tokens but the first are predicted."""

    kind: ClassVar[str] = "perplexity"


@dataclass(frozen=True)
class LayerErrorSpec(WindowSpec):
    """What quantized communication does to the output of each row-parallel layer.

    Attributes:
        stages: also lets each stage of the all-reduce quantize alone through the whole model, which takes a forward
            pass more for each.
    """

    kind: ClassVar[str] = "layer_error"

    stages: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stages, bool):
            raise FcEvalError(f"stages={self.stages!r} of evaluation {self.name!r}: expected true or false")


@dataclass(frozen=True)
class TaskSpec:
    """One lm-eval task (or group of tasks).

    Attributes:
        name: its name in records and reports.
        task: the task's name in lm-eval, `everyday` (embedded), or the path of a task's YAML file.
        num_fewshot: examples in the prompt.
        limit: at most so many documents of each task, None for all.

    Raises:
        FcEvalError: a value that is not possible. Whether the task exists is known only once lm-eval is loaded.
    """

    kind: ClassVar[str] = "task"

    name: str
    task: str
    num_fewshot: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.task, str) or not self.task:
            raise FcEvalError(f"task={self.task!r} of evaluation {self.name!r}: expected the name of an lm-eval task")
        _check_count(self.name, "num_fewshot", self.num_fewshot, 0)
        _check_count(self.name, "limit", self.limit, 1, optional=True)


EvalSpec = PerplexitySpec | LayerErrorSpec | TaskSpec
KINDS: dict[str, type[PerplexitySpec] | type[LayerErrorSpec] | type[TaskSpec]] = {
    kind.kind: kind for kind in (PerplexitySpec, LayerErrorSpec, TaskSpec)
}


def parse_spec(name: str, entry: Mapping[str, Any]) -> EvalSpec:
    """Reads one entry of `eval.runs`: `{kind: perplexity | layer_error | task, ...}` with the fields of the spec.

    Raises:
        FcEvalError: an unknown kind or key (with the nearest names), a missing key, an impossible value.
    """
    if not isinstance(entry, Mapping):
        raise FcEvalError(f"evaluation {name!r} is {entry!r}: expected a mapping such as {{kind: task, task: piqa}}")
    values = dict(entry)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown(f"kind of evaluation {name!r}:", str(kind), KINDS)
    known = [field.name for field in fields(KINDS[kind]) if field.name != "name"]
    for key in values:
        if key not in known:
            raise unknown(f"key of evaluation {name!r}:", str(key), known)
    required = "protocol" if issubclass(KINDS[kind], WindowSpec) else "task"
    if required not in values:
        raise FcEvalError(f"evaluation {name!r} of kind {kind!r} lacks its {required!r}")
    return KINDS[kind](name, **values)


def _parse_task(entry: str | Mapping[str, Any]) -> TaskSpec:
    values = dict(entry) if isinstance(entry, Mapping) else {"task": entry}
    task = str(values.get("task"))
    name = values.pop("name", None) or (PurePath(task).stem if task.endswith((".yaml", ".yml")) else task)
    spec = parse_spec(str(name), {"kind": "task", **values})
    assert isinstance(spec, TaskSpec)
    return spec


def parse_specs(
    runs: Mapping[str, Mapping[str, Any]],
    tasks: Iterable[str | Mapping[str, Any]] = (),
    limit: int | None = None,
) -> tuple[EvalSpec, ...]:
    """The evaluations of one run, in the order given.

    Args:
        runs: `eval.runs`, entries by name.
        tasks: `eval.tasks`, further lm-eval tasks: names, or mappings with the fields of `TaskSpec`.
        limit: `eval.limit`, for every evaluation without a limit of its own.

    Raises:
        FcEvalError: as `parse_spec`, or a name given twice.
    """
    if not isinstance(runs, Mapping):
        raise FcEvalError(f"eval.runs={runs!r} is not possible: expected evaluations by name")
    if isinstance(tasks, str):
        raise FcEvalError(f"eval.tasks={tasks!r} is one string: expected a list, as in eval.tasks=[{tasks}]")
    if not isinstance(tasks, Iterable) or isinstance(tasks, Mapping):
        raise FcEvalError(f"eval.tasks={tasks!r} is not possible: expected a list of lm-eval tasks, as in [boolq]")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise FcEvalError(f"eval.limit={limit!r} is not possible: expected a whole number, at least 1, or null for all")
    specs = [*(parse_spec(name, entry) for name, entry in runs.items()), *(_parse_task(entry) for entry in tasks)]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise FcEvalError(f"evaluation {spec.name!r} is named twice: name it once, in eval or in eval.tasks")
        seen.add(spec.name)
    if limit is None:
        return tuple(specs)
    return tuple(spec if spec.limit is not None else replace(spec, limit=limit) for spec in specs)
