"""Exact token windows of each perplexity protocol: what is tokenized, where it is cut, and the hash that proves it.

    wikitext2   all rows joined with two newlines, tokenized once, non-overlapping windows, tail dropped (GPTQ, AWQ)
    text        a local file or the embedded text, as wikitext2
    c4          256 crops with Python's random.Random(0): a document longer than the window, then an offset (GPTQ)
    c4_new      the first 1100 documents joined with a space, tokenized once, the first 256 windows (QuaRot)

The beginning-of-sequence token is explicit: one at the very start of a tokenized text, or none. Later windows start
in the middle of the text, as in all of these papers.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import PROTOCOL_DATA, local_text
from fc_eval.evaluate.loading import Column, load_column
from fc_eval.evaluate.spec import WINDOW_TOKENS, WindowSpec

C4_WINDOWS = 256
C4_NEW_DOCUMENTS = 1100
# Documents in shard 0 of C4's validation set; both protocols read this shard, fewer documents are another data set.
C4_SHARD_DOCUMENTS = 45576
# A crop is drawn again until its document is long enough; a text where so many draws in a row fail has hardly any.
MAX_DRAWS = 100_000


@dataclass(frozen=True)
class Windows:
    """The windows of one evaluation.

    Attributes:
        ids: int64 [n, window].
        clusters: int64 [n], windows of one number are not independent (crops of one document); all differ otherwise.
        complete: whether these are all windows of the protocol, that is, no limit cut them.
        protocol: JSON-ready: data set, label, split, where it came from, token counts, BOS flag, SHA-256 of the ids.
    """

    ids: npt.NDArray[np.int64]
    clusters: npt.NDArray[np.int64]
    complete: bool
    protocol: dict[str, Any]


def bos_id(tokenizer: Any, add_bos_token: bool) -> int | None:
    """The beginning-of-sequence token to put in front, None for none.

    Raises:
        FcEvalError: it is asked for and the tokenizer has none.
    """
    if not add_bos_token:
        return None
    if tokenizer.bos_token_id is None:
        raise FcEvalError("add_bos_token=true, but this tokenizer has no BOS token: set model.add_bos_token=false")
    return int(tokenizer.bos_token_id)


def encode(tokenizer: Any, text: str, add_bos_token: bool) -> list[int]:
    """Token ids of a text, whatever the tokenizer adds by itself: with one BOS in front, or only what the text holds.

    A text that spells out the BOS token at its beginning (a chat template does) gets no second one.
    """
    bos = bos_id(tokenizer, add_bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def ids_sha256(sequences: Iterable[Iterable[int]]) -> str:
    """SHA-256 over token ids: each sequence as its length and its ids, int64 little-endian."""
    digest = hashlib.sha256()
    for sequence in sequences:
        ids = np.asarray(sequence, dtype="<i8")
        digest.update(np.int64(ids.size).astype("<i8").tobytes())
        digest.update(ids.tobytes())
    return digest.hexdigest()


def build_windows(spec: WindowSpec, tokenizer: Any, *, data_root: Path | None, add_bos_token: bool) -> Windows:
    """Reads, tokenizes and cuts the text of one evaluation over windows.

    Raises:
        FcEvalError: data missing or unreadable, a tokenizer without BOS when one is asked for, or too short a text.
    """
    if spec.protocol == "text":
        column = text_column(spec.path)
        label = spec.name
    else:
        column = load_column(PROTOCOL_DATA[spec.protocol], "text", data_root)
        label = spec.protocol
    if spec.protocol in ("c4", "c4_new"):
        if len(column.texts) < C4_SHARD_DOCUMENTS:
            label += " (subset)"
            column.origin["documents"] = len(column.texts)
        column = Column(column.texts[:C4_SHARD_DOCUMENTS], column.origin)

    if spec.protocol == "c4":
        total: int | None = C4_WINDOWS
        ids, clusters = _crops(column.texts, tokenizer, spec, add_bos_token)
    else:
        if spec.protocol == "c4_new":
            text, wanted = " ".join(column.texts[:C4_NEW_DOCUMENTS]), C4_WINDOWS
            total = C4_WINDOWS
        else:
            text, wanted, total = "\n\n".join(column.texts), 1, None
        tokens = encode(tokenizer, text, add_bos_token)
        column.origin["text_tokens"] = len(tokens)
        available = len(tokens) // spec.window_tokens
        needed = min(wanted, spec.limit) if spec.limit is not None else wanted
        if available < needed:
            raise FcEvalError(
                f"{label!r} has {len(tokens)} tokens with this tokenizer, but {needed} x {spec.window_tokens} = "
                f"{needed * spec.window_tokens} are needed: give more text, shorter windows or a smaller limit"
            )
        total = total or available
        count = min(total, spec.limit or total)
        ids = np.array(tokens[: count * spec.window_tokens], dtype=np.int64).reshape(count, spec.window_tokens)
        clusters = np.arange(count)

    is_usual = spec.protocol == "text" or spec.window_tokens == WINDOW_TOKENS
    protocol = {
        "protocol": spec.protocol,
        # Windows of another length give another number than the papers', and than a neighbouring column's.
        "label": label if is_usual else f"{label}, {spec.window_tokens} tokens",
        **column.origin,
        "window_tokens": spec.window_tokens,
        "windows": len(ids),
        "tokens": int(ids.size),
        "add_bos_token": add_bos_token,
        "first_token_ids": ids[0, :8].tolist(),
        "token_ids_sha256": ids_sha256(ids),
    }
    return Windows(ids, clusters, len(ids) == total, protocol)


def text_column(path: str | None, key: str = "eval.runs.text.path") -> Column:
    """The one text of a UTF-8 file that a key of the command line names, of the embedded text where none is given.

    Raises:
        FcEvalError: the file is missing, cannot be read, or is not UTF-8.
    """
    if path is None:
        from fc_eval.evaluate.embedded.text import embedded_text

        content = embedded_text().encode("utf-8")
        origin = {"dataset": "pydoc_data.topics", "where": "embedded"}
    else:
        file = local_text(path, key)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise FcEvalError(f"text file {path!r} cannot be read: {error.strerror}") from None
        origin = {"dataset": file.name, "where": "file"}
    # Bytes, not lines: the tokens are those of the text as it is, CRLF and all, and the digest is that of the file.
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FcEvalError(f"text file {path!r} is not UTF-8 (byte {error.start}): convert it first") from None
    sha256 = hashlib.sha256(content).hexdigest()
    return Column([text], {**origin, "config": None, "split": None, "revision": None, "text_sha256": sha256})


def _crops(
    documents: list[str], tokenizer: Any, spec: WindowSpec, add_bos_token: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """C4 of GPTQ: draws a document until one is longer than the window, then an offset; its own generator, seed 0.

    A document of exactly the window's length is passed over: GPTQ's own condition lets it through and then cannot
    draw an offset, so no published number ever used one.
    """
    window = spec.window_tokens
    generator = random.Random(0)
    lengths: dict[int, int] = {}
    long: dict[int, list[int]] = {}
    ids, clusters = [], []
    for _ in range(min(C4_WINDOWS, spec.limit or C4_WINDOWS)):
        for _draw in range(MAX_DRAWS):
            index = generator.randint(0, len(documents) - 1)
            if index not in lengths:
                tokens = encode(tokenizer, documents[index], add_bos_token)
                lengths[index] = len(tokens)
                if len(tokens) > window:
                    long[index] = tokens
            if index in long:
                break
        else:
            raise FcEvalError(
                f"'c4' needs documents of more than {window} tokens, but none was drawn among {len(documents)} "
                f"(the longest seen has {max(lengths.values())}): give more documents or a smaller window_tokens"
            )
        start = generator.randint(0, lengths[index] - window - 1)
        ids.append(long[index][start : start + window])
        clusters.append(index)
    return np.array(ids, dtype=np.int64), np.array(clusters, dtype=np.int64)
