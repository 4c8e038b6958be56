"""lm-eval on a model object: the same answers as lm-eval's own model, data from the mirror, errors in one sentence."""

import json
import logging
import math
import statistics
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from fc_eval.errors import FcEvalError
from fc_eval.evaluate import tasks
from fc_eval.evaluate.data import EMBEDDED
from fc_eval.evaluate.run import evaluate
from fc_eval.evaluate.samples import plain, summarize
from fc_eval.evaluate.spec import TaskSpec
from fc_eval.evaluate.tasks import run_task
from fc_eval.evaluate.windows import ids_sha256
from fc_eval.models.tiny import byte_tokenizer

HUB = Path(__file__).parents[2] / "shared" / "data" / "hub"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def root(tmp_path):
    piqa = [{"goal": f"Goal {i}", "sol1": "do this", "sol2": "do that instead", "label": i % 2} for i in range(5)]
    write(tmp_path / "baber/piqa/validation.parquet", piqa)
    arc = [
        {
            "id": str(i),
            "question": f"Question {i}?",
            "choices": {"text": ["red", "green", "dark blue"], "label": ["A", "B", "C"]},
            "answerKey": "ABC"[i % 3],
        }
        for i in range(4)
    ]
    write(tmp_path / "allenai/ai2_arc/ARC-Easy/test.parquet", arc)
    write(
        tmp_path / "EleutherAI/wikitext_document_level/wikitext-2-raw-v1/test.parquet",
        [{"page": " = A = \n Some words here ."}],
    )
    return tmp_path


def run(model, tokenizer, task, root, bos=False, batch_size=4, progress=None, **fields):
    spec = TaskSpec("x", str(task), **fields)
    return run_task(model, tokenizer, spec, data_root=root, add_bos_token=bos, batch_size=batch_size, progress=progress)


# -- tasks --------------------------------------------------------------------------------------------------------


def test_multiple_choice_is_accounted_for_document_by_document(tiny, tokenizer, root):
    seen = []
    found = run(tiny, tokenizer, "arc_easy", root, progress=lambda *x: seen.append(x))
    assert [row["doc_id"] for row in found.rows] == [0, 1, 2, 3]
    assert [row["target"] for row in found.rows] == [0, 1, 2, 0]
    lengths = np.array([3, 5, 9])
    for row in found.rows:
        scores = np.array(row["choice_logprobs"])
        assert row["acc"] == (scores.argmax() == row["target"])
        assert row["acc_norm"] == ((scores / lengths).argmax() == row["target"])
        assert len(row["doc_hash"]) == 64
    values = [row["acc"] for row in found.rows]
    assert found.metrics["acc"] == statistics.mean(values)
    assert found.metrics["acc_stderr"] == statistics.stdev(values) / 2
    assert set(found.metrics) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert seen[-1] == (12, 12)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert found.complete
    assert json.loads(json.dumps(found.rows)) == found.rows
    assert json.loads(json.dumps(found.protocol)) == found.protocol


def test_the_protocol_proves_the_requests(tiny, tokenizer, root):
    found = run(tiny, tokenizer, "piqa", root, limit=2)
    texts = [f"Question: Goal {i}\nAnswer: {end}" for i in range(2) for end in ("do this", "do that instead")]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert found.protocol["token_ids_sha256"] == ids_sha256(ids)
    assert found.protocol["first_token_ids"] == ids[0][:8]
    assert found.protocol["requests"] == 4
    assert found.protocol["documents"] == {"piqa": 2}
    assert found.protocol["versions"] == {"piqa": "1.0"}
    assert found.protocol["truncated_requests"] == 0
    assert not found.complete
    with_bos = run(tiny, tokenizer, "piqa", root, limit=2, bos=True)
    assert with_bos.protocol["token_ids_sha256"] == ids_sha256([[tokenizer.bos_token_id, *one] for one in ids])
    larger = run(tiny, tokenizer, "piqa", root, limit=2, batch_size=1)
    assert larger.protocol["token_ids_sha256"] == found.protocol["token_ids_sha256"]


def test_two_models_get_their_own_answers(tiny, family_model, tokenizer, root):
    other = family_model(rms_norm_eps=0.5)
    first, second, again = (run(m, tokenizer, "piqa", root) for m in (tiny, other, tiny))
    assert [row["choice_logprobs"] for row in first.rows] == [row["choice_logprobs"] for row in again.rows]
    assert [row["choice_logprobs"] for row in first.rows] != [row["choice_logprobs"] for row in second.rows]


