"""Data sets as folders, and one clear sentence for everything that can be missing."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HfHubHTTPError

from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import (
    PROTOCOL_DATA,
    TASK_DATA,
    DatasetRef,
    dataset_folder,
    files_of,
    mirror_serves_all,
    refs,
    split_files,
)
from fc_eval.evaluate.loading import from_hub, hub_revision, load_column, loaded_commits, read_split, read_table
from fc_eval.evaluate.sources import check_mirror, data_files
from fc_eval.evaluate.spec import PerplexitySpec, TaskSpec
from fc_eval.sweep.contents import contents

ROOT = Path(__file__).parents[1]
HUB = ROOT.parent / "shared" / "data" / "hub"


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "owner/plain/cfg/test.parquet", [{"text": "one"}, {"text": "two"}])
    write(tmp_path / "owner/flat/validation.parquet", [{"text": "flat"}])
    write(tmp_path / "owner/clone/data/test-00000-of-00002.parquet", [{"text": "a"}])
    write(tmp_path / "owner/clone/data/test-00001-of-00002.parquet", [{"text": "b"}])
    card = (
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: test\n    path: x/t-*.parquet\n"
        "  - split: train\n    path: x/none.parquet\n---\n# A data set\n"
    )
    for number in (1, 0):
        write(tmp_path / f"owner/card/x/t-{number}.parquet", [{"text": f"part {number}"}])
    (tmp_path / "owner/card/README.md").write_text(card)
    return tmp_path


# -- folders ------------------------------------------------------------------------------------------------------


def test_folders_hold_splits_by_name_or_by_card(root):
    assert split_files("owner/flat", None, root) == {"validation": [root / "owner/flat/validation.parquet"]}
    assert files_of(DatasetRef("owner/plain", "cfg", "test"), root) == [root / "owner/plain/cfg/test.parquet"]
    assert [path.name for path in split_files("owner/card", "en", root)["test"]] == ["t-0.parquet", "t-1.parquet"]
    assert [path.name[:10] for path in split_files("owner/clone", None, root)["test"]] == ["test-00000", "test-00001"]
    assert "train" not in split_files("owner/card", "en", root)  # named by the card, but not there


def test_a_card_without_a_config_asked_for_gives_its_default_or_first(root):
    assert split_files("owner/card", None, root) == split_files("owner/card", "en", root)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        (DatasetRef("owner/plain", "cfx", "test"), "no config 'cfx': it has cfg"),
        (DatasetRef("owner/plain", "cfg", "train"), "no split 'train': it has test"),
        (DatasetRef("owner/card", "fr", "test"), "no config 'fr': its card names en"),
        (DatasetRef("owner/card", "en", "train"), "no split 'train': it has test"),
        (DatasetRef("owner/none", None, "test"), "has no folder under data.root"),
    ],
)
def test_what_a_folder_lacks_is_said(root, ref, words):
    with pytest.raises(FcEvalError, match=words):
        files_of(ref, root)


def test_an_empty_folder_is_said(root):
    (root / "owner/empty").mkdir()
    with pytest.raises(FcEvalError, match="holds no data file"):
        split_files("owner/empty", None, root)


ODD_CARDS = {
    "text": "just words",
    "number": "5",
    "list": "[1, 2]",
    "no YAML": "a: [",
    "configs of words": "configs: words",
    "configs of a mapping": "configs: {en: x}",
    "configs of numbers": "configs: [1, 2]",
    "config without a name": "configs: [{data_files: x}]",
    "config without files": "configs: [{config_name: en}]",
    "files null": "configs: [{config_name: en, data_files: null}]",
    "files a number": "configs: [{config_name: en, data_files: 5}]",
    "files a mapping": "configs: [{config_name: en, data_files: {test: x}}]",
    "split without path": "configs: [{config_name: en, data_files: [{split: test}]}]",
    "path without split": "configs: [{config_name: en, data_files: [{path: x}]}]",
    "path a number": "configs: [{config_name: en, data_files: [{split: test, path: 5}]}]",
    "split a list": "configs: [{config_name: en, data_files: [{split: [test], path: x}]}]",
    "absolute path": "configs: [{config_name: en, data_files: /etc/*}]",
    "empty path": "configs: [{config_name: en, data_files: ''}]",
    "odd pattern": "configs: [{config_name: en, data_files: 'x**/y'}]",
}


@pytest.mark.parametrize("case", ODD_CARDS)
def test_an_odd_card_is_one_sentence(root, case):
    (root / "owner/card/README.md").write_text(f"---\n{ODD_CARDS[case]}\n---\n# The data\n")
    with pytest.raises(FcEvalError, match=r"README\.md does not say where the data files are, because ") as caught:
        split_files("owner/card", "en", root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "card",
    [
        "",
        "# The data\n",
        "---\n",
        "---\nopen front matter\n",
        "---\n---\n",
        "---\nlicense: mit\n---\n",
        "\n---\na: [\n---\n",
    ],
)
def test_a_card_without_configs_leaves_the_folder_layout(root, card):
    write(root / "owner/card/test.parquet", [{"text": "own"}])
    (root / "owner/card/README.md").write_text(card)
    assert [path.name for path in split_files("owner/card", None, root)["test"]] == ["test.parquet"]


def test_a_card_that_is_no_text_is_one_sentence(root):
    (root / "owner/card/README.md").write_bytes(b"---\n\xff\xfe\n---\n")
    with pytest.raises(FcEvalError, match="it cannot be read"):
        split_files("owner/card", None, root)


def test_a_task_file_that_is_not_there_is_said():
    with pytest.raises(FcEvalError, match=r"task file '/nowhere/x\.yaml' does not exist"):
        data_files([TaskSpec("x", "/nowhere/x.yaml")], None)


def test_a_root_that_is_no_folder_is_said(tmp_path):
    with pytest.raises(FcEvalError, match="is not a folder"):
        dataset_folder("a/b", tmp_path / "nowhere")
    assert dataset_folder("a/b", None) is None


# -- which evaluations need what ----------------------------------------------------------------------------------


def test_embedded_evaluations_need_no_data_set(tmp_path):
    text, task = PerplexitySpec("text", "text"), TaskSpec("everyday", "everyday")
    assert refs(text) == refs(task) == ()
    assert mirror_serves_all([text, task], None)
    names = [path.name for path in data_files([text, task], None)]
    assert names == ["topics.py", "everyday.yaml", "everyday.jsonl"]
    own = tmp_path / "own.txt"
    own.write_text("words")
    assert data_files([PerplexitySpec("t", "text", path=str(own))], None) == [own]
    with pytest.raises(FcEvalError, match="does not exist"):
        data_files([PerplexitySpec("t", "text", path=str(tmp_path / "no.txt"))], None)


def test_the_mirror_serves_what_it_has(tmp_path):
    piqa, wikitext, other = TaskSpec("piqa", "piqa"), PerplexitySpec("w", "wikitext2"), TaskSpec("boolq", "boolq")
    file = write(tmp_path / "baber/piqa/validation.parquet", [{"goal": "g"}])
    assert mirror_serves_all([piqa], tmp_path)
    assert not mirror_serves_all([piqa], None)
    assert not mirror_serves_all([piqa, wikitext], tmp_path)
    assert not mirror_serves_all([piqa, other], tmp_path)  # only lm-eval knows what boolq reads
    assert data_files([piqa, wikitext], str(tmp_path)) == [file]
    with pytest.raises(FcEvalError, match="no split 'train': it has validation"):
        data_files([TaskSpec("piqa", "piqa", num_fewshot=2)], tmp_path)


def test_paths_are_found_without_any_heavy_library():
    heavy = ("torch", "datasets", "pyarrow", "lm_eval", "transformers", "numpy")
    code = f"import sys, fc_eval.evaluate.data, fc_eval.evaluate.spec; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# -- reading ------------------------------------------------------------------------------------------------------


def test_columns_come_in_the_order_of_files_and_rows(root):
    column = load_column(DatasetRef("owner/clone", None, "test"), "text", root)
    assert column.texts == ["a", "b"]
    assert column.origin == {
        "dataset": "owner/clone",
        "config": None,
        "split": "test",
        "where": "data.root",
        "revision": None,
    }


def test_json_lines_are_read_too(tmp_path):
    lines = "\n".join(json.dumps({"text": text}) for text in ("x", "y"))
    path = tmp_path / "part.json.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    assert read_table(path).column("text").to_pylist() == ["x", "y"]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(FcEvalError, match="cannot be read"):
        read_table(path)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_damaged_parquet_is_said(root, damage):
    path = root / "owner/flat/validation.parquet"
    path.write_bytes({"cut": path.read_bytes()[:-20], "text": b"version https://git-lfs", "empty": b""}[damage])
    with pytest.raises(FcEvalError, match=r"validation.parquet cannot be read .*copy it again") as error:
        load_column(DatasetRef("owner/flat", None, "validation"), "text", root)
    assert "\n" not in str(error.value)


def test_missing_column_empty_row_and_unlike_shards_are_said(root):
    with pytest.raises(FcEvalError, match="no column 'page': it has text"):
        load_column(DatasetRef("owner/flat", None, "validation"), "page", root)
    write(root / "owner/flat/validation.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(FcEvalError, match="row 1 of 'owner/flat' has no text"):
        load_column(DatasetRef("owner/flat", None, "validation"), "text", root)
    other = write(root / "other.parquet", [{"page": 1}])
    with pytest.raises(FcEvalError, match="differ in their columns"):
        read_split([root / "owner/plain/cfg/test.parquet", other])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("x"), "cannot be fetched .*no network"),
        (HfHubHTTPError.__bases__[0]("x"), "cannot be fetched .*no network"),
        (FileNotFoundError("x"), "cannot be fetched"),
        (ValueError("Unknown split 'tset'.\nShould be one of ['test']"), "Unknown split 'tset'. Should be one of"),
        (FcEvalError("kept as it is"), "^kept as it is$"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(error, words):
    def fail():
        raise error

    with pytest.raises(FcEvalError, match=words):
        from_hub("a/b", None, fail)


def test_a_data_set_without_a_folder_is_asked_of_the_hub(monkeypatch, root):
    import datasets

    class Loaded(dict):
        info = SimpleNamespace(download_checksums={f"hf://datasets/allenai/c4@{'5e' * 20}/en/x.json.gz": {}})

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or Loaded(text=["hello"]))
    column = load_column(PROTOCOL_DATA["c4"], "text", root)
    assert column.texts == ["hello"]
    assert (column.origin["where"], column.origin["revision"]) == ("hub", "5e" * 20)
    assert asked[0][1]["data_files"] == {"validation": "en/c4-validation.00000-of-00008.json.gz"}
    load_column(PROTOCOL_DATA["wikitext2"], "text", None)
    assert asked[1] == (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})


def test_no_revision_is_claimed_when_files_come_from_several():
    assert hub_revision({}) is None
    assert hub_revision({f"hf://datasets/a/b@{c * 40}/f": {} for c in "ab"}) is None


def test_commits_of_what_was_loaded_are_read_by_repository():
    def split(*urls):
        return SimpleNamespace(info=SimpleNamespace(download_checksums=dict.fromkeys(urls)))

    one, two, three = (f"hf://datasets/o/{n}@{c * 40}/f" for n, c in (("x", "a"), ("y", "b"), ("y", "c")))
    assert loaded_commits({"test": split(one), "train": split(one, two)}) == {"o/x": "a" * 40, "o/y": "b" * 40}
    assert loaded_commits(split(two, three)) == {}
    assert loaded_commits(split("/local/file")) == loaded_commits(None) == {}


@pytest.mark.skipif(not HUB.is_dir(), reason="the data mirror is not here")
def test_the_mirror_at_hand_is_complete():
    specs = [*(PerplexitySpec(p, p) for p in PROTOCOL_DATA), *(TaskSpec(t, t) for t in TASK_DATA)]
    assert mirror_serves_all(specs, HUB)
    assert len(data_files(specs, HUB)) == 8
    rows = {task: read_split(files_of(ref, HUB)).num_rows for task, ref in TASK_DATA.items()}
    assert (rows["piqa"], rows["arc_easy"], rows["arc_challenge"]) == (1838, 2376, 1172)
    assert (rows["hellaswag"], rows["winogrande"]) == (10042, 1267)
    assert len(load_column(PROTOCOL_DATA["wikitext2"], "text", HUB).texts) == 4358


def test_a_folder_with_none_of_the_data_sets_is_refused_at_once(tmp_path, monkeypatch):
    def asked(*args):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("fc_eval.sweep.contents._commit", asked)
    write(tmp_path / "baber/piqa/validation.parquet", [{"goal": "g"}])
    piqa, wikitext, other = TaskSpec("piqa", "piqa"), PerplexitySpec("w", "wikitext2"), TaskSpec("boolq", "boolq")
    for wrong in (tmp_path / "baber", tmp_path / "baber/piqa"):
        words = [f"data.root={wrong}", "eval=[piqa,arc_easy]", "model=tiny", "comm=int4", "tp=2"]
        with pytest.raises(
            FcEvalError, match=f"data.root={wrong} holds none of the data sets .*baber/piqa, allenai/ai2"
        ):
            contents(compose_one(words))
        check_mirror([other], wrong)
        check_mirror([PerplexitySpec("t", "text")], wrong)
        check_mirror([piqa], None)
    check_mirror([piqa, wikitext], tmp_path)


def test_a_mirror_that_lacks_a_data_set_is_told_where_it_belongs(tmp_path):
    def fail():
        raise ConnectionError("x")

    with pytest.raises(FcEvalError, match=f"copy it to {tmp_path}/a/b"):
        from_hub("a/b", tmp_path, fail)
