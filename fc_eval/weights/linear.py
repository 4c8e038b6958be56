"""A linear layer with INT8 weights, and how the layers of a decoder become such.

Each output feature has one scale, that of the whole weight's row, and each token one scale of its own at every call.
Under tensor parallelism a rank of a row-parallel layer has K / W of the input features: it quantizes the slice of the
activations that it holds with that slice's own scale, which needs no communication, and keeps the codes and the scales
of the whole weight, so that one checkpoint serves every W. That is what serving systems do: `SmoothQuantRowLinear` of
TensorRT-LLM (`tensorrt_llm/quantization/layers.py`), and vLLM's W8A8 INT8 scheme with dynamic scales per token.
"""

import types
from collections.abc import Iterator

import torch
from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.weights.int8 import MAX_FEATURES, Rows, codes_of_rows, product, scale_of_rows

# What holds a layer's scales, also in a layer that is to become INT8.
SCALE = "weight_scale"


class W8A8Linear(nn.Linear):
    """A linear layer whose weight is int8 [N, K] with `weight_scale` fp32 [N]; made by `quantize_` alone.

    The bias is added to the rounded product, as a row-parallel layer adds it to the sum over ranks.

    Attributes:
        dtype: of inputs and outputs.
    """

    dtype: torch.dtype
    weight_scale: torch.Tensor

    @property
    def rows(self) -> Rows:
        """The whole weight."""
        return Rows(self.weight, self.weight_scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N] in the dtype of the input."""
        y = product(input.reshape(-1, self.in_features), self.rows).view(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose arithmetic is known here: nn.Linear as it is, or with INT8 weights."""
    return type(module) in (nn.Linear, W8A8Linear) and type(module.weight) is nn.Parameter


def activation_dtype(module: nn.Linear) -> torch.dtype:
    """The dtype of a layer's inputs and outputs."""
    return module.dtype if isinstance(module, W8A8Linear) else module.weight.dtype


def linears(decoder: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of a decoder by name: all of its blocks. The head and the embeddings are outside or none.

    SmoothQuant quantizes these and leaves head and embeddings alone (`quantize_llama_like` of its repository).
    """
    return ((name, module) for name, module in decoder.named_modules() if isinstance(module, nn.Linear))


def keep_scales_(decoder: nn.Module) -> None:
    """Notes the scales of the whole weights, before ranks let go of their parts; `quantize_` uses them."""
    for _, module in linears(decoder):
        module.register_buffer(SCALE, scale_of_rows(module.weight), persistent=False)


def quantize_(decoder: nn.Module) -> None:
    """Gives the linear layers of a decoder INT8 weights, in place: hooks of a layer and references to it stay.

    Raises:
        FcEvalError: a layer of another kind, one whose weight is not in memory, or one with too many input features.
    """
    for name, module in linears(decoder):
        _check(name, module)
    for _, module in linears(decoder):
        _become_w8a8_(module)


def _become_w8a8_(module: nn.Linear) -> None:
    dtype, scale_N = module.weight.dtype, getattr(module, SCALE, None)
    if scale_N is None:
        scale_N = scale_of_rows(module.weight)
        module.register_buffer(SCALE, scale_N, persistent=False)
    module.weight = nn.Parameter(codes_of_rows(module.weight, scale_N), requires_grad=False)
    module.__class__ = W8A8Linear
    assert isinstance(module, W8A8Linear)
    module.dtype = dtype
    if hasattr(module, "_hf_hook"):  # accelerate's hook calls the forward that it found, which was nn.Linear's
        module._old_forward = types.MethodType(W8A8Linear.forward, module)  # type: ignore[assignment]


def _check(name: str, module: nn.Linear) -> None:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        raise FcEvalError(
            f"{name} is a {type(module).__module__}.{type(module).__name__} with a {type(module.weight).__name__}: "
            "weights=w8a8 quantizes plain linear layers in bf16, fp16 or fp32; load the model dequantized"
        )
    if module.weight.is_meta:
        raise FcEvalError(
            f"the weight of {name} is not in memory (offloaded): weights=w8a8 needs the whole model on GPUs or CPU; "
            "leave out model.device_map, or give it enough GPUs"
        )
    if module.in_features > MAX_FEATURES:
        raise FcEvalError(
            f"{name} has {module.in_features} input features: sums of INT8 products are exact in 32 bits up to "
            f"{MAX_FEATURES}"
        )