def test_everyday_needs_no_data(tiny, tokenizer):
    result = evaluate(
        tiny, tokenizer, TaskSpec("everyday", "everyday", limit=3), data_root=None, add_bos_token=True, batch_size=2
    )
    assert (result.samples, result.partial, result.arrays) == (3, True, None)
    assert {"acc", "acc_norm"} <= set(result.metrics)
    assert result.rows[0]["task"] == "everyday"


def test_word_perplexity_is_lm_evals_own(tiny, tokenizer, root):
    seen = []
    found = run(tiny, tokenizer, "wikitext", root, progress=lambda *x: seen.append(x))
    (row,) = found.rows
    total, counted = row["word_perplexity"]
    assert row["loglikelihood"] == total
    assert 7 <= counted <= 10  # nine pieces between spaces; lm-eval's own rule for the line break
    assert found.metrics["word_perplexity"] == pytest.approx(math.exp(-total / counted))  # one exp of one quotient
    assert "target" not in row  # the document itself
    assert seen == [(1, 1)]


YAML = """
task: own_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
{extra}
metadata: {{version: 2.0}}
"""
GENERATE = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: strict, filter: [{function: take_first}]}
  - {name: loose, filter: [{function: lowercase}, {function: take_first}]}
"""


@pytest.fixture
def own_task(tmp_path):
    def make(kind, extra):
        data = tmp_path / "own.jsonl"
        data.write_text("\n".join(json.dumps({"q": f"Question {i}", "a": "x" * (i + 1)}) for i in range(3)))
        path = tmp_path / f"{kind}.yaml"
        path.write_text(YAML.format(kind=kind, file=data, extra=extra))
        return path

    return make


def test_generation_tasks_run_with_a_cache_and_several_filters(tiny, tokenizer, own_task, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    seen = []
    found = run(
        tiny, tokenizer, own_task("generate_until", GENERATE), None, batch_size=2, progress=lambda *x: seen.append(x)
    )
    assert {"exact_match,strict", "exact_match,loose", "exact_match_stderr,strict"} <= set(found.metrics)
    assert {(row["doc_id"], row["filter"]) for row in found.rows} == {
        (i, f) for i in range(3) for f in ("strict", "loose")
    }
    assert all(isinstance(row["response"], str) for row in found.rows)
    assert [row["target"] for row in found.rows if row["filter"] == "strict"] == ["x", "xx", "xxx"]
    assert seen[-1] == (3, 3)
    assert found.protocol["requests"] == 3
    strict = next(row["response"] for row in found.rows if row["doc_id"] == 0 and row["filter"] == "strict")
    ids = torch.tensor([tokenizer.encode("Question 0", add_special_tokens=False)])
    alone = tiny.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1, eos_token_id=None)
    text = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
    assert strict == text.split("\n")[0].split("</s>")[0]


def test_a_task_file_that_names_missing_data_is_said(tiny, tokenizer, own_task, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = own_task("generate_until", GENERATE)
    (tmp_path / "own.jsonl").unlink()
    with pytest.raises(FcEvalError, match=r"'own_generate_until' names data files that are not there: .*own.jsonl"):
        run(tiny, tokenizer, path, None)


def test_plain_loglikelihood_tasks_run(tiny, tokenizer, own_task, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    extra = "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]"
    found = run(tiny, tokenizer, own_task("loglikelihood", extra), None)
    scores = [row["perplexity"] for row in found.rows]
    assert found.metrics == {"perplexity": pytest.approx(math.exp(-statistics.mean(scores)))}  # fp64 in another order


# -- mistakes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def few_tasks(monkeypatch):
    folders = [tasks._LM_EVAL_TASKS / name for name in ("piqa", "arc", "boolq")]
    manager = TaskManager(include_defaults=False, include_path=[str(f) for f in [*folders, EMBEDDED] if f.is_dir()])
    monkeypatch.setattr(tasks, "_all_tasks", lambda: manager)


def test_an_unknown_task_is_answered_with_the_nearest(tiny, tokenizer, few_tasks):
    with pytest.raises(FcEvalError, match=r"unknown lm-eval task 'pika': did you mean .*'piqa'"):
        run(tiny, tokenizer, "pika", None)
    with pytest.raises(FcEvalError, match="lm-eval ls tasks"):
        run(tiny, tokenizer, "qqqqqqqq", None)
    with pytest.raises(FcEvalError, match="does not exist"):
        run(tiny, tokenizer, "nowhere/task.yaml", None)


def test_a_tag_gives_the_metrics_of_each_of_its_tasks(tiny, tokenizer, root, few_tasks):
    write(
        root / "allenai/ai2_arc/ARC-Challenge/test.parquet",
        [{"id": "0", "question": "Q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}],
    )
    found = run(tiny, tokenizer, "ai2_arc", root)
    assert {"arc_easy/acc", "arc_easy/acc_stderr", "arc_challenge/acc"} <= set(found.metrics)
    assert "acc" not in found.metrics
    assert {row["task"] for row in found.rows} == {"arc_easy", "arc_challenge"}
    assert found.protocol["documents"] == {"arc_challenge": 1, "arc_easy": 4}


def test_groups_are_a_mean_over_documents_or_are_named_apart():
    rows = [{"filter": "none", "acc": value, "task": task} for task, value in (("a", 1), ("a", 1), ("a", 0), ("b", 0))]
    by_size = summarize({"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "g"}, rows, group="g")
    assert by_size == {"acc": 0.5, "acc_stderr": statistics.stdev([1, 1, 0, 0]) / 2}
    by_task = summarize({"acc,none": 1 / 3}, rows, group="g")
    assert by_task == {"g/acc": 1 / 3}


def test_what_the_mirror_lacks_is_said(tiny, tokenizer, root):
    before = ConfigurableTask.download, logging.getLogger("lm_eval").level
    with pytest.raises(FcEvalError, match=r"takes its 2 examples from the split 'train', but .* has validation"):
        run(tiny, tokenizer, "piqa", root, num_fewshot=2)
    (root / "allenai/winogrande/winogrande_xl").mkdir(parents=True)
    with pytest.raises(FcEvalError, match="holds no data file"):
        run(tiny, tokenizer, "winogrande", root)
    write(root / "allenai/winogrande/winogrande_xl/train.parquet", [{"sentence": "s"}])
    with pytest.raises(FcEvalError, match=r"evaluates the split 'validation', but .* has train"):
        run(tiny, tokenizer, "winogrande", root)
    with pytest.raises(FcEvalError, match="no config 'ARC-Challenge': it has ARC-Easy"):
        run(tiny, tokenizer, "arc_challenge", root)
    for rows in ([{"goal": "g", "label": 0}], [{"sol1": "a", "sol2": "b", "label": 0}]):
        write(root / "baber/piqa/validation.parquet", rows)
        with pytest.raises(FcEvalError, match=r"cannot use the data in .*baber/piqa .*the columns"):
            run(tiny, tokenizer, "piqa", root)
    (root / "baber/piqa/validation.parquet").write_bytes(b"PAR1")
    with pytest.raises(FcEvalError, match="cannot be read"):
        run(tiny, tokenizer, "piqa", root)
    assert (ConfigurableTask.download, logging.getLogger("lm_eval").level) == before


def test_few_shot_examples_come_from_the_mirror(tiny, tokenizer, root):
    train = [{"goal": f"Shot {i}", "sol1": "yes", "sol2": "no", "label": 0} for i in range(6)]
    write(root / "baber/piqa/train.parquet", train)
    found = run(tiny, tokenizer, "piqa", root, num_fewshot=2, limit=1)
    again = run(tiny, tokenizer, "piqa", root, num_fewshot=2, limit=1)
    assert found.protocol["token_ids_sha256"] == again.protocol["token_ids_sha256"]
    assert found.protocol["num_fewshot"] == 2
    zero = run(tiny, tokenizer, "piqa", root, limit=1)
    assert zero.protocol["token_ids_sha256"] != found.protocol["token_ids_sha256"]


def test_without_the_hub_the_way_out_is_said(tiny, tokenizer, tmp_path, monkeypatch):
    import datasets

    def offline(*_args, **_kwargs):
        raise ConnectionError("Couldn't reach the Hub (offline mode is enabled).")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FcEvalError, match=f"'baber/piqa' cannot be fetched .*copy it to {tmp_path}/baber/piqa"):
        run(tiny, tokenizer, "piqa", tmp_path)


def test_values_become_json():
    value = {"a": (np.float64(0.5), np.int64(2), np.True_), "b": np.arange(2), 3: {"c": None}}
    assert plain(value) == {"a": [0.5, 2, True], "b": [0, 1], "3": {"c": None}}
    assert plain(Path("x")) == "x"


@pytest.mark.skipif(not HUB.is_dir(), reason="the data mirror is not here")
@pytest.mark.parametrize("task", ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "wikitext"])
def test_real_data_run(tiny, tokenizer, task):
    found = run(tiny, tokenizer, task, HUB, limit=1, batch_size=8)
    assert found.protocol["documents"] == {task: 1}
    assert found.rows[0]["doc_id"] == 0
    assert not found.complete
