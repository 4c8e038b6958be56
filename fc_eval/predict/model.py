"""The cost model: times from counts and rates, in seconds. Nothing overlaps.

    TTFT       = layers x (products + attention + rest + 2 all-reduces) + embedding + head
    product    = max(operations / rate of a product, bytes / memory rate)
    attention  = operations / rate of attention
    rest       = bytes / memory rate
    all-reduce = fixed + steps x step_us + wire bytes of the busiest rank / link rate + codec bytes / codec rate

Wire bytes, stages and steps are those of `fc_eval.collective.traffic` and `fc_eval.cost`. Codec bytes are what a fused
kernel must move through the memory of one GPU: its values read and written once, what it sends written and what it
receives (as much) read. An unquantized all-reduce is NCCL's ring: 2 (W - 1) steps, no codec. What is left out: links
that ranks share (a bridge between sockets), kernels that wait for launches, overlap of link and codec.
"""

from dataclasses import dataclass
from functools import cached_property

from fc_eval.collective.comm import Comm
from fc_eval.collective.traffic import traffic_of
from fc_eval.cost import steps_of
from fc_eval.predict.machine import Machine
from fc_eval.predict.work import (
    INT8_WIDTH,
    WIDTH,
    Prefill,
    Product,
    attention_flops,
    embedding_bytes,
    head_product,
    layer_products,
    rest_bytes,
)

DTYPE = "bf16"


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce: seconds of its latency, on the link and in the codec."""

    latency_s: float
    link_s: float
    codec_s: float
    wire_bytes: int
    bits: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.latency_s + self.link_s + self.codec_s


@dataclass(frozen=True)
class Ttft:
    """A predicted time to first token by its parts, in seconds; `call` is one of its all-reduces."""

    gemm_s: float
    attention_s: float
    rest_s: float
    comm_s: float
    ends_s: float
    call: AllReduce

    @cached_property
    def total_s(self) -> float:
        """The time to first token."""
        return self.gemm_s + self.attention_s + self.rest_s + self.comm_s + self.ends_s

    @property
    def other_s(self) -> float:
        """What is neither a product of the layers, attention nor communication."""
        return self.rest_s + self.ends_s

    @property
    def comm_share(self) -> float:
        """Share of communication."""
        return self.comm_s / self.total_s


def all_reduce(comm: Comm, world_size: int, rows: int, hidden: int, machine: Machine) -> AllReduce:
    """One all-reduce of [rows, hidden] values in bf16.

    Raises:
        FcEvalError: a comm that W ranks cannot do.
    """
    ran = comm.at(rows)
    traffic = traffic_of(ran, world_size, rows, hidden, DTYPE)
    steps = steps_of(ran, traffic, world_size)
    wire = traffic.wire_bytes_per_rank
    if not ran.is_quantized:
        latency_s = machine.seconds("nccl_us") + steps * machine.seconds("step_us")
        return AllReduce(latency_s, wire / machine.per_second("nccl"), 0.0, wire, 8.0 * WIDTH)
    latency_s = machine.seconds("fused_us") + steps * machine.seconds("step_us")
    codec_bytes = 2 * rows * hidden * WIDTH + 2 * wire
    codec_s = codec_bytes / machine.per_second("codec")
    return AllReduce(latency_s, wire / machine.per_second("fused"), codec_s, wire, traffic.effective_bits)


def predict(prefill: Prefill, comm: Comm, machine: Machine) -> Ttft:
    """The time to first token of one prefill under a comm.

    Raises:
        FcEvalError: a comm that W ranks cannot do, or W8A8 weights on a machine whose INT8 rate is not known.
    """
    shape = prefill.shape
    what, width = ("gemm_int8", INT8_WIDTH) if prefill.weights == "w8a8" else ("gemm_bf16", WIDTH)
    memory = machine.per_second("memory")
    call = all_reduce(comm, prefill.world_size, prefill.rows, shape.hidden, machine)
    head_s = _product_s(head_product(prefill), WIDTH, machine.per_second("gemm_bf16"), memory)
    products_s = sum(_product_s(each, width, machine.per_second(what), memory) for each in layer_products(prefill))
    return Ttft(
        gemm_s=shape.layers * products_s,
        attention_s=shape.layers * attention_flops(prefill) / machine.per_second("attention"),
        rest_s=shape.layers * rest_bytes(prefill) / memory,
        comm_s=2 * shape.layers * call.total_s,
        ends_s=embedding_bytes(prefill) / memory + head_s,
        call=call,
    )


def _product_s(product: Product, width: int, flops_per_s: float, bytes_per_s: float) -> float:
    return max(product.flops / flops_per_s, product.nbytes(width) / bytes_per_s)
