"""The one sum of every quantized algorithm: decoded contributions in fp32, from +0, in rank order."""

from collections.abc import Iterable

import torch

from fc_eval.codec.base import Codec, RoundTrip
from fc_eval.codec.canonical import canonical_nan_
from fc_eval.codec.hadamard import in_rotated_space, rotate, rotated
from fc_eval.wire.format import WireFormat


def sum_decoded(contributions_TH: Iterable[torch.Tensor], fmt: WireFormat, codec: Codec) -> RoundTrip:
    """Encodes and decodes every contribution [T, H], the receiver's own included, and adds in the order given.

    Args:
        contributions_TH: at least one, all [T, H] in the same dtype (bf16, fp16 or fp32).
        fmt: the format in which each travels.
        codec: covers it.

    Returns:
        The sum [T, H] in fp32, not rounded to the input dtype yet, and the non-finite groups of all contributions.
    """
    if fmt.hadamard:  # the rotation is undone once, on the sum
        turned = (rotated(contribution) for contribution in contributions_TH)
        found = sum_decoded(turned, in_rotated_space(fmt), codec)
        return RoundTrip(canonical_nan_(rotate(found.values)), found.nonfinite_groups)
    total: RoundTrip | None = None
    for contribution in contributions_TH:
        received = codec.round_trip(contribution, fmt)
        if total is None:
            total = received  # no message decodes to -0, so +0 added to the first is the first
        else:
            total = RoundTrip(total.values.add_(received.values), total.nonfinite_groups + received.nonfinite_groups)
    assert total is not None
    return total
