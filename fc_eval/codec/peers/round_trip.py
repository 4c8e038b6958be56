"""The way into the formats of other systems: which module's arithmetic a row of the table has."""

from collections.abc import Callable

import torch

from fc_eval.codec.base import RoundTrip
from fc_eval.codec.peers import channelwise, flashinfer, quickreduce, tensorrt_llm, topk, vllm, zeropp
from fc_eval.codec.peers.table import PeerFormat

SYSTEMS: dict[str, Callable[[torch.Tensor, PeerFormat, int], RoundTrip]] = {
    "quickreduce": quickreduce.round_trip,
    "flashinfer": flashinfer.round_trip,
    "vllm": vllm.round_trip,
    "tensorrt_llm": tensorrt_llm.round_trip,
    "zeropp": zeropp.round_trip,
    "channelwise": channelwise.round_trip,
    "topk": topk.round_trip,
}


def round_trip(x: torch.Tensor, fmt: PeerFormat, group: int) -> RoundTrip:
    """What values come back as.

    Args:
        x: in the dtype that the system sums in, any shape, contiguous; flattened they are whole groups.
        fmt: the format.
        group: values with one scale.

    Returns:
        Values of the shape and dtype of `x`, and how many groups were non-finite (int64 []), all of whose values are
        NaN.
    """
    found = SYSTEMS[fmt.system](x.reshape(-1), fmt, group)
    return RoundTrip(found.values.view(x.shape), found.nonfinite_groups)
