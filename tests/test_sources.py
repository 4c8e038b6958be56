"""What an evaluation reads: every file behind a task's definition, data sets on the Hub, and what cannot be known."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fc_eval.errors import FcEvalError
from fc_eval.evaluate import definitions
from fc_eval.evaluate.data import PROTOCOL_DATA, TASK_DATA
from fc_eval.evaluate.definitions import read_definition, tasks_named
from fc_eval.evaluate.sources import HubData, Sources, data_files, joined, sources
from fc_eval.evaluate.spec import PerplexitySpec, TaskSpec

ROOT = Path(__file__).parents[1]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def of_yaml(tmp_path, text: str, root=None) -> Sources:
    return sources(TaskSpec("x", str(write(tmp_path / "own.yaml", text))), root)


def names(found: Sources) -> list[str]:
    return [path.name for path in found.files]


# -- definitions --------------------------------------------------------------------------------------------------


def test_includes_and_functions_are_files_of_a_definition(tmp_path):
    write(tmp_path / "base/base.yaml", "include: deeper.yaml\ntest_split: test\ndoc_to_text: !function text.of\n")
    write(tmp_path / "base/deeper.yaml", "dataset_path: json\ntest_split: dev\n")
    write(tmp_path / "base/text.py", "of = str")
    write(tmp_path / "tools/utils.py", "f = str")
    own = "include: base/base.yaml\ntask: own\nprocess_docs: !function tools.utils.f\nfilter: !function os.path.join\n"
    found = read_definition(write(tmp_path / "own.yaml", own))
    assert found.settings["dataset_path"] == "json"
    assert found.settings["test_split"] == "test"  # what includes wins over what is included
    assert [path.name for path in found.files] == ["own.yaml", "utils.py", "base.yaml", "text.py", "deeper.yaml"]
    assert found.imported == ("os.path.join",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("include: own.yaml\n", "own.yaml includes itself"),
        ("include: none.yaml\n", r"none.yaml: No such file or directory \(ENOENT\)"),
        ("[1, 2]", "own.yaml holds no mapping"),
        ("", "own.yaml holds no mapping"),
        ("task: [", "own.yaml is not complete YAML"),
        ("task: !other x", "own.yaml is not complete YAML"),
    ],
)
def test_a_definition_that_is_none_is_one_sentence(tmp_path, text, words):
    with pytest.raises(FcEvalError, match=words) as caught:
        of_yaml(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_task_file_that_does_not_exist_is_named():
    with pytest.raises(FcEvalError, match=r"task file '/no/such\.yaml' does not exist"):
        sources(TaskSpec("x", "/no/such.yaml"), None)


# -- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ("{data_files: PLACE/a.jsonl}", ["a.jsonl"]),
        ("{data_files: [PLACE/a.jsonl, PLACE/b.jsonl]}", ["a.jsonl", "b.jsonl"]),
        ("{data_files: {test: PLACE/b.jsonl, train: [PLACE/a.jsonl]}}", ["b.jsonl", "a.jsonl"]),
        ("{data_files: {test: 'PLACE/*.jsonl'}}", ["a.jsonl", "b.jsonl"]),
        ("{data_files: 'zip://inside.csv::PLACE/a.jsonl'}", ["a.jsonl"]),
        ("{data_dir: PLACE, data_files: b.jsonl}", ["b.jsonl"]),
        ("{data_dir: PLACE}", ["a.jsonl", "b.jsonl"]),
    ],
)
def test_data_files_of_a_task_are_found_however_they_are_written(tmp_path, kwargs, expected):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "data" / name, name)
    text = f"task: own\ndataset_path: json\ndataset_kwargs: {kwargs.replace('PLACE', str(tmp_path / 'data'))}\n"
    found = of_yaml(tmp_path, text)
    assert names(found) == ["own.yaml", *expected]
    assert (found.hub, found.unknown) == ((), ())


def test_relative_data_files_lie_below_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d/a.csv", "q")
    assert names(of_yaml(tmp_path, "task: t\ndataset_path: csv\ndataset_kwargs: {data_files: d/a.csv}\n"))[1:] == [
        "a.csv"
    ]


def test_data_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FcEvalError, match=r"task 't' names data files that are not there: .*none\.csv"):
        of_yaml(tmp_path, "task: t\ndataset_path: csv\ndataset_kwargs: {data_files: none.csv}\n")


def test_data_on_the_hub_are_named_with_their_revision(tmp_path):
    found = of_yaml(tmp_path, "task: t\ndataset_path: owner/name\ndataset_name: cfg\n")
    assert found.hub == (HubData("owner/name", "cfg", "main"),)
    found = of_yaml(tmp_path, "task: t\ndataset_path: owner/name\ndataset_kwargs: {revision: v2}\n")
    assert found.hub == (HubData("owner/name", None, "v2"),)
    files = "{test: 'hf://datasets/o/n/x.csv', train: 'hf://datasets/o/m@v1/x.csv'}"
    found = of_yaml(tmp_path, f"task: t\ndataset_path: csv\ndataset_kwargs: {{data_files: {files}}}\n")
    assert found.hub == (HubData("o/n", None, "main"), HubData("o/m", None, "v1"))


def test_a_folder_of_that_name_comes_before_the_hub_and_the_mirror_before_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "task: t\ndataset_path: owner/name\n"
    write(tmp_path / "owner/name/deep/test.csv", "q")
    assert names(of_yaml(tmp_path, text)) == ["own.yaml", "test.csv"]
    piqa = TASK_DATA["piqa"]
    write(tmp_path / piqa.id / "x.csv", "q")
    assert names(sources(TaskSpec("piqa", "piqa"), None)) == ["x.csv"]
    mirror = tmp_path / "mirror"
    (mirror / "owner/name").mkdir(parents=True)
    for split in ("test", "train"):
        pq.write_table(pa.table({"q": ["a"]}), mirror / f"owner/name/{split}.parquet")
    found = of_yaml(tmp_path, text, mirror)
    assert names(found) == ["own.yaml", "test.parquet", "train.parquet"]
    assert found.hub == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dataset_path: csv\ndataset_kwargs: {data_files: 'https://host/x.csv'}", "reads https://host/x.csv"),
        ("custom_dataset: !function os.path.join", "has its data from code of its own"),
        ("class: !function os.path.join", "has its data from code of its own"),
        ("dataset_path: owner/name\nprocess_docs: !function os.path.join", "uses os.path.join, code of an installed"),
        ("test_split: test", "names no data set"),
    ],
)
def test_what_cannot_be_known_is_said(tmp_path, text, words):
    found = of_yaml(tmp_path, f"task: t\n{text}\n")
    assert any(words in sentence for sentence in found.unknown)
    assert all("task 't'" in sentence for sentence in found.unknown)


def test_protocols_and_known_tasks_come_from_the_hub_without_a_mirror():
    found = sources(PerplexitySpec("w", "wikitext2"), None)
    ref = PROTOCOL_DATA["wikitext2"]
    assert found == Sources(hub=(HubData(ref.id, ref.config, "main"),))
    assert sources(TaskSpec("p", "piqa", num_fewshot=1), None).hub == (HubData(TASK_DATA["piqa"].id, None, "main"),)
    both = joined([found, sources(TaskSpec("e", "everyday"), None)])
    assert both.hub == found.hub
    assert names(both) == ["everyday.yaml", "everyday.jsonl"]


# -- groups and names ---------------------------------------------------------------------------------------------


def test_the_tasks_of_a_group_file_inherit_its_data(tmp_path):
    for name in ("a.csv", "b.csv"):
        write(tmp_path / name, name)
    text = f"""
