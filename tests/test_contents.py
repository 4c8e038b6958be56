"""Equal fingerprints mean equal contents: of files, of data that a task names, of repositories on the Hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.loading import check_commits
from fc_eval.sweep import hub_commit
from fc_eval.sweep.hub_commit import Commit
from fc_eval.sweep.plan import plan

ROOT = Path(__file__).parents[1]
BASE = ["model=tiny", "tp=2", "device=cpu"]
A, B = "a" * 40, "b" * 40


@pytest.fixture
def hub(monkeypatch):
    """Commits by repository; one that is missing is not known."""
    commits: dict[str, str] = {}

    def commit(kind, repo_id, revision, config=None):
        sha = revision if hub_commit.COMMIT.fullmatch(revision) else commits.get(f"{kind}/{repo_id}@{revision}")
        return Commit(sha, "" if sha else "no network")

    monkeypatch.setattr(hub_commit, "hub_commit", commit)
    return commits


OWN_FILES = [
    *("own.yaml", "base.yaml", "data.jsonl", "tools.py", "helper.py"),
    *("parts/__init__.py", "parts/inner.py", "parts/other.py"),
]


def own_task(folder: Path) -> list[str]:
    """A task of files in the working folder, and the overrides that choose it."""
    folder.mkdir()
    (folder / "base.yaml").write_text("dataset_path: json\ntest_split: test\nprocess_docs: !function tools.clean\n")
    (folder / "tools.py").write_text("from helper import clean\n")
    (folder / "helper.py").write_text("import json\nimport parts.inner\nclean = list")
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").write_text("from . import other")
    (folder / "parts" / "inner.py").write_text("import helper")
    (folder / "parts" / "other.py").write_text("")
    (folder / "data.jsonl").write_text(json.dumps({"q": "a"}))
    (folder / "own.yaml").write_text("include: base.yaml\ntask: own\ndataset_kwargs: {data_files: data.jsonl}\n")
    return [*BASE, "eval=[]", "eval.tasks=[own.yaml]"]


@pytest.mark.parametrize("name", OWN_FILES)
def test_every_file_behind_an_own_task_counts_and_its_place_does_not(tmp_path, monkeypatch, name):
    prints = []
    for place in ("one", "two"):
        config = compose_one(own_task(tmp_path / place))
        monkeypatch.chdir(tmp_path / place)
        prints.append(plan(config).fingerprint)
    assert prints[0] == prints[1]
    (unknown,) = plan(config).contents.unknown
    assert unknown.startswith("task 'own' has code of its own (tools.py, helper.py, ")
    assert unknown.endswith("): files that this opens by itself are not hashed")
    with Path(name).open("a") as file:
        file.write("\n\n")
    assert plan(config).fingerprint != prints[0]


def test_the_commit_of_a_model_counts_and_is_what_will_be_loaded(hub):
    overrides = ["model=llama3_2_1b", "tp=2", "device=cpu", "eval=text"]
    name = "model/meta-llama/Llama-3.2-1B@main"
    hub[name] = A
    first = plan(compose_one(overrides))
    assert first.config.model.revision == A
    assert first.contents.model == (f"hub:meta-llama/Llama-3.2-1B@{A}",)
    assert first.contents.unknown == ()
    assert plan(compose_one([*overrides, f"model.revision={A}"])).fingerprint == first.fingerprint
    hub[name] = B
    assert plan(compose_one(overrides)).fingerprint != first.fingerprint
    del hub[name]
    unknown = plan(compose_one(overrides))
    assert unknown.config.model.revision == "main"
    assert unknown.contents.unknown == ("model meta-llama/Llama-3.2-1B@main: its commit is not known (no network)",)


def test_files_at_hand_come_before_the_hub(hub, checkpoint):
    found = plan(compose_one(["model=llama3_2_1b", f"model.path={checkpoint}", "tp=2", "device=cpu", "eval=text"]))
    assert found.config.model.revision == "main"
    assert all(len(digest) == 64 for digest in found.contents.model)
    assert found.contents.unknown == ()


def test_the_commit_of_a_data_set_counts(hub):
    overrides = [*BASE, "eval=[wikitext2,piqa]"]
    hub["dataset/Salesforce/wikitext@main"], hub["dataset/baber/piqa@main"] = A, B
    first = plan(compose_one(overrides))
    assert first.contents.data == {
        "wikitext2": (f"hub:Salesforce/wikitext@{A}",),
        "piqa": (f"hub:baber/piqa@{B}",),
    }
    assert first.contents.commits == {"Salesforce/wikitext": A, "baber/piqa": B}
    hub["dataset/baber/piqa@main"] = A
    assert plan(compose_one(overrides)).fingerprint != first.fingerprint
    hub.clear()
    unknown = plan(compose_one(overrides)).contents
    assert unknown.commits == {"Salesforce/wikitext": None, "baber/piqa": None}
    assert [text.split(":")[0] for text in unknown.unknown] == [
        "data set Salesforce/wikitext@main",
        "data set baber/piqa@main",
    ]


def test_data_that_were_loaded_must_be_those_that_were_planned():
    perplexity = {"dataset": "o/text", "revision": A}
    task = {"commits": {"o/task": A}}
    for planned in ({"o/text": A, "o/task": A}, {"o/text": None, "o/task": None}, {}):
        check_commits(perplexity, planned)
        check_commits(task, planned)
    for protocol in (perplexity, task):
        with pytest.raises(FcEvalError, match=f"was loaded from commit {A} of the Hub, but {B} was planned"):
            check_commits(protocol, {"o/text": B, "o/task": B})
    check_commits({"dataset": "o/text", "revision": None}, {"o/text": B})


def test_a_run_may_still_go_offline_before_the_hubs_client_is_imported():
    code = "import sys, fc_eval.run; sys.exit(any(m in sys.modules for m in ('huggingface_hub', 'datasets', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
