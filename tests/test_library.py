"""`fc_eval.encode`, `decode` and `all_reduce`: any sound tensor gives the codec's bytes, any mistake one sentence."""

import functools
import warnings

import pytest
import torch
from conftest import random_values

import fc_eval
from fc_eval.codec.base import DTYPES
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.errors import FcEvalError
from fc_eval.wire import parse_format

CODEC, INT4 = ReferenceCodec(), parse_format("int4-g32")
X = random_values(0, 6, 96, dtype="bfloat16")
WIRE = CODEC.encode(X, INT4)


def all_codecs() -> list[str]:
    from fc_eval.codec.native import native_status

    return ["reference", *(["cpu"] if native_status()["cpu"] is None else [])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("codec", all_codecs())
@pytest.mark.parametrize("shape", [(576,), (6, 96), (2, 3, 96), (2, 1, 3, 1, 96), (1,), (0, 96), (2, 0, 96)])
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_leading_dimensions_are_rows(codec, shape, dtype):
    x = random_values(1, *shape).to(dtype)
    rows = x.reshape(-1, shape[-1])
    wire = fc_eval.encode(x, "int4-g32", codec)
    assert same_bits(wire, CODEC.encode(rows, INT4))
    y = fc_eval.decode(wire, "int4-g32", x.shape, dtype, codec)
    assert same_bits(y, CODEC.round_trip(rows, INT4).values.to(dtype).reshape(shape))


def imaginary_of_conjugate() -> torch.Tensor:
    """A real tensor whose memory holds the other sign (PyTorch's lazy negation)."""
    x = torch.complex(random_values(2, 6, 96), random_values(3, 6, 96)).conj().imag
    assert x.is_neg()
    return x


UNUSUAL = {
    "transposed": lambda: random_values(2, 96, 6).t(),
    "every second": lambda: random_values(2, 12, 192)[::2, ::2],
    "expanded row": lambda: random_values(2, 96).expand(6, 96),
    "expanded column": lambda: random_values(2, 6, 1).expand(6, 96),
    "negated view": imaginary_of_conjugate,
    "one negated column": lambda: imaginary_of_conjugate()[:, :1],
    "leaf with gradient": lambda: random_values(2, 6, 96).requires_grad_(),
    "part of a graph": lambda: random_values(2, 6, 96).requires_grad_() * 2,
    "parameter": lambda: torch.nn.Parameter(random_values(2, 6, 96)),
    "inference": lambda: torch.inference_mode()(lambda: random_values(2, 6, 96))(),
    "not aligned": lambda: random_values(2, 6 * 96 + 1)[1:].view(6, 96),
}


@pytest.mark.parametrize("codec", all_codecs())
@pytest.mark.parametrize("kind", UNUSUAL)
def test_how_a_tensor_lies_in_memory_does_not_matter(kind, codec):
    x = UNUSUAL[kind]()
    before = x.detach().clone()
    plain = x.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
    wire = fc_eval.encode(x, "int4-g32", codec)
    assert same_bits(wire, CODEC.encode(plain, INT4))
    assert not wire.requires_grad
    summed = fc_eval.all_reduce(x.unsqueeze(0).expand(2, -1, -1), "int4-g32", codec)
    assert same_bits(summed, fc_eval.all_reduce(torch.stack([plain, plain]), "int4-g32", "reference"))
    assert not summed.requires_grad
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("codec", all_codecs())
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_a_group_with_nan_or_inf_travels_as_canonical_nan(codec, dtype):
    x = random_values(4, 3, 96).to(dtype)
    x[0, 5], x[1, 40], x[2, 95] = float("inf"), float("-inf"), -float("nan")
    y = fc_eval.decode(fc_eval.encode(x, "int4-g32", codec), "int4-g32", x.shape, dtype, codec)
    broken = torch.zeros(3, 96, dtype=torch.bool)
    broken[0, :32] = broken[1, 32:64] = broken[2, 64:] = True
    assert torch.equal(y.isnan(), broken)
    integer, canonical = {
        torch.bfloat16: (torch.int16, 0x7FC0),
        torch.float16: (torch.int16, 0x7E00),
        torch.float32: (torch.int32, 0x7FC00000),
    }[dtype]
    assert (y.view(integer)[broken] == canonical).all()


@pytest.mark.parametrize("codec", all_codecs())
def test_wire_bytes_may_lie_anywhere_and_have_any_shape(codec):
    decode = functools.partial(fc_eval.decode, fmt="int4-g32", shape=(6, 96), dtype=torch.bfloat16, codec=codec)
    expected = fc_eval.decode(WIRE, "int4-g32", [6, 96], torch.bfloat16, "reference")
    assert same_bits(decode(torch.cat([WIRE[:1], WIRE])[1:]), expected)
    assert same_bits(decode(WIRE.view(2, -1)), expected)
    assert same_bits(decode(torch.stack([WIRE, WIRE], dim=1)[:, 0]), expected)


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors call themselves a prototype
        return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (lambda: [1.0, 2.0], "the values are a list: expected one torch.Tensor"),
        (lambda: X.float().numpy(), "the values are a ndarray: expected one torch.Tensor"),
        (lambda: None, "the values are a NoneType"),
        (lambda: X.to("meta"), "the values are on the meta device"),
        (sparse, "the values are a sparse_coo tensor: expected a dense one"),
        (nested, "the values are a nested tensor: expected a dense one"),
        (lambda: X.double(), "dtype torch.float64 cannot be communicated"),
        (lambda: X.int(), "dtype torch.int32 cannot be communicated"),
        (lambda: X > 0, "dtype torch.bool cannot be communicated"),
        (lambda: torch.zeros(2, 3, dtype=torch.complex64), "dtype torch.complex64 cannot be communicated"),
        (lambda: X.to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn cannot be communicated"),
        (lambda: torch.tensor(1.0), r"values of shape \[\] have no groups"),
        (lambda: torch.zeros(2, 0), r"values of shape \[2, 0\] have no groups"),
        (lambda: torch.zeros(0), r"values of shape \[0\] have no groups"),
        (lambda: torch.zeros(0, 0), r"values of shape \[0, 0\] have no groups"),
    ],
)
def test_values_that_cannot_be_encoded(x, message):
    with pytest.raises(FcEvalError, match=message):
        fc_eval.encode(x(), "int4-g32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wire": WIRE.tolist()}, "the wire bytes are a list"),
        ({"wire": bytes(WIRE.numpy())}, "the wire bytes are a bytes"),
        ({"wire": WIRE.to("meta")}, "the wire bytes are on the meta device"),
        ({"wire": WIRE[:-1]}, "wire bytes are 639 of torch.uint8: expected 640"),
        ({"wire": torch.cat([WIRE, WIRE[:1]])}, "wire bytes are 641 of torch.uint8: expected 640"),
        ({"wire": WIRE[:0]}, "wire bytes are 0 of torch.uint8"),
        ({"wire": WIRE.view(torch.int8)}, "wire bytes are 640 of torch.int8: expected 640 of torch.uint8"),
        ({"wire": WIRE.float()}, "of torch.float32"),
        ({"fmt": "int8-g32"}, "wire bytes are 640 of torch.uint8: expected"),
        ({"shape": (30, 96)}, "wire bytes are 640 of torch.uint8: expected"),
        ({"shape": (6, -96)}, r"values of shape \[6, -96\] have no groups"),
        ({"shape": (6, 0)}, r"values of shape \[6, 0\] have no groups"),
        ({"shape": (6.0, 96)}, r"values of shape \[6.0, 96\] have no groups"),
        ({"shape": ()}, r"values of shape \[\] have no groups"),
        ({"shape": 576}, "values of shape 576 have no groups"),
        ({"shape": "96"}, "values of shape '96' have no groups"),
        ({"shape": None}, "values of shape None have no groups"),
        ({"dtype": "bf16"}, "dtype bf16 cannot be communicated: expected torch.bfloat16"),
        ({"dtype": torch.float64}, "dtype torch.float64 cannot be communicated"),
        ({"dtype": None}, "dtype None cannot be communicated"),
        ({"dtype": [1]}, r"dtype \[1\] cannot be communicated"),
        ({"codec": None}, "unknown codec 'None'"),
        ({"codec": ["cpu"]}, "unknown codec"),
        ({"codec": "gpu"}, "unknown codec 'gpu'"),
        ({"fmt": None}, "unknown format 'None'"),
        ({"fmt": 4}, "unknown format '4'"),
    ],
)
@pytest.mark.parametrize("codec", all_codecs())
def test_bytes_that_cannot_be_decoded(changes, message, codec):
    call = {"wire": WIRE, "fmt": "int4-g32", "shape": (6, 96), "dtype": torch.bfloat16, "codec": codec}
    assert fc_eval.decode(**call).shape == (6, 96)
    with pytest.raises(FcEvalError, match=message):
        fc_eval.decode(**(call | changes))


