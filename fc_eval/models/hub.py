"""Fetches a checkpoint from the Hugging Face Hub; what can go wrong there is one sentence each."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fc_eval.errors import FcEvalError
from fc_eval.models.cache import disk_errors
from fc_eval.models.config import CHECKPOINT_PATTERNS

# What every error of the HTTP library derives from that this version of the Hub's client uses.
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
# The same weights in other layouts, which some repositories carry beside the ones that are read.
DUPLICATES = ("consolidated*", "original/*", "*/*.safetensors")


def fetch_snapshot(hub_id: str, revision: str, with_code: bool = False) -> Path:
    """The local folder of a Hub repository; what is in the Hub's cache is not fetched again.

    Args:
        hub_id: OWNER/NAME.
        revision: branch, tag or commit.
        with_code: also fetch Python files (for `trust_remote_code`).

    Raises:
        FcEvalError: gated, private or unknown repository, unknown revision, no network, full disk.
    """
    instead = "or give a copy of its files with model.path=FOLDER"
    patterns = [*CHECKPOINT_PATTERNS, "*.py"] if with_code else list(CHECKPOINT_PATTERNS)
    try:
        with disk_errors("the Hub's cache", "HF_HOME"):
            folder = snapshot_download(
                hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=list(DUPLICATES)
            )
    except GatedRepoError:
        raise FcEvalError(
            f"{hub_id} is gated: accept its licence on its page on the Hugging Face Hub and set HF_TOKEN to a token of "
            f"that account, {instead}"
        ) from None
    except RevisionNotFoundError:
        raise FcEvalError(
            f"{hub_id} has no revision {revision!r}: give a branch, tag or commit with model.revision="
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise FcEvalError(
            f"the Hugging Face Hub has no repository {hub_id!r}, or it is private: check model.hub_id, set HF_TOKEN "
            f"for a private one, {instead}"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise FcEvalError(
            f"{hub_id} is not in the local cache of the Hugging Face Hub, and the Hub cannot be reached (no "
            f"network, or HF_HUB_OFFLINE is set): go online once, {instead}"
        ) from None
    except (HTTP_ERROR, OSError) as error:
        raise FcEvalError(
            f"{hub_id} could not be fetched from the Hugging Face Hub ({str(error).splitlines()[0]}): try again, which "
            f"goes on where it stopped, {instead}"
        ) from None
    return Path(folder)
