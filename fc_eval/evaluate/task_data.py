"""Data of lm-eval tasks from the mirror, by one replaced method of lm-eval's task class. Imports nothing of lm-eval."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import dataset_folder, split_files
from fc_eval.evaluate.loading import from_hub, read_split


def mirrored_download(
    original: Callable[..., None], data_root: Path | None, num_fewshot: int, mirrored: list[str]
) -> Callable[..., None]:
    """A method for lm-eval's task class that takes data sets from the mirror, and the rest as `original` does.

    Args:
        original: lm-eval's own `ConfigurableTask.download`, which loads from the Hub or from the task's own files.
        data_root: the mirror, None for none.
        num_fewshot: examples that a prompt will hold.
        mirrored: the folders that were used are appended.

    The method raises:
        FcEvalError: the mirror lacks the config, the split that is evaluated, or the one that examples come from; a
            file cannot be read; or the Hub cannot be reached.
    """

    def download(self: Any, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        config, dataset_id = self.config, self.DATASET_PATH
        if callable(config.process_docs):
            config.process_docs = _once(config.process_docs)
        if callable(config.custom_dataset) or "/" not in str(dataset_id):  # embedded, or files that the task names
            try:
                original(self, dataset_kwargs, **kwargs)
            except FileNotFoundError as error:
                raise FcEvalError(f"task {config.task!r} names data files that are not there: {error}") from None
            return
        folder = dataset_folder(dataset_id, data_root)
        if folder is None or data_root is None:
            from_hub(dataset_id, data_root, lambda: original(self, dataset_kwargs, **kwargs))
            return
        mirrored.append(str(folder))
        files = split_files(dataset_id, self.DATASET_NAME, data_root)
        evaluated = config.test_split or config.validation_split
        if evaluated not in files:
            raise FcEvalError(
                f"task {config.task!r} evaluates the split {evaluated!r}, but {folder} has {', '.join(sorted(files))}"
            )
        shots = config.fewshot_split or config.training_split or config.validation_split or evaluated
        if num_fewshot and shots not in files:
            raise FcEvalError(
                f"task {config.task!r} takes its {num_fewshot} examples from the split {shots!r}, but {folder} has "
                f"{', '.join(sorted(files))}: set num_fewshot=0 or add the split"
            )
        splits = {split: datasets.Dataset.from_dict(read_split(paths).to_pydict()) for split, paths in files.items()}
        # lm-eval opens every split that a task names, even those that it will not use: those are empty here.
        for split in (config.training_split, config.validation_split, config.fewshot_split):
            if split is not None:
                splits.setdefault(split, splits[evaluated].select(range(0)))
        self.dataset = datasets.DatasetDict(splits)

    return download


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A task's `process_docs` that keeps its results: lm-eval calls it for each look at a split, seconds each time."""
    done: dict[int, tuple[Any, Any]] = {}

    def processed(dataset: Any) -> Any:
        if id(dataset) not in done:
            done[id(dataset)] = dataset, process(dataset)  # the data set is kept, so that its id stays its own
        return done[id(dataset)][1]

    return processed
