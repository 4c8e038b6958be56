"""lm-eval tasks on a model object that is already in memory: their data, their run, their numbers.

Nothing of lm-eval's caches is used: its response cache does not know which model answered.
"""

import contextlib
import difflib
import functools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval.api.task
import lm_eval.tasks
import numpy as np
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate as lm_eval_evaluate
from lm_eval.tasks import TaskManager

from fc_eval.errors import FcEvalError, unknown
from fc_eval.evaluate.data import EMBEDDED, EVERYDAY, task_file
from fc_eval.evaluate.loading import loaded_commits
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Progress
from fc_eval.evaluate.samples import sample_row, summarize
from fc_eval.evaluate.scoring_lm import SEEDS, ScoringLM
from fc_eval.evaluate.spec import TaskSpec
from fc_eval.evaluate.task_data import mirrored_download
from fc_eval.evaluate.windows import ids_sha256

# Definitions that can be opened without indexing all of lm-eval's 14,000 tasks, which takes seconds.
_LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
_DEFINITIONS = {
    "piqa": _LM_EVAL_TASKS / "piqa" / "piqa.yaml",
    "arc_easy": _LM_EVAL_TASKS / "arc" / "arc_easy.yaml",
    "arc_challenge": _LM_EVAL_TASKS / "arc" / "arc_challenge.yaml",
    "hellaswag": _LM_EVAL_TASKS / "hellaswag" / "hellaswag.yaml",
    "winogrande": _LM_EVAL_TASKS / "winogrande" / "default.yaml",
    "wikitext": _LM_EVAL_TASKS / "wikitext" / "wikitext.yaml",
    EVERYDAY: EMBEDDED / "everyday.yaml",
}


@functools.cache
def _all_tasks() -> TaskManager:
    return TaskManager(include_path=str(EMBEDDED))


def _load(task: str, data_root: Path | None, num_fewshot: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tasks and groups by name, with their data.

    Raises:
        FcEvalError: an unknown task (with the nearest names), data that are missing or lack a column, or a package
            that the task needs.
    """
    is_file = task.endswith((".yaml", ".yml"))
    if task in _DEFINITIONS and _DEFINITIONS[task].is_file():
        manager, target = TaskManager(include_defaults=False), str(_DEFINITIONS[task])
    elif is_file:
        manager, target = TaskManager(include_defaults=False), str(task_file(task))
    else:
        manager, target = _all_tasks(), task
        if task not in manager.task_index:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3, cutoff=0.5)
            raise unknown("lm-eval task", task, near, hint="`lm-eval ls tasks` lists them")
    mirrored: list[str] = []
    try:
        download = mirrored_download(ConfigurableTask.download, data_root, num_fewshot, mirrored)
        with replaced(ConfigurableTask, "download", download):
            loaded = manager.load([target])
    except ImportError as error:
        raise FcEvalError(f"task {task!r} needs a package that is not installed: {error}") from None
    except FcEvalError:
        raise
    except Exception as error:  # definitions and their templates, which first touch the columns, fail in many ways
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if mirrored:
            raise FcEvalError(
                f"task {task!r} cannot use the data in {mirrored[-1]} ({what}): "
                "expected at least one row, and the columns of the data set that lm-eval's definition names"
            ) from None
        if is_file:
            raise FcEvalError(
                f"task file {task!r} cannot be used ({what}): expected a task as lm-eval defines it"
            ) from None
        raise
    return loaded["tasks"], loaded.get("groups") or {}


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps lm-eval's bars and remarks off the screen: progress is reported by `Progress`."""
    logger, shown = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with replaced(lm_eval.api.task, "tqdm", lambda items, **_: items):
            yield
    finally:
        logger.setLevel(level)
        if not shown:
            datasets.enable_progress_bars()


def _prepare(spec: TaskSpec, data_root: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    tasks, groups = _load(spec.task, data_root, spec.num_fewshot)
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise FcEvalError(
                f"task {name!r} runs generated code or reads images or sound: only text tasks are supported"
            )
        if task.get_config("num_fewshot") == 0 and spec.num_fewshot:
            raise FcEvalError(
                f"task {name!r} is zero-shot by definition: set num_fewshot=0 instead of {spec.num_fewshot}"
            )
        task.set_config("num_fewshot", spec.num_fewshot)
        task.set_fewshot_seed(SEEDS["fewshot"])
    return tasks, groups


class TaskResult(NamedTuple):
    """Metrics by plain name, one row per document, whether these are all documents, and the protocol (JSON-ready)."""

    metrics: dict[str, float | int]
    rows: list[dict[str, Any]]
    complete: bool
    protocol: dict[str, Any]


def run_task(
    model: Any,
    tokenizer: Any,
    spec: TaskSpec,
    *,
    data_root: Path | None,
    add_bos_token: bool,
    batch_size: int,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> TaskResult:
    """Runs one lm-eval task, or a group of tasks, on a causal language model of transformers.

    Raises:
        FcEvalError: an unknown task, missing data, or a task that needs more than text.
    """
    with _quiet():
        random.seed(SEEDS["random"])
        np.random.seed(SEEDS["numpy"])
        torch.manual_seed(SEEDS["torch"])
        tasks, groups = _prepare(spec, data_root)
        lm = ScoringLM(
            model,
            tokenizer=tokenizer,
            backend="causal",
            add_bos_token=add_bos_token,
            batch_size=batch_size,
            progress=progress,
            processes=processes,
        )
        loaded = {
            "tasks": tasks,
            "groups": groups,
            "group_map": {name: group.child_names for name, group in groups.items()},
        }
        results = lm_eval_evaluate(lm=lm, task_dict=loaded, limit=spec.limit, bootstrap_iters=0, log_samples=True)
    rows = [sample_row(sample, name) for name, samples in results["samples"].items() for sample in samples]
    metrics: dict[str, float | int] = {}
    if spec.task in groups:
        metrics = summarize(results["results"][spec.task], rows, group=spec.task)
    elif len(tasks) == 1:
        metrics = summarize(results["results"][next(iter(tasks))], rows)
    else:  # a tag is several tasks without a number of their own
        for name in tasks:
            own = summarize(results["results"][name], [row for row in rows if row["task"] == name])
            metrics |= {f"{name}/{metric}": value for metric, value in own.items()}
    counts = results["n-samples"]
    protocol = {
        "task": spec.task,
        "versions": {name: str(results["versions"].get(name)) for name in tasks},
        "datasets": {name: [task.DATASET_PATH, task.DATASET_NAME] for name, task in tasks.items()},
        "commits": {k: v for task in tasks.values() for k, v in loaded_commits(getattr(task, "dataset", None)).items()},
        "num_fewshot": spec.num_fewshot,
        "documents": {name: counts[name]["effective"] for name in tasks},
        "add_bos_token": add_bos_token,
        "batch_size": batch_size,
        "requests": len(lm.request_ids),
        "truncated_requests": lm.truncated,
        "first_token_ids": lm.request_ids[0][:8],
        "token_ids_sha256": ids_sha256(lm.request_ids),
        "seeds": SEEDS,
    }
    complete = all(counts[name]["effective"] == counts[name]["original"] for name in tasks)
    return TaskResult(metrics, rows, complete, protocol)
