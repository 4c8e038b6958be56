"""Loads the items of the task `everyday` for lm-eval, which calls `load` by its name in everyday.yaml."""

import json
from pathlib import Path
from typing import Any

import datasets


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """The items as lm-eval wants them: columns `id`, `topic`, `context`, `choices` (2 to 4), `gold` (an index)."""
    text = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8")
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in text.splitlines()])}
