"""GGUF files: dequantized once into an ordinary checkpoint folder, which every later run loads in a second.

transformers needs about 20 seconds to read a 135M-parameter GGUF file, most of it spent on the vocabulary; a sweep
starts one process per run. The folder's name holds all that decides its contents: the file, the dtype, the reader.
"""

import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from fc_eval.errors import FcEvalError
from fc_eval.models.cache import locked
from fc_eval.models.checkpoint import check_gguf
from fc_eval.models.progress import bars_on_terminals_only
from fc_eval.models.reasons import no_gguf
from fc_eval.results.fingerprint import cache_dir, file_sha256


def checkpoint_of(file: Path, dtype: torch.dtype) -> Path:
    """The checkpoint folder of a GGUF file's weights, dequantized to `dtype`; made in the cache when it is not there.

    Raises:
        FcEvalError: the file is missing, corrupt or of an architecture that transformers cannot read, or disk is full.
    """
    if not file.is_file():
        raise FcEvalError(no_gguf(file))
    reader = f"transformers{transformers.__version__}-gguf{version('gguf')}"
    name = f"{file.stem}-{file_sha256(file)[:16]}-{str(dtype).removeprefix('torch.')}-{reader}"
    folder = cache_dir() / "converted" / name
    with locked(folder):
        if not folder.is_dir():
            check_gguf(file)
            print(f"{file.name}: dequantizing once into {folder}", flush=True)
            _convert(file, dtype, folder)
    return folder


def _convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
    # Newer versions keep weights packed where a kernel exists, unless they are told to dequantize.
    config_type = getattr(transformers, "GgufConfig", None)
    extra = {"quantization_config": config_type(dequantize=True)} if config_type else {}
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        with bars_on_terminals_only():
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, **extra)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # the readers have no common error type, and the tokenizers library raises this one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FcEvalError(
            f"{file} cannot be read as GGUF by transformers {transformers.__version__}: {reason}"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # what is saved is plain
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name + ".") as scratch:
        whole = Path(scratch) / "whole"
        with bars_on_terminals_only():
            model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        shutil.move(whole, folder)
