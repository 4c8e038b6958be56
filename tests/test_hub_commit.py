"""A branch on the Hub becomes a commit: asked of the Hub, read from its caches, or said to be unknown."""

import os
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from fc_eval.models.hub import HTTP_ERROR
from fc_eval.sweep import hub_commit as module
from fc_eval.sweep.hub_commit import Commit, hub_commit

A, B, C = ("a" * 40, "b" * 40, "c" * 40)


def forget() -> None:
    hub_commit.cache_clear()
    module._ask.cache_clear()


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """A Hub that cannot be reached, and empty caches; a test may set `answer`."""
    state = SimpleNamespace(answer=OfflineModeIsEnabled("offline"), asked=[])

    def repo_info(self, repo_id, *, repo_type, revision, timeout):
        state.asked.append((repo_type, repo_id, revision))
        if isinstance(state.answer, Exception):
            raise state.answer
        return SimpleNamespace(sha=state.answer)

    monkeypatch.setattr(module.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(module.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    forget()
    yield state
    forget()


def test_the_hub_is_asked_once_and_a_commit_not_at_all(hub):
    hub.answer = A
    assert [hub_commit("model", "o/n", "main") for _ in range(3)] == [Commit(A)] * 3
    assert hub_commit("dataset", "o/n", "v1") == Commit(A)
    assert hub_commit("model", "o/n", B) == Commit(B)
    assert hub_commit("dataset", "o/n", "v1", "config") == Commit(A)
    assert hub.asked == [("model", "o/n", "main"), ("dataset", "o/n", "v1")]


@pytest.mark.parametrize("error", [HTTP_ERROR("no network"), OfflineModeIsEnabled("offline"), OSError("x")])
def test_without_the_hub_its_cache_knows_the_commit(hub, tmp_path, error):
    hub.answer = error
    refs = tmp_path / "hub" / "models--o--n" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(A)
    (refs / "broken").write_text("not a commit")
    assert hub_commit("model", "o/n", "main") == Commit(A)
    assert hub_commit("model", "o/n", "broken").sha is None
    assert hub_commit("dataset", "o/n", "main").sha is None


def test_the_prepared_data_that_would_be_loaded_offline_count(tmp_path):
    root = tmp_path / "datasets" / "Owner___my_name"
    for age, (config, commit) in enumerate((("one", A), ("two", B), ("one", C), ("default-0f3", B))):
        folder = root / config / "0.0.0" / commit
        folder.mkdir(parents=True)
        os.utime(folder, (1000 - age, 1000 - age))
    (root / "one" / "0.0.0" / "tmp").mkdir()
    assert hub_commit("dataset", "Owner/MyName", "main", "one") == Commit(A)
    assert hub_commit("dataset", "Owner/MyName", "main", "two") == Commit(B)
    assert hub_commit("dataset", "Owner/MyName", "main", "three").sha is None  # A, B or C
    os.utime(root / "one" / "0.0.0" / C, (2000, 2000))
    forget()
    assert hub_commit("dataset", "Owner/MyName", "main", "one") == Commit(C)
    assert hub_commit("dataset", "Owner/MyName", "main", None) == Commit(C)


def test_prepared_data_of_files_chosen_by_name_count_where_they_agree(tmp_path):
    for config in ("default-1a", "default-2b"):
        (tmp_path / "datasets" / "allenai___c4" / config / "0.0.0" / A).mkdir(parents=True)
    assert hub_commit("dataset", "allenai/c4", "main", "en") == Commit(A)


def test_what_cannot_be_known_is_said(hub):
    assert hub_commit("model", "o/n", "main") == Commit(
        None, "the Hub cannot be asked, OfflineModeIsEnabled, and nothing of it is cached"
    )
    hub.answer = None
    assert hub_commit("model", "o/other", "main").why.startswith("the Hub names none")
