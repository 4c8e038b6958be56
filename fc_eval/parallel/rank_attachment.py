"""One rank's part of a model, whose row-parallel layers communicate with the other ranks of a group.

The emulated `Attachment` with another reduction: one partial sum per call instead of W. Beside the all-reduces, ranks
tell each other two things: before each forward pass what they are about to compute, and, when the counts are checked,
a checksum of all that came out. So ranks with different data, shapes or comms are an error and not a hang, and
different results on two ranks never become a number.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fc_eval.collective.comm import Comm
from fc_eval.collective.ranks import Ranks
from fc_eval.collective.reducers import EMULATES, get_reducer
from fc_eval.errors import FcEvalError
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
        self._agreed = False  # whether a forward pass is going on that all ranks have agreed upon
        # What the caches of this model have seen so far, as a hash.
        self._history = ""
        self._histories: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._summed: Arm | None = None  # the arm whose counts are those of all ranks
        super().__init__(model, comm, split, codec)
        self._stack = ExitStack()
        self._stack.enter_context(self._installed(model))
        if self.world_size > 1:
            together, decoder = _Together(self), find_decoder(model)
            decoder.register_forward_pre_hook(
                together.before, with_kwargs=True
            )  # stays: the part alone computes nothing
            self._stack.callback(decoder.register_forward_hook(together.after).remove)
            self._stack.callback(together.end)

    @property
    def reducer(self) -> str:
        """Name of the reducer that this rank uses."""
        return self._reducer.name

    def close(self) -> None:
        """Ends the communication. The model stays the part of one rank: where W is above 1 it refuses to run alone."""
        self._stack.close()

    def reset_stats(self) -> None:
        """Forgets all counts."""
        super().reset_stats()
        self._checksum = 0

    def counts(self) -> Counts:
        """What all ranks of this group counted since the last reset; every rank calls this and gets the same."""
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
        """What happened on all ranks since the last reset; every rank calls this and gets the same."""
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
            FcEvalError: otherwise.
            LostProcessError: an all-reduce was given up because another rank has ended or was late.
        """
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
        arm = super()._make_arm(comm, codec)
        if self.reducer != EMULATES:
            for one in set(arm.comms.values()):
                one.check_between_ranks()
        return arm

    def _forwards(self, model: nn.Module) -> list[StandIn]:
        parts = [replace(site, in_features=site.in_features // self.world_size) for site in self.sites]
        return [RowParallelForward(self._targets[part.name], part, 1, self._reduce) for part in parts]

    def _all_reduce(self, site: Site, partials_WTH: torch.Tensor) -> torch.Tensor:
        (partial_TH,) = partials_WTH  # this rank's own
        if self.world_size > 1 and not self._agreed:
            raise FcEvalError(
                f"{site.name} was called outside of a forward pass of the model, so nobody knows whether the other "
                "ranks call it too: call the model"
            )
        comm = self._arm.comms[site.name]
        codec = self._codec(self._arm.codec, comm, partial_TH.dtype, partial_TH.device)
        reduced = self._reducer(partial_TH, comm, codec)
        self._arm.tallies[site.name].add(len(partial_TH), reduced)
        return reduced.values

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass of the decoder: all ranks are about to compute the same.

        Raises:
            FcEvalError: they are not.
            LostProcessError: another rank has ended, or has not come in time.
        """
        given = {str(index): value for index, value in enumerate(args)} | kwargs
        inputs = dict(_tensors(given))
        seen = _sha256(inputs)
        first = inputs.get("input_ids", inputs.get("inputs_embeds", next(iter(inputs.values()), torch.empty(0))))
        cache = _cache_among(given.values())
        # A rank's keys and values are its own heads'; that two caches belong together shows in what they came from.
        self._history = _hash_of([self._histories.get(cache, "") if cache is not None else "", seen])
        self._agreed = False  # the last pass may have been given up in its middle
        comms, dtypes = self._arm.comms, {str(module.weight.dtype) for module in self._targets.values()}
        facts = {
            "the comm": ", ".join(dict.fromkeys(comm.name for comm in comms.values())),
            "the hash of the layers' comms": _hash_of(f"{site} {comm.name}" for site, comm in comms.items()),
            "the reducer": self.reducer,
            "the dtype of the row-parallel layers": ", ".join(sorted(dtypes)),
            "the input's shape": list(first.shape),
            "the hash of all inputs": seen,
            "the cache's length": cache.get_seq_length() if cache is not None else None,
            "the hash of the cache's history": self._history,
        }
        self.ranks.agree(f"forward pass {self._steps + 1}", facts)
        self._steps += 1
        self._agreed = True

    def keep(self, output: Any) -> None:
        """After it: what the decoder gave enters the checksum, on the device, and its cache has a history."""
        self._agreed = False
        if (cache := _cache_among(output.values() if isinstance(output, Mapping) else output)) is not None:
            self._histories[cache] = self._history
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

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook."""
        if self.attachment is None:
            raise FcEvalError(
                "this model is one rank's part of a model, and it does not communicate: its communication was closed, "
                "or it is a copy; load it again with load_tensor_parallel on all ranks"
            )
        self.attachment.agree(args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Post-forward hook."""
        if self.attachment is not None:
            self.attachment.keep(output)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Together, ()


def _cache_among(values: Iterable[Any]) -> Any:
    """The key/value cache among arguments or results, whose name differs between versions; None where there is none."""
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among the arguments of a forward pass, and in mappings among them (masks by kind of layer)."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", tensor) for key, tensor in _tensors(value))


def _sha256(inputs: Mapping[str, torch.Tensor]) -> str:
    """The first digits of a hash of tensors' names, shapes and bytes; waits for the device."""
    digest = hashlib.sha256()
    for name, values in sorted(inputs.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode())
        digest.update(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _hash_of(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
