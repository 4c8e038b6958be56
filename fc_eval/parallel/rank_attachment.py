"""One rank's part of a model, whose row-parallel layers communicate with the other ranks of a group.

The emulated `Attachment` with another reduction: one partial sum per call instead of W. Beside the all-reduces, ranks
tell each other two things: before each forward pass what they are about to compute, and, when the counts are checked,
a checksum of all that came out. So ranks with different data, shapes or comms are an error and not a hang, and
different results on two ranks never become a number.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from fc_eval.collective.comm import Comm
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import EMULATES, get_reducer
from fc_eval.errors import FcEvalError
from fc_eval.parallel.arguments import arguments, hash_of, hash_of_tensors, tensors_among, text_of
from fc_eval.parallel.cache_history import caches_among, history_of, set_history
from fc_eval.parallel.emulate import Arm, Attachment
from fc_eval.parallel.policy import Policy
from fc_eval.parallel.row_parallel import RowParallelForward
from fc_eval.parallel.site import Site
from fc_eval.parallel.sites import find_decoder
from fc_eval.parallel.split import Split
from fc_eval.parallel.stand_in import StandIn
from fc_eval.parallel.stats import CommStats, Counts, add_groups

# Views of the same width, to sum bits as integers.
_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_CHECKSUM_FACTOR = 1_000_003
_ALONE = (
    "this model is one rank's part of a model, and it does not communicate: its communication was closed, or it is a "
    "copy; load it again with load_tensor_parallel on all ranks"
)


class RankAttachment(Attachment):
    """Communication of one rank, in force from the beginning until `close`; all ranks call its methods together.

    Attributes:
        ranks: the group.
        reducer: name of what reduces.
    """

    def __init__(
        self, model: nn.Module, comm: str | Comm | Policy, split: Split, ranks: Ranks, codec: str, reducer: str
    ) -> None:
        assert split.world_size == ranks.world_size
        self.ranks = ranks
        self._reducer = get_reducer(reducer, ranks, next(model.parameters()).device)
        self._checksum: torch.Tensor | int = 0
        self._steps = 0
        self._under_way = False  # whether a forward pass is going on that all ranks have agreed upon
        self._refused_within = 0
        self._outer: dict[str, Any] = {}  # what the model around the decoder was given
        # What the caches of this pass will have come from, and which part: another one may be in this process.
        self._history, self._name = "", ""
        self._summed: Arm | None = None  # the arm whose counts are those of all ranks
        super().__init__(model, comm, split, codec)
        self._stack = ExitStack()
        self._stack.enter_context(self._installed(model))
        if self.world_size > 1:
            self._name = ranks.gather(uuid4().hex)[0]
            together, decoder = _Together(self), find_decoder(model)
            # These stay: the part alone computes nothing. The first is before the one that counts: what is refused here
            # does not count.
            decoder.register_forward_pre_hook(together.before, with_kwargs=True, prepend=True)
            decoder.register_forward_hook(together.after, with_kwargs=True, always_call=True)
            if decoder is not model:
                model.register_forward_pre_hook(together.around, with_kwargs=True)
            self._stack.callback(together.end)

    @property
    def reducer(self) -> str:
        """Name of the reducer that this rank uses."""
        return self._reducer.name

    def close(self) -> None:
        """Ends the communication. The model stays the part of one rank: where W is above 1 it refuses to run alone.

        A forward pass that is under way raises an FcEvalError when it ends.
        """
        self._stack.close()

    def reset_stats(self) -> None:
        """Forgets all counts.

        Raises:
            FcEvalError: a forward pass is under way.
        """
        self._refuse_within_a_pass("reset_stats")
        super().reset_stats()
        self._checksum = 0

    def counts(self) -> Counts:
        """What all ranks of this group counted since the last reset; every rank calls this and gets the same.

        Raises:
            FcEvalError: a forward pass is under way.
        """
        self._refuse_within_a_pass("counts")
        forwards, tallies = super().counts()
        # Of the non-finite groups each rank has counted its own share.
        shares = self.ranks.gather({name: tally.nonfinite_groups for name, tally in tallies.items()})
        for name, tally in tallies.items():
            tally.nonfinite_groups = {}
            for share in shares:
                add_groups(tally.nonfinite_groups, share[name])
        return forwards, tallies

    def set_counts(self, counts: Iterable[Counts]) -> None:
        """Counts anew from the sum of what several groups counted."""
        super().set_counts(counts)
        self._summed = self._arm

    def stats(self) -> CommStats:
        """What happened on all ranks since the last reset; every rank calls this and gets the same.

        Raises:
            FcEvalError: a forward pass is under way.
        """
        arm = self._arm
        if arm is self._summed:
            return super().stats()
        forwards, tallies = self.counts()
        self._arm = replace(arm)
        self._arm.forwards, self._arm.tallies = forwards, tallies
        try:
            return super().stats()
        finally:
            self._arm = arm

    def check_calls(self) -> None:
        """Makes sure that every site was reduced once per forward pass, and that all ranks hold the same results.

        Raises:
            FcEvalError: otherwise, or a forward pass is under way.
            LostProcessError: an all-reduce was given up because another rank has ended or was late.
        """
        self._refuse_within_a_pass("check_calls")
        wrong = None
        try:
            super().check_calls()
        except FcEvalError as error:
            wrong = str(error)
        checksum = int(self._checksum)  # the device is through with all calls
        self._reducer.check()
        said = self.ranks.gather((wrong, checksum))
        for rank, (text, _) in enumerate(said):  # what one of them found ends all of them
            if text is not None:
                raise FcEvalError(f"rank {rank}: {text}")
        found = [checksum for _, checksum in said]
        different = [rank for rank, checksum in enumerate(found) if checksum != found[0]]
        if different:
            raise FcEvalError(
                f"rank {different[0]} holds other results than rank 0 (checksums of what the decoder gave differ): "
                "the ranks must run on devices of the same kind with the same number of threads"
            )

    def _make_arm(self, comm: str | Comm | Policy, codec: str) -> Arm:
        self._refuse_within_a_pass("set_comm or using")
        arm = super()._make_arm(comm, codec)
        if self.reducer != EMULATES:
            for one in set(arm.comms.values()):
                one.check_between_ranks()
        return arm

    def _refuse_within_a_pass(self, what: str) -> None:
        """Another rank may not do the same within its pass, and what the two then send each other does not fit."""
        if self._under_way:
            raise FcEvalError(
                f"{what} was called while a forward pass is under way on this rank, or after one was interrupted: call "
                "it between forward passes, on all ranks (after an interrupt load the model again)"
            )

    def _forwards(self, model: nn.Module) -> list[StandIn]:
        parts = [replace(site, in_features=site.in_features // self.world_size) for site in self.sites]
        return [RowParallelForward(self._targets[part.name], part, 1, self._reduce) for part in parts]

    def _all_reduce(self, site: Site, partials_WTH: torch.Tensor) -> torch.Tensor:
        (partial_TH,) = partials_WTH  # this rank's own
        if self.world_size > 1 and not self._under_way:
            raise FcEvalError(
                f"{site.name} was called outside of a forward pass of the model, so nobody knows whether the other "
                "ranks call it too: call the model"
            )
        comm = self._arm.comms[site.name]
        codec = self._codec(self._arm.codec, comm, partial_TH.dtype, partial_TH.device)
        reduced = self._reducer(partial_TH, comm, codec)
        self._arm.tallies[site.name].add(len(partial_TH), reduced)
        return reduced.values

    def around(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass of the model around the decoder: notes its arguments, some of which go no further."""
        self._outer = arguments(args, kwargs)

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass of the decoder: all ranks are about to compute the same.

        Compared are tensors by their bytes, caches by their length and history, and of the other arguments of the
        model and its decoder numbers, strings, enums, dtypes, and lists and mappings of them.

        Raises:
            FcEvalError: they are not, a cache holds what did not come from this communication, or a pass is under way.
            LostProcessError: another rank has ended, or has not come in time.
        """
        if self._under_way:
            self._refused_within += 1
        self._refuse_within_a_pass("the model")
        given, outer, self._outer = arguments(args, kwargs), self._outer, {}
        inputs = tensors_among(given)
        passed_on = {id(tensor) for tensor in inputs.values()}
        outer = {f"model {name}": value for name, value in outer.items() if id(value) not in passed_on}
        seen, others = hash_of_tensors(inputs | tensors_among(outer)), text_of(given | outer)
        first = inputs.get("input_ids", inputs.get("inputs_embeds", next(iter(inputs.values()), torch.empty(0))))
        caches = caches_among(given.values())
        # A rank's keys and values are its own heads'; that two caches belong together shows in what they came from.
        histories = [history_of(cache) for cache in caches]
        comms, dtypes = self._arm.comms, {str(module.weight.dtype) for module in self._targets.values()}
        facts = {
            "the comm": ", ".join(dict.fromkeys(comm.name for comm in comms.values())),
            "the hash of the layers' comms": hash_of(f"{site} {comm.name}" for site, comm in comms.items()),
            "the reducer": self.reducer,
            "the dtype of the row-parallel layers": ", ".join(sorted(dtypes)),
            "the input's shape": list(first.shape),
            "the hash of all inputs": seen,
            "what was given beside tensors": others,
            "the cache's length": ", ".join(str(int(cache.get_seq_length())) for cache in caches),
            "the hash of the cache's history": ", ".join("unknown" if h is None else h or "empty" for h in histories),
        }
        self.ranks.agree(f"forward pass {self._steps + 1}", facts)
        if None in histories:
            raise FcEvalError(
                "the cache holds keys of which the ranks cannot tell whether they belong together: give one that came "
                "out of a forward pass of this model (or a copy of it, or one edited by its own methods), or none"
            )
        self._history = hash_of([self._name, *map(str, facts.values())])
        self._steps += 1
        self._under_way = True

    def keep(self, given: Iterable[Any], output: Any) -> None:
        """After it: what the decoder gave enters the checksum, on the device, and its cache has a history.

        Args:
            given: the decoder's arguments.
            output: its results, None where it raised something.
        """
        if self._refused_within:
            self._refused_within -= 1
            return
        self._under_way = False
        if output is None:
            return
        for cache in caches_among([*given, *(output.values() if isinstance(output, Mapping) else output)]):
            set_history(cache, self._history)
        hidden = output[0]
        bits = hidden.contiguous().view(_INTEGERS[hidden.dtype]).sum(dtype=torch.int64)
        self._checksum = self._checksum * _CHECKSUM_FACTOR + bits


class _Together:
    """Hooks of a part's decoder: it runs with those of the other ranks or not at all, and a copy of it not at all."""

    def __init__(self, attachment: RankAttachment | None = None) -> None:
        self.attachment = attachment

    def end(self) -> None:
        """From now on the part does not run."""
        self.attachment = None

    def around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook of the model around the decoder."""
        if self.attachment is not None:
            self.attachment.around(args, kwargs)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook."""
        if self.attachment is None:
            raise FcEvalError(_ALONE)
        self.attachment.agree(args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Post-forward hook, called with None where the forward pass or the hook before it has raised something."""
        if self.attachment is not None:
            self.attachment.keep([*args, *kwargs.values()], output)
        elif output is not None:  # closed meanwhile, after which layers gave their own partial sums
            raise FcEvalError(_ALONE)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Together, ()
