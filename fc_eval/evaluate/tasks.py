"""lm-eval tasks on a model object that is already in memory. The one file of this package that imports lm-eval.

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
import jinja2
import lm_eval.api.task
import lm_eval.tasks
import numpy as np
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate as lm_eval_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fc_eval.errors import FcEvalError, unknown
from fc_eval.evaluate.continuations import score_continuations
from fc_eval.evaluate.data import EMBEDDED, EVERYDAY, task_file
from fc_eval.evaluate.loading import loaded_commits
from fc_eval.evaluate.progress import Progress, Ticker
from fc_eval.evaluate.samples import sample_row, summarize
from fc_eval.evaluate.spec import TaskSpec
from fc_eval.evaluate.task_data import mirrored_download
from fc_eval.evaluate.windows import bos_id, encode, ids_sha256

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
# lm-eval's own default seeds; they decide which few-shot examples are drawn.
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}


class ScoringLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """`HFLM` with explicit BOS and log-likelihoods in fp32.

    `HFLM` takes the log-softmax in the model's dtype: in bf16 a log-likelihood of -50 then has steps of 0.25, more
    than most of the effects that are measured here.
    """

    def __init__(
        self, pretrained: Any, *, add_bos_token: bool, progress: Progress | None = None, **kwargs: Any
    ) -> None:
        self._progress = progress
        self.request_ids: list[list[int]] = []
        self.truncated = 0
        super().__init__(pretrained=pretrained, add_bos_token=add_bos_token, **kwargs)
        bos_id(self.tokenizer, add_bos_token)
        if not isinstance(self.batch_size, int):
            raise FcEvalError(f"batch_size={self.batch_size!r} is not a whole number: it must be the same in all runs")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Token ids with one BOS in front, or none; the tokenizer's own default has no say."""
        ids = encode(self.tokenizer, string, self.add_bos_token if add_special_tokens is None else add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Left-padded token ids [B, T] int64 and their attention mask, encoded as `tok_encode` does."""
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        width = max(map(len, rows))
        ids = torch.tensor([[self.tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids, mask

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation, and whether greedy decoding would give it."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole documents, one after the other."""
        ticker = Ticker(self._progress, len(requests))
        sums: list[float] = []
        for request in requests:
            sums += super().loglikelihood_rolling([request], disable_tqdm=True)
            ticker.advance(1)
        return sums

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Scores (text, context ids, continuation ids) in fp32."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        self.request_ids += [context + continuation for context, continuation in pairs]
        self.truncated += sum(len(ids) - 1 > self.max_length for ids in self.request_ids[-len(pairs) :])
        # The text is None for windows of one long document: those run one at a time, and the caller counts them.
        rolling = requests[0][0] is None
        return score_continuations(
            self.model,
            pairs,
            batch_size=1 if rolling else self.batch_size,
            max_tokens=self.max_length,
            ticker=Ticker(None if rolling else self._progress, len(pairs)),
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generated text of each request."""
        self.request_ids += [self.tok_encode(request.args[0]) for request in requests]
        self._ticker = Ticker(self._progress, len(requests))
        texts: list[str] = super().generate_until(requests, disable_tqdm=True)
        return texts

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids: torch.Tensor = super()._model_generate(context, *args, **kwargs)
        self._ticker.advance(len(context))
        return ids


@functools.cache
def _all_tasks() -> TaskManager:
    return TaskManager(include_path=str(EMBEDDED))


def _load(task: str, data_root: Path | None, num_fewshot: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tasks and groups by name, with their data.

    Raises:
        FcEvalError: an unknown task (with the nearest names), data that are missing or lack a column, or a package
            that the task needs.
    """
    if task in _DEFINITIONS and _DEFINITIONS[task].is_file():
        manager, target = TaskManager(include_defaults=False), str(_DEFINITIONS[task])
    elif task.endswith((".yaml", ".yml")):
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
    except (LookupError, ValueError, TypeError, AttributeError, jinja2.UndefinedError) as error:
        if isinstance(error, FcEvalError) or not mirrored:
            raise
        # Columns are first touched by the task's own templates, which fail in many ways.
        raise FcEvalError(
            f"task {task!r} cannot use the data in {mirrored[-1]} ({type(error).__name__}: {error}): "
            "expected at least one row, and the columns of the data set that lm-eval's definition names"
        ) from None
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
