"""Lets an evaluation watch what quantized communication does to each layer, without knowing of communication.

It runs the model in its own ways (`LayerProbe.isolated`, `LayerProbe.accumulated`) and hands pairs of tensors to the
callables that it is given: what was meant, and what arrived.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from fc_eval.codec.base import Codec
from fc_eval.codec.faults import faults_of
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import BASELINE
from fc_eval.collective.stages import STAGES, can_be_staged, reduce_with_one_stage
from fc_eval.errors import FcEvalError
from fc_eval.parallel.emulate import Attachment, Reduce
from fc_eval.parallel.site import Site
from fc_eval.wire.format import WireFormat

# (site, part, exact, found, counts): two tensors of one shape; int64 [5] of saturated codes, saturated groups, groups
# of zero range, non-finite groups and all groups, where something was encoded.
Observe = Callable[[str, str, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
ObserveOutput = Callable[[str, torch.Tensor], None]

OUTPUT = "output"
# The output of a layer of whose all-reduce one stage quantizes.
ALONE = {"reduce": "reduce_only", "gather": "gather_only"}


class LayerProbe:
    """Watches the sites of an attachment under the comms that these have when it is made.

    Attributes:
        layers: of each site `site` (its name), `kind`, `layer`, `hidden` and `comm` (full name).
        notes: what has no meaning for these comms, in words.

    Raises:
        FcEvalError: real ranks, each of which has its own partial sum alone, or W = 1, where nothing is reduced.
    """

    def __init__(self, attachment: Attachment) -> None:
        if attachment.reducer is not None:
            raise FcEvalError("layer errors need the partial sums of all ranks in one process: use exec=emulated")
        if attachment.world_size == 1:
            raise FcEvalError("layer errors need at least 2 ranks, but tp=1: nothing is reduced")
        self._attachment, self._comms = attachment, attachment.comms
        self.layers: tuple[dict[str, Any], ...] = tuple(
            {
                "site": site.name,
                "kind": site.kind,
                "layer": site.layer,
                "hidden": site.out_features,
                "comm": self._comms[site.name].name,
            }
            for site in attachment.sites
        )
        unstaged = dict.fromkeys(c.algorithm for c in self._comms.values() if not can_be_staged(c))
        self.notes: tuple[str, ...] = tuple(
            f"{algorithm} sends sums of several ranks, so its stages are not measured apart, only the layers' outputs"
            for algorithm in unstaged
        )

    @contextmanager
    def isolated(self, observe: Observe) -> Iterator[None]:
        """The model as the baseline; `observe` gets each stage's own error and the output of each all-reduce.

        Parts: 'reduce' (each rank's partial sum as it is sent, [T, H], W times), 'reduce_only' (the output when only
        this stage quantizes), 'gather' (the exact sum as it is sent, which is the output when only this stage
        quantizes), and 'output' (the output of the whole all-reduce beside the baseline's).
        """

        def between(site: Site, partials_WTH: torch.Tensor, own: Reduce) -> torch.Tensor:
            exact_TH = own(site, partials_WTH)
            comm = self._comms[site.name].at(partials_WTH.shape[1])
            codec = self._attachment.codec_of(comm, partials_WTH)
            stages = STAGES.get(comm.algorithm, ())
            if "reduce" in stages:
                assert comm.reduce is not None
                for partial_TH in partials_WTH:
                    observe(site.name, "reduce", partial_TH, *_sent(partial_TH, comm.reduce, codec))
                found_TH = reduce_with_one_stage(partials_WTH, comm, codec, "reduce")
                observe(site.name, ALONE["reduce"], exact_TH, found_TH, None)
            if "gather" in stages:
                assert comm.gather is not None
                observe(site.name, "gather", exact_TH, *_sent(exact_TH, comm.gather, codec))
            observe(site.name, OUTPUT, exact_TH, all_reduce(partials_WTH, comm, codec).values, None)
            return exact_TH

        with self._attachment.using(BASELINE), self._attachment.reducing(between):
            yield

    def accumulated(self, stages: bool) -> Mapping[str, Callable[[ObserveOutput], AbstractContextManager[None]]]:
        """By part, the model under its comms ('output'), or with one stage quantized in every layer.

        Args:
            stages: whether to offer the latter; only where several stages quantize and can be told apart.
        """
        passes: dict[str, Callable[[ObserveOutput], AbstractContextManager[None]]] = {OUTPUT: self._as_it_is}
        comms = self._comms.values()
        if stages and not self.notes and any(len(STAGES[comm.algorithm]) > 1 for comm in comms):
            passes |= {part: partial(self._one_stage, stage) for stage, part in ALONE.items()}
        return passes

    @contextmanager
    def _as_it_is(self, observe: ObserveOutput) -> Iterator[None]:
        def between(site: Site, partials_WTH: torch.Tensor, own: Reduce) -> torch.Tensor:
            values_TH = own(site, partials_WTH)
            observe(site.name, values_TH)
            return values_TH

        with self._attachment.reducing(between):
            yield

    @contextmanager
    def _one_stage(self, stage: str, observe: ObserveOutput) -> Iterator[None]:
        def between(site: Site, partials_WTH: torch.Tensor, own: Reduce) -> torch.Tensor:
            comm = self._comms[site.name].at(partials_WTH.shape[1])
            codec = self._attachment.codec_of(comm, partials_WTH)
            values_TH = reduce_with_one_stage(partials_WTH, comm, codec, stage)
            observe(site.name, values_TH)
            return values_TH

        # The baseline's counts are forgotten when the block ends: these calls are none of the model as it is.
        with self._attachment.using(BASELINE), self._attachment.reducing(between):
            yield


def _sent(x_TH: torch.Tensor, fmt: WireFormat, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives of a message, fp32, and the counts of its groups."""
    arrived = codec.round_trip(x_TH, fmt)
    faults = faults_of(x_TH, fmt)
    return arrived.values, torch.cat([faults[:3], arrived.nonfinite_groups.view(1).to(faults), faults[3:]])
