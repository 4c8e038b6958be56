"""Whether a checkpoint on disk is whole, asked before any of it is loaded; every defect is one sentence."""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from safetensors import SafetensorError, safe_open

from fc_eval.errors import FcEvalError
from fc_eval.models.reasons import no_gguf

INDEX = "model.safetensors.index.json"
# What transformers reads a tokenizer from; one of them is enough.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
GGUF_MAGIC = b"GGUF"


def check_folder(folder: Path) -> tuple[Path, ...]:
    """Makes sure that a folder holds a config, whole safetensors files and a tokenizer.

    Returns:
        The files with weights, sorted.

    Raises:
        FcEvalError: something is missing, or a file is truncated or corrupt.
    """
    _read_json(folder / "config.json", "a checkpoint folder has one; give the folder that holds it")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise FcEvalError(
            f"{folder} has no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}; "
            "save one there with tokenizer.save_pretrained"
        )
    weights = _weight_files(folder)
    for file in weights:
        try:
            with safe_open(file, framework="numpy"):  # reads the header and compares it with the file's length
                pass
        except SafetensorError as error:
            raise FcEvalError(f"{file} is truncated or corrupt ({error}): fetch or copy it again") from None
    return weights


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / INDEX).is_file():
        index = _read_json(folder / INDEX, "it names the weight files")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise FcEvalError(f"{folder / INDEX} has no weight_map of file names: fetch or copy it again")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise FcEvalError(
                f"{folder} lacks {len(missing)} of the {len(names)} weight files that {INDEX} names "
                f"({', '.join(missing[:3])}): fetch or copy them again"
            )
        return tuple(folder / name for name in names)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    raise FcEvalError(
        f"{folder} has no model.safetensors and no {INDEX}: weights are read from safetensors (or a .gguf file) only, "
        "because other formats can run code; convert them with model.save_pretrained"
    )


def _read_json(file: Path, why: str) -> dict[str, Any]:
    if not file.is_file():
        raise FcEvalError(f"{file.parent} has no {file.name}: {why}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FcEvalError(f"{file} is truncated or corrupt ({error}): fetch or copy it again") from None
    if not isinstance(value, dict):
        raise FcEvalError(f"{file} holds no mapping: fetch or copy it again")
    return value


def check_gguf(file: Path) -> None:
    """Makes sure that a file is GGUF, and as long as its own header says.

    Raises:
        FcEvalError: it is missing, another format, truncated or corrupt.
    """
    if not file.is_file():
        raise FcEvalError(no_gguf(file))
    with file.open("rb") as stream:
        if stream.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise FcEvalError(f"{file} is not a GGUF file (it does not start with 'GGUF'): fetch or copy it again")
    try:
        GGUFReader(file)  # maps every tensor
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise FcEvalError(f"{file} is truncated or corrupt ({error}): fetch or copy it again") from None
