"""The two extension modules of `cuda_ext`: loading them, and what crosses the boundary, which is integers only.

`fc_eval/_native` is the CPU codec, `fc_eval/_native_cuda` the CUDA codec. Either may be missing; `native_status` says
why.
"""

import functools
import importlib
from collections.abc import Mapping
from importlib import resources
from types import ModuleType

import torch

from fc_eval.codec.base import DTYPE_NAMES
from fc_eval.codec.format_ints import FormatInts, format_ints
from fc_eval.codec.select import CodecUnavailable
from fc_eval.errors import unknown

__all__ = ["EXTENSIONS", "FormatInts", "extension", "format_ints", "native_status", "row_contiguous", "view_of"]

EXTENSIONS = {"cpu": "fc_eval._native", "cuda": "fc_eval._native_cuda"}
# Written by the build (cuda_ext/CMakeLists.txt): "cpu: reason" and "cuda: reason", empty where it was built.
BUILD_NOTE = "_native_build.txt"

View = tuple[int, int, int, tuple[int, ...], tuple[int, ...], int]


@functools.cache
def _load(part: str) -> ModuleType | str:
    """The extension module, or the reason why it cannot be used."""
    try:
        module = importlib.import_module(EXTENSIONS[part])
    except ModuleNotFoundError:
        return f"not built: {_build_note(part)}"
    except ImportError as error:
        return f"built, but cannot be loaded: {error}"
    if part == "cuda":
        reason: str = module.why_no_device()
        return reason or module
    return module


def _build_note(part: str) -> str:
    note = resources.files("fc_eval") / BUILD_NOTE
    if not note.is_file():
        return "this installation was made without the native build; reinstall with a C++ compiler"
    reasons = dict(line.split(": ", 1) for line in note.read_text().splitlines() if ": " in line)
    return reasons.get(part) or "the file is missing from the installation; reinstall"


def native_status() -> dict[str, str | None]:
    """{'cpu' | 'cuda': None where the native codec can be used, otherwise the reason why not}."""
    return {part: loaded if isinstance(loaded := _load(part), str) else None for part in EXTENSIONS}


def extension(part: str) -> ModuleType:
    """The extension module 'cpu' or 'cuda'.

    Raises:
        CodecUnavailable: it was not built, or there is no device for it.
    """
    loaded = _load(part)
    if isinstance(loaded, str):
        raise CodecUnavailable(loaded)
    return loaded


def number_of(kind: str, name: str, table: Mapping[str, int]) -> int:
    """What the extension calls a dtype or an algorithm.

    Raises:
        FcEvalError: it has none of that name.
    """
    if name not in table:
        raise unknown(f"{kind} of a native codec", name, table)
    return table[name]


def view_of(tensor: torch.Tensor, module: ModuleType) -> View:
    """What the extension needs to know of a tensor, and to check it: no tensor library crosses the boundary."""
    name = DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    device: int = module.CPU_DEVICE if tensor.device.type == "cpu" else tensor.device.index
    behind = int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()
    dtype = number_of("dtype", name, module.DTYPES)
    return tensor.data_ptr(), dtype, device, tuple(tensor.shape), tensor.stride(), behind


def row_contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x` without its gradient, its last dimension contiguous and no stride negative; a copy only where it must be."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
