"""The arithmetic of WIRE.md runs as it is written, in a compiled model too."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a function out of `torch.compile`: a compiled caller runs it eagerly, between two graphs.

    Inductor contracts multiplications and additions and leaves out the rounding to 16 bits between fused operations,
    so that other bits would come out. Under `fullgraph=True` torch.compile refuses the call and names the reason.
    """
    reason = "compiled arithmetic rounds elsewhere than WIRE.md says; this part of the model has to run eagerly"
    kept: Callable[P, R] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return kept
