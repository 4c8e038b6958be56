"""Evaluations as data: what a configuration may say, and how Hydra selects it."""

import shutil
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import TASK_DATA
from fc_eval.evaluate.spec import PROTOCOLS, PerplexitySpec, TaskSpec, parse_spec, parse_specs

ROOT = Path(__file__).parents[1]


def test_specs_read_runs_tasks_and_limit():
    specs = parse_specs(
        {
            "w": {"kind": "perplexity", "protocol": "wikitext2", "window_tokens": 128, "limit": 3},
            "p": {"kind": "task", "task": "piqa"},
        },
        ["boolq", {"task": "gsm8k", "num_fewshot": 5}, "my/own_task.yaml"],
        limit=7,
    )
    assert specs == (
        PerplexitySpec("w", "wikitext2", 128, limit=3),
        TaskSpec("p", "piqa", limit=7),
        TaskSpec("boolq", "boolq", limit=7),
        TaskSpec("gsm8k", "gsm8k", 5, limit=7),
        TaskSpec("own_task", "my/own_task.yaml", limit=7),
    )
    assert parse_specs({}) == ()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "tusk", "task": "piqa"}, "did you mean 'task'"),
        ({"task": "piqa"}, "kind of evaluation 'x'"),
        ({"kind": "task"}, "lacks its 'task'"),
        ({"kind": "perplexity"}, "lacks its 'protocol'"),
        ({"kind": "task", "task": ""}, "name of an lm-eval task"),
        ({"kind": "task", "task": "piqa", "num_shots": 3}, "did you mean 'num_fewshot'"),
        ({"kind": "task", "task": "piqa", "num_fewshot": -1}, "at least 0"),
        ({"kind": "task", "task": "piqa", "limit": 0}, "at least 1, or null"),
        ({"kind": "task", "task": "piqa", "limit": 0.5}, "whole number"),
        ({"kind": "perplexity", "protocol": "wikitext"}, "did you mean 'wikitext2'"),
        ({"kind": "perplexity", "protocol": "c4", "window_tokens": 1}, "at least 2"),
        ({"kind": "perplexity", "protocol": "c4", "window_tokens": True}, "whole number"),
        ({"kind": "perplexity", "protocol": "c4", "path": "a.txt"}, "only the protocol 'text' reads a file"),
        ("piqa", "expected a mapping"),
    ],
)
def test_impossible_entries_are_refused(entry, words):
    with pytest.raises(FcEvalError, match=words):
        parse_spec("x", entry)


def test_names_are_safe_and_given_once():
    with pytest.raises(FcEvalError, match="is not possible"):
        TaskSpec("a/b", "piqa")
    with pytest.raises(FcEvalError, match="'piqa' is named twice"):
        parse_specs({"piqa": {"kind": "task", "task": "piqa"}}, ["piqa"])
    with pytest.raises(FcEvalError, match=r"eval.tasks=\[piqa\]"):
        parse_specs({}, "piqa")


def test_every_file_of_the_eval_group_is_a_valid_evaluation_of_its_own_name():
    files = sorted((ROOT / "conf" / "eval").glob("*.yaml"))
    trees = {path.stem: yaml.safe_load(path.read_text()) for path in files}
    groups = [name for name, tree in trees.items() if "defaults" in tree]
    assert groups == ["commonsense", "wikitext2_lengths", "window_lengths"]
    assert {name for group in groups for name in trees[group]["defaults"]} <= set(trees)
    runs = {name: tree["runs"] for name, tree in trees.items() if name not in groups}
    assert all(list(run) == [name] for name, run in runs.items())
    specs = {name: parse_specs(run)[0] for name, run in runs.items()}
    assert {spec.protocol for spec in specs.values() if isinstance(spec, PerplexitySpec)} == set(PROTOCOLS)
    assert {spec.task for spec in specs.values() if isinstance(spec, TaskSpec)} == {*TASK_DATA, "everyday"}
    assert all(path.read_text().startswith("# @package eval\n") for path in files)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["text", "everyday"]),
        (["eval=wikitext2"], ["wikitext2"]),
        (["eval=[wikitext2,arc_easy]"], ["wikitext2", "arc_easy"]),
        (["eval=[text,commonsense]"], ["text", "piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande"]),
        (["+eval@eval=piqa"], ["text", "everyday", "piqa"]),
    ],
)
def test_hydra_selects_evaluations(tmp_path, overrides, names):
    shutil.copytree(ROOT / "conf" / "eval", tmp_path / "eval")
    (tmp_path / "main.yaml").write_text("defaults:\n  - eval: [text, everyday]\n  - _self_\neval:\n  limit: null\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("main", overrides=[*overrides, "eval.limit=3"])
    assert list(config.eval.runs) == names
    assert {spec.limit for spec in parse_specs(config.eval.runs, (), config.eval.limit)} == {3}