group: both
dataset_path: csv
dataset_kwargs: {{data_files: {tmp_path}/a.csv}}
task:
  - {{task: one}}
  - {{task: two, dataset_kwargs: {{data_files: {tmp_path}/b.csv}}}}
  - {{task: three, dataset_path: owner/name, dataset_kwargs: null}}
"""
    found = of_yaml(tmp_path, text)
    assert names(found) == ["own.yaml", "a.csv", "b.csv"]
    assert found.hub == (HubData("owner/name", None, "main"),)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Three tasks, a tag and two groups, as lm-eval's index holds them."""
    files = {
        "one": write(tmp_path / "one.yaml", "task: one\ndataset_path: o/one\n"),
        "two": write(tmp_path / "two.yaml", "task: two\ndataset_path: o/two\ndataset_name: cfg\n"),
        "group": write(tmp_path / "group.yaml", "group: group\ndataset_name: all\ntask: [one, marked, {task: two}]\n"),
        "outer": write(tmp_path / "outer.yaml", "group: outer\ntask: [{group: g, task: [two]}, group]\n"),
    }
    tag = SimpleNamespace(yaml_path=None, tags={"two", "one"})
    monkeypatch.setattr(definitions, "_texts", lambda: {path: path.read_bytes() for path in files.values()})
    monkeypatch.setattr(definitions, "_index", lambda: {"marked": tag, "one": None, "two": None})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", [("o/one", None)]),
        ("marked", [("o/one", None), ("o/two", "cfg")]),
        ("group", [("o/one", "all"), ("o/two", "all")]),
        ("outer", [("o/two", "cfg"), ("o/one", "all"), ("o/two", "all")]),
    ],
)
@pytest.mark.usefixtures("index")
def test_names_stand_for_tasks_tags_and_groups(name, expected):
    found = sources(TaskSpec("x", name), None)
    assert [(data.id, data.config) for data in found.hub] == expected
    assert f"{name}.yaml" in names(found) or name == "marked"


@pytest.mark.usefixtures("index")
def test_a_name_that_lm_eval_does_not_know_is_one_sentence():
    with pytest.raises(FcEvalError, match="unknown lm-eval task 'tow': did you mean 'two'"):
        list(tasks_named("tow"))


def test_lm_evals_own_definitions_are_found_by_their_names():
    found = [sources(TaskSpec("x", name), None) for name in ("boolq", "mmlu")]
    assert found[0].hub == (HubData("aps/super_glue", "boolq", "main"),)
    assert {data.id for data in found[1].hub} == {"cais/mmlu"}
    assert len(found[1].hub) == 57  # one config per subject


def test_no_tensor_library_is_loaded():
    code = (
        "import sys; from fc_eval.evaluate.sources import data_files; from fc_eval.evaluate.spec import TaskSpec;"
        "data_files([TaskSpec('everyday', 'everyday')], None);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'datasets', 'lm_eval', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_of_several_evaluations_are_listed_once(tmp_path):
    own = write(tmp_path / "own.txt", "words")
    specs = [PerplexitySpec(name, "text", path=str(own)) for name in "ab"]
    assert data_files(specs, None) == [own]
