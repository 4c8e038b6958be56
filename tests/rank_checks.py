"""What ranks do in tests of collectives: functions that `rank_group` calls in each of them."""

import os
import signal
import time
from collections import Counter

import torch
import torch.distributed as dist

from fc_eval.codec.base import Codec
from fc_eval.codec.select import get_codec
from fc_eval.collective.comm import parse_comm
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import get_reducer
from fc_eval.collective.traffic import traffic_of
from fc_eval.errors import FcEvalError


class CountedBytes:
    """Stands around torch's all-to-all and counts what it is told to send to others, independently of `Ranks.sent`."""

    def __init__(self) -> None:
        self.sent, self._all_to_all = 0, dist.all_to_all_single

    def __enter__(self) -> "CountedBytes":
        def counted(output, input, output_sizes, input_sizes, group):
            assert input.dtype == output.dtype == torch.uint8
            assert (sum(input_sizes), sum(output_sizes)) == (input.numel(), output.numel())
            self.sent += sum(size for to, size in enumerate(input_sizes) if to != dist.get_rank(group))
            return self._all_to_all(output, input, output_sizes, input_sizes, group=group)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._all_to_all


def reduce_cases(
    ranks: Ranks, cases: list[tuple[str, torch.Tensor]], codec: str, device: str = "cpu"
) -> list[dict[str, object]]:
    """Each case reduced by both reducers: values, shares of non-finite groups, bytes sent, and what was promised."""
    found = []
    for name, partials_WTH in cases:
        comm, own = parse_comm(name), partials_WTH[ranks.rank].to(device)
        chosen: Codec = get_codec(codec, comm.formats, own.dtype, own.device)[0]
        traffic = traffic_of(comm, ranks.world_size, *own.shape, own.dtype)
        before, kept = Counter(ranks.sent), own.clone()
        with CountedBytes() as counted:
            wired = get_reducer("torch", ranks, own.device)(own, comm, chosen)
        by_stage = dict(ranks.sent - before)
        gathered = get_reducer("gathered", ranks, own.device)(own, comm, chosen)
        assert torch.equal(own.contiguous().view(torch.uint8), kept.contiguous().view(torch.uint8))
        assert wired.traffic == gathered.traffic == traffic
        found.append(
            {
                "torch": wired.values.cpu(),
                "gathered": gathered.values.cpu(),
                "torch_nonfinite": wired.nonfinite_groups.cpu(),
                "gathered_nonfinite": gathered.nonfinite_groups.cpu(),
                "sent": counted.sent,
                "by_stage": by_stage,
                "promised": {s.stage: n for s in traffic.stages if (n := s.bytes_per_rank[ranks.rank])},
            }
        )
    return found


def named_reducer(ranks: Ranks, name: str) -> str:
    """The name of the reducer that a name stands for."""
    return get_reducer(name, ranks, torch.device("cpu")).name


def disagree(ranks: Ranks, difference: str) -> str:
    """Agrees on one step, then one rank differs in a fact or in the step itself; what the error says."""
    ranks.agree("forward pass 5", {"shape": "[2, 24]", "comm": "int4"})
    columns = 25 if difference == "facts" and ranks.rank == 1 else 24
    step = 7 if difference == "step" and ranks.rank == 2 else 6
    try:
        ranks.agree(f"forward pass {step}", {"shape": f"[2, {columns}]", "comm": "int4"})
    except FcEvalError as error:
        return str(error)
    return "nothing"


def lose_rank_1(ranks: Ranks, ending: str) -> None:
    """Rank 1 dies, or does not come, while the others wait for it."""
    ranks.agree("forward pass 0", {})
    if ranks.rank == 1:
        if ending == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    ranks.agree("forward pass 1", {})
