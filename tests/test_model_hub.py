"""Models from the Hub: what is asked for, and one sentence for each thing that can go wrong there."""

import errno

import pytest

from fc_eval.errors import FcEvalError
from fc_eval.models import hub
from fc_eval.models.config import ModelConfig
from fc_eval.models.load import load_model


def hub_config(**changes) -> ModelConfig:
    return ModelConfig.from_mapping({"name": "mine", "hub_id": "owner/model"} | changes)


def raised(kind: type[Exception]) -> Exception:
    """An exception of the Hub's client, without the HTTP response that its constructor wants."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised(hub.GatedRepoError), "is gated: accept its licence on its page .* set HF_TOKEN .* model.path=FOLDER"),
        (raised(hub.RepositoryNotFoundError), "has no repository 'owner/model', or it is private"),
        (raised(hub.RevisionNotFoundError), "has no revision 'v2'"),
        (raised(hub.LocalEntryNotFoundError), "not in the local cache .* HF_HUB_OFFLINE"),
        (raised(hub.OfflineModeIsEnabled), "not in the local cache .* HF_HUB_OFFLINE"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"the Hub's cache cannot be used: .*\(ENOSPC\): free .* HF_HOME",
        ),
        (hub.HTTP_ERROR("connection reset"), r"could not be fetched .*\(connection reset\): try again"),
        (OSError("connection reset"), r"could not be fetched .*\(connection reset\): try again"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_can_go_wrong_on_the_hub_is_one_sentence(monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(FcEvalError, match=message) as caught:
        load_model(hub_config(revision="v2"))
    assert "\n" not in str(caught.value)


def test_offline_without_a_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FcEvalError, match="owner/model is not in the local cache"):
        load_model(hub_config())


def test_what_is_fetched_from_the_hub(monkeypatch, checkpoint):
    asked = []

    def fetch(hub_id, *, revision, allow_patterns, ignore_patterns):
        asked.append((hub_id, revision, "*.py" in allow_patterns, "*.bin" in allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    loaded = load_model(hub_config(revision="v2"))
    load_model(hub_config(trust_remote_code=True))
    assert asked == [("owner/model", "v2", False, False), ("owner/model", "main", True, False)]
    assert loaded.source_files == (checkpoint / "model.safetensors",)
