"""Which codec a run uses. A codec that was asked for by name and cannot do the work is an error, never a fallback.

`LOADERS` is the one place where codecs are registered, the best first. A loader returns the codec, or raises
`CodecUnavailable` with the reason why it does not exist here.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.peers.table import PeerFormat
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.errors import FcEvalError, unknown
from fc_eval.wire.format import WireFormat

NATIVE_MODULE = "fc_eval.codec.native"


class CodecUnavailable(Exception):  # noqa: N818 - a fact about this installation, not an error
    """Why a codec does not exist in this installation or on this machine, in a few words."""


def _load_native(factory: str) -> Codec:
    """Calls `factory()` of the native module, which returns a codec or raises `CodecUnavailable`."""
    native = importlib.import_module(NATIVE_MODULE) if importlib.util.find_spec(NATIVE_MODULE) else None
    make: Callable[[], Codec] | None = getattr(native, factory, None)
    if make is None:
        raise CodecUnavailable("not part of this installation")
    return make()


LOADERS: dict[str, Callable[[], Codec]] = {
    "cuda": lambda: _load_native("cuda_codec"),
    "cpu": lambda: _load_native("cpu_codec"),
    "reference": ReferenceCodec,
}


@functools.cache
def _load(name: str) -> Codec | str:
    """The codec, or the reason why there is none."""
    try:
        return LOADERS[name]()
    except CodecUnavailable as reason:
        return str(reason)


def codecs_available() -> dict[str, str | None]:
    """{codec name: None where it can be used, otherwise the reason why not}."""
    return {name: loaded if isinstance(loaded := _load(name), str) else None for name in LOADERS}


def _why_not(
    name: str, fmts: Iterable[WireFormat | PeerFormat], dtype: torch.dtype, device: torch.device
) -> Codec | str:
    codec = _load(name)
    if isinstance(codec, str):
        return codec
    for fmt in fmts:
        if not isinstance(fmt, PeerFormat):
            reason = codec.why_not(fmt, dtype, device)
        else:  # its arithmetic is PyTorch, as the reference is
            reason = None if name == "reference" else f"{fmt.name} is another system's format, which it does not cover"
        if reason is not None:
            return reason
    return codec


def _flushes_subnormals() -> bool:
    return bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 0.5 == 0)


def get_codec(
    name: str, fmts: Iterable[WireFormat | PeerFormat], dtype: torch.dtype, device: torch.device | str
) -> tuple[Codec, str]:
    """The codec for values of `dtype` on `device` in all of the formats.

    Args:
        name: 'auto' (the best that covers everything) or a key of `LOADERS`.
        fmts: the formats that will be asked of it.
        dtype: of the partial sums.
        device: where they are.

    Returns:
        The codec and a note for the record: which one it is, and why better ones were passed over.

    Raises:
        FcEvalError: an unknown name, a codec that is missing or does not cover a format, or none that does; or this
            thread flushes subnormals to zero.
    """
    if not isinstance(name, str) or name not in ("auto", *LOADERS):
        raise unknown("codec", str(name), ["auto", *LOADERS])
    fmts, device = tuple(fmts), torch.device(device)
    if device.type == "cpu" and _flushes_subnormals():
        raise FcEvalError(
            "the processor flushes subnormal numbers to zero, which WIRE.md keeps: call torch.set_flush_denormal(False)"
        )
    passed_over: list[str] = []
    for candidate in LOADERS if name == "auto" else [name]:
        found = _why_not(candidate, fmts, dtype, device)
        if not isinstance(found, str):
            because = f" ({'; '.join(passed_over)})" if passed_over else ""
            return found, f"codec {candidate}{because}"
        passed_over.append(f"{candidate}: {found}")
    if name != "auto":
        raise FcEvalError(f"codec {passed_over[0]}; expected one that covers the run: use codec=auto or mend this")
    raise FcEvalError(f"no codec covers the run ({'; '.join(passed_over)}): choose another format or dtype")
