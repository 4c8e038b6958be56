"""The text that smoothing looks at: which data it is, and the token sequences made of it.

    wikitext2   the training set of WikiText-2, rows joined with two newlines
    c4          the first 1100 documents of the first training shard of C4, joined with a space
    text        the embedded text of the evaluation `text`, for machines without data
    PATH        a UTF-8 text file

SmoothQuant takes 512 sentences of the Pile's validation set, 512 tokens at most (README and `calibration.py` of its
repository), which its makers no longer distribute. Training sets are taken instead, because perplexity is measured on
none of their text. The text is tokenized once and cut into sequences that are spread evenly over it, do not overlap,
and begin with a BOS token where the model's evaluations have one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import DatasetRef, dataset_folder, embedded_files, files_of, local_text
from fc_eval.evaluate.sources import HubData, Sources
from fc_eval.evaluate.spec import PerplexitySpec

TRAINING = {
    "wikitext2": DatasetRef("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
    "c4": DatasetRef("allenai/c4", "en", "train"),
}
C4_DOCUMENTS = 1100
EMBEDDED_TEXT = "text"


@dataclass(frozen=True)
class Sequences:
    """int64 [n, tokens], and where they came from (JSON-ready, with the SHA-256 of the ids)."""

    ids: npt.NDArray[np.int64]
    origin: dict[str, Any]


def calibration_sources(text: str, root: Path | None) -> Sources:
    """What a calibration text is read from, for fingerprints.

    Raises:
        FcEvalError: the mirror has the data set without its training set, or the file does not exist.
    """
    if text == EMBEDDED_TEXT:
        return Sources(tuple(embedded_files(PerplexitySpec(EMBEDDED_TEXT, protocol="text"))))
    if text not in TRAINING:
        return Sources((local_text(text, "model.calibration.text"),))
    ref = TRAINING[text]
    if dataset_folder(ref.id, root) is None:
        return Sources(hub=(HubData(ref.id, ref.config),))
    assert root is not None  # without a root there is no folder
    try:
        return Sources(tuple(files_of(ref, root)))
    except FcEvalError as error:
        raise FcEvalError(
            f"{error}; smoothing looks at training text: add it there, or set model.calibration.text to the path of a "
            "text file, or to text (the embedded one)"
        ) from None


def calibration_sequences(
    text: str, sequences: int, tokens: int, tokenizer: Any, root: Path | None, add_bos_token: bool
) -> Sequences:
    """Reads, tokenizes and cuts a calibration text.

    Raises:
        FcEvalError: data missing or unreadable, too short a text, or a tokenizer without BOS when one is asked for.
    """
    # The readers of data take a moment to import, and who asks for sources only needs none of them.
    from fc_eval.evaluate.loading import load_column
    from fc_eval.evaluate.windows import bos_id, ids_sha256, text_column

    if text in TRAINING:
        column = load_column(TRAINING[text], "text", root)
        whole = " ".join(column.texts[:C4_DOCUMENTS]) if text == "c4" else "\n\n".join(column.texts)
    else:
        column = text_column(None if text == EMBEDDED_TEXT else text, "model.calibration.text")
        whole = column.texts[0]
    found = np.array(tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    bos = bos_id(tokenizer, add_bos_token)
    length = tokens if bos is None else tokens - 1
    if length < 1 or len(found) // length < sequences:
        most = max(1, len(found) // max(1, length))
        raise FcEvalError(
            f"the calibration text {text!r} has {len(found)} tokens with this tokenizer, but {sequences} sequences of "
            f"{tokens} are asked for: set model.calibration.sequences={most} or less, or "
            "choose another text"
        )
    starts = np.arange(sequences) * (len(found) // sequences)
    ids = found[starts[:, None] + np.arange(length)]
    if bos is not None:
        ids = np.insert(ids, 0, bos, axis=1)
    origin = {**column.origin, "sequences": sequences, "tokens": tokens, "add_bos_token": add_bos_token}
    return Sequences(ids, origin | {"token_ids_sha256": ids_sha256(ids)})
