"""The model for lm-eval's own command line: wrong arguments are one sentence, data come from the mirror."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from fc_eval import lm_eval_model
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.tasks import _DEFINITIONS
from fc_eval.lm_eval_model import CommunicatingLM, RequestBar
from fc_eval.models.tiny import byte_tokenizer

GOOD = {"pretrained": "/nowhere/model", "add_bos_token": False}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pretrained": None}, r"say pretrained=FOLDER \(or a Hub id\)"),
        ({"comm": "int44"}, "unknown comm 'int44': did you mean 'int4'"),
        ({"comm": 4}, "unknown comm '4'"),
        ({"tp": "four"}, "tp='four' is not possible: expected a whole number"),
        ({"tp": 0}, "tp=0 is not possible"),
        ({"tp": 2.5}, "tp=2.5 is not possible"),
        ({"tp": True}, "tp=True is not possible"),
        ({"codec": "cpuu"}, "unknown codec 'cpuu': did you mean 'cpu'"),
        ({"add_bos_token": None}, "say add_bos_token=True or add_bos_token=False"),
        ({"add_bos_token": "maybe"}, r"say add_bos_token=True .*, not 'maybe'"),
        ({"data_root": "/nowhere/data"}, "data_root=/nowhere/data is not a folder"),
        ({"dtpye": "bfloat16"}, "unknown argument in --model_args: 'dtpye': did you mean 'dtype'"),
        ({"com": "int4"}, "unknown argument in --model_args: 'com': did you mean 'comm'"),
        ({}, "pretrained=/nowhere/model cannot be loaded"),
    ],
)
def test_wrong_arguments_are_one_sentence(monkeypatch, arguments, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FcEvalError, match=words) as caught:
        CommunicatingLM(**(GOOD | arguments))
    assert "\n" not in str(caught.value)


def test_a_folder_of_an_unknown_architecture_is_one_sentence(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "notamodel"}))
    with pytest.raises(FcEvalError, match=r"cannot be loaded: .*notamodel"):
        CommunicatingLM(str(checkpoint), add_bos_token=False)


def test_the_command_line_says_the_sentence_and_exits_with_2(monkeypatch, capsys):
    arguments = "run --model fc_eval --tasks piqa --model_args pretrained=/nowhere,comm=int44,add_bos_token=False"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments.split()])
    monkeypatch.setattr(
        "lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks", lambda *_: TaskManager(include_defaults=False)
    )
    assert lm_eval_model.main() == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: unknown comm 'int44': did you mean")


def test_tasks_read_the_mirror_until_the_model_is_closed(tiny, tmp_path):
    rows = [{"goal": f"Goal {i}", "sol1": "do this", "sol2": "do that instead", "label": i % 2} for i in range(5)]
    (tmp_path / "baber/piqa").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "baber/piqa/validation.parquet")
    original, seen = ConfigurableTask.download, []
    lm = CommunicatingLM(
        tiny,
        comm="ring_int4",
        tp=2,
        codec="reference",
        tokenizer=byte_tokenizer(),
        add_bos_token=False,
        batch_size=4,
        data_root=str(tmp_path),
        progress=lambda done, total: seen.append((done, total)),
    )
    try:
        found = simple_evaluate(
            lm, tasks=[str(_DEFINITIONS["piqa"])], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
        )
    finally:
        lm.close()
    assert found["n-samples"]["piqa"]["original"] == 5
    assert seen[-1] == (10, 10)  # two answers a question
    assert ConfigurableTask.download is original


def test_the_bar_counts_every_kind_of_request(capsys):
    bar = RequestBar()
    for done, total in ((4, 10), (10, 10), (1, 3), (3, 3)):
        bar(done, total)
    text = capsys.readouterr().err
    assert "10/10" in text
    assert "3/3" in text
