"""fc_eval: what quantized tensor-parallel communication costs in accuracy and wins in time.

    wire = fc_eval.encode(x_TH, "int4-g128")
    y_TH = fc_eval.decode(wire, "int4-g128", x_TH.shape, x_TH.dtype)
    y_TH = fc_eval.all_reduce(partials_WTH, "int4_int8")
    with fc_eval.communicate(model, "int4", tp=4):
        model(input_ids)

Importing the package loads no tensor library; the first use of one of these names does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fc_eval.collective.comm import Comm, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.wire import WireFormat, parse_format

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fc_eval.library import all_reduce, decode, encode
    from fc_eval.models.load import load_model
    from fc_eval.parallel.emulate import communicate
    from fc_eval.tensor_parallel import load_tensor_parallel

__all__ = [
    "Comm",
    "FcEvalError",
    "WireFormat",
    "all_reduce",
    "communicate",
    "decode",
    "encode",
    "load_model",
    "load_tensor_parallel",
    "parse_comm",
    "parse_format",
]

_LAZY = {
    "encode": "fc_eval.library",
    "decode": "fc_eval.library",
    "all_reduce": "fc_eval.library",
    "communicate": "fc_eval.parallel.emulate",
    "load_model": "fc_eval.models.load",
    "load_tensor_parallel": "fc_eval.tensor_parallel",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fc_eval' has no attribute {name!r}")