@pytest.mark.parametrize(
    ("partials", "message"),
    [
        (lambda: [X, X], "the partial sums are a list: expected one torch.Tensor"),
        (lambda: X, r"partial sums of shape \[6, 96\] cannot be reduced: expected \[ranks, tokens, hidden\]"),
        (lambda: torch.zeros(0, 2, 96), r"shape \[0, 2, 96\] cannot be reduced"),
        (lambda: torch.zeros(2, 2, 0), r"shape \[2, 2, 0\] cannot be reduced"),
        (lambda: torch.zeros(2, 2, 96, dtype=torch.int8), "dtype torch.int8 cannot be communicated"),
        (lambda: torch.zeros(2, 2, 96, device="meta"), "the partial sums are on the meta device"),
    ],
)
@pytest.mark.parametrize("comm", ["int4", "plain", "fp32_ordered", "one_step:int8"])
def test_partial_sums_that_cannot_be_reduced(partials, message, comm):
    with pytest.raises(FcEvalError, match=message):
        fc_eval.all_reduce(partials(), comm)


@pytest.mark.parametrize("comm", ["int4", "plain", "fp32_ordered", "one_step:int8", "ring:int4"])
def test_no_tokens_reduce_to_no_tokens(comm):
    assert fc_eval.all_reduce(torch.zeros(3, 0, 96), comm).shape == (0, 96)


@pytest.mark.parametrize("given", ["smollm2", None, {"name": "x"}])
def test_load_model_wants_a_config(given):
    with pytest.raises(FcEvalError, match="expected a ModelConfig"):
        fc_eval.load_model(given)
