"""Matrix products of bf16 and fp16 on a CPU that has no instructions for them.

There torch multiplies such matrices in plain loops, many times slower than fp32 ones. The product of two bf16 (or fp16)
values is exact in fp32; so converting the operands, multiplying in fp32 and rounding the result once is also what those
instructions do, apart from the order of the sum.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

PRODUCTS = frozenset(
    {functional.linear, torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm}
)
# Names of torch's own tests for the instructions; a build without them decides for itself how it multiplies.
_TESTS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def lacks_instructions(dtype: torch.dtype) -> bool:
    """Whether torch says that this CPU has no instructions for products of this dtype."""
    test = getattr(torch.ops.mkldnn, _TESTS[dtype], None) if dtype in _TESTS else None
    return test is not None and torch.backends.mkldnn.is_available() and not test()  # type: ignore[no-untyped-call]


class _InFp32(TorchFunctionMode):
    """Products of CPU tensors of one dtype in fp32, the result rounded to that dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in PRODUCTS or not self._is_mine(args[0] if args else kwargs.get("input")):
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        wide = func(*map(self._widened, args), **{key: self._widened(value) for key, value in kwargs.items()})
        return wide.to(self._dtype) if out is None else out.copy_(wide)

    def _is_mine(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == self._dtype and value.device.type == "cpu"

    def _widened(self, value: Any) -> Any:
        return value.float() if self._is_mine(value) else value


def multiplies_in_fp32(model: torch.nn.Module) -> bool:
    """Whether `half_products` changes how this model multiplies; its first parameter says dtype and device."""
    parameter = next(model.parameters())
    return parameter.device.type == "cpu" and lacks_instructions(parameter.dtype)


@contextmanager
def half_products(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, products in the model's dtype run in fp32 where this CPU has no instructions for them."""
    if not multiplies_in_fp32(model):
        yield
        return
    with _InFp32(next(model.parameters()).dtype):
        yield
