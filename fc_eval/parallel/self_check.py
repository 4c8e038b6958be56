"""Before anything is measured: splitting the model must not change what it computes."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fc_eval.collective.comm import BASELINE
from fc_eval.errors import FcEvalError
from fc_eval.parallel.emulate import Attachment, Reduce, communicate
from fc_eval.parallel.site import Site

CHECK_TOKENS = 64
# How far rounding may carry logits is measured and not guessed, because a model may amplify it by any factor (one huge
# weight is enough): the split model runs again with every product of a split layer off by what rounding can do at most.
DRAWS = 4  # of the signs of these errors, side by side as rows of one batch; the one that changes most counts
# The error itself is one more draw: 0.76 of the largest of four at most, over 615 splits of tiny models on a CPU; the
# kernels of a GPU may round a part of the terms of a product once more.
SAFETY = 3.0
# A wrong split (a slice twice, a bias W times) is off by the order of the signal: with more no split could be wrong.
LARGEST_BOUND = 0.5


@dataclass(frozen=True)
class SelfCheck:
    """How far the split model is from the unsplit one on a few random tokens.

    Attributes:
        relative_error: ||split - unsplit|| / ||unsplit|| over the logits, fp32.
        bound: what it may be at most.
        same_top1: share of positions with the same most likely token.
    """

    relative_error: float
    bound: float
    same_top1: float

    @property
    def text(self) -> str:
        """One line for the log."""
        return (
            f"baseline against the unsplit model: logits differ by {self.relative_error:.2e} "
            f"(bound {self.bound:.2e}), same top-1 {self.same_top1:.1%}"
        )


def self_check(model: nn.Module, tp: int, codec: str = "auto", plan: str = "row_only") -> SelfCheck:
    """Compares the model split over W ranks (`fp32_ordered`) with itself unsplit.

    Raises:
        FcEvalError: they differ by more than rounding can explain, or the unsplit model gives NaN.
    """
    unsplit_TV = check_logits(model)
    with communicate(model, BASELINE, tp, codec, plan) as attachment:
        split_TV = check_logits(model)
        sensitivity = split_sensitivity(model, attachment)
    attachment.check_calls()
    return compare(unsplit_TV, split_TV, sensitivity)


def check_logits(model: nn.Module) -> torch.Tensor:
    """Logits [T, V] in fp32 of a few random tokens, always the same ones."""
    return _logits(model, rows=1)[0]


def split_sensitivity(model: nn.Module, attachment: Attachment, seed: int = 0) -> float:
    """How far logits move, relative, when the products of all split layers are rounded otherwise.

    Args:
        model: while it communicates, under the baseline.
        attachment: its communication.
        seed: of the signs; each of several real ranks has its own.
    """
    otherwise, split = Otherwise(seed), attachment.split
    # One rank has no partial sums: its products are whole.
    whole = split.columns if split.world_size > 1 else (*split.columns, *(site.name for site in split.sites))

    def between(site: Site, partials_WTH: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        # Each rank's product by its own size: where they cancel in the sum, what is lost does not.
        return reduce(site, torch.stack([otherwise(partial_TH, site.in_features) for partial_TH in partials_WTH]))

    with attachment.reducing(between), otherwise.in_outputs(model, whole):
        return sensitivity(model)


def sensitivity(model: nn.Module) -> float:
    """The most that logits differ, relative, between the first and another row of `DRAWS` + 1 rows of equal tokens."""
    first_TV, *others = _logits(model, rows=1 + DRAWS)
    return max(_difference(other_TV, first_TV) for other_TV in others)


class Otherwise:
    """Products rounded otherwise in all rows of a batch but the first: each value off by one unit roundoff (eps / 2).

    A product in 16 bits is summed in fp32 and rounded once; in fp32 its K terms are rounded as they are added, and
    these errors add up like sqrt(K).
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, product: torch.Tensor, terms: int) -> torch.Tensor:
        """The products [..., N] of all rows, each a sum of so many terms."""
        off = torch.finfo(product.dtype).eps / 2 * (math.sqrt(terms) if product.dtype == torch.float32 else 1)
        signs = torch.randint(2, product.shape, generator=self._generator, dtype=torch.int8).mul_(2).sub_(1)
        signs.view(1 + DRAWS, -1)[0] = 0
        # In fp64, where one unit roundoff more or less is not rounded away.
        return (product.double() * (1 + off * signs.to(product.device).double())).to(product.dtype)

    @contextmanager
    def in_outputs(self, model: nn.Module, linears: Iterable[str]) -> Iterator[None]:
        """Rounds otherwise what these linear layers of a model give, for the length of a block."""

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return self(output, module.in_features)  # type: ignore[arg-type]

        with ExitStack() as stack:
            for name in linears:
                stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
            yield


def compare(unsplit_TV: torch.Tensor, split_TV: torch.Tensor, sensitivity: float, slack: float = 1.0) -> SelfCheck:
    """How far the logits [T, V] of a split model are from those of the whole one.

    Args:
        unsplit_TV: of the whole model.
        split_TV: of the split one.
        sensitivity: how far rounding moves them (`split_sensitivity`).
        slack: multiplies the bound, where still more is rounded otherwise.

    Raises:
        FcEvalError: they differ by more than rounding can explain, or the unsplit model gives NaN.
    """
    if not bool(torch.isfinite(unsplit_TV).all()):
        raise FcEvalError("the model's own logits are not finite: check model.dtype (some models need bf16 or fp32)")
    error, bound = _difference(split_TV, unsplit_TV), rounding_bound(sensitivity, slack)
    check = SelfCheck(error, bound, float((split_TV.argmax(-1) == unsplit_TV.argmax(-1)).float().mean()))
    if not error <= bound:
        raise FcEvalError(f"the split model does not compute what the unsplit one does: {check.text}")
    return check


def rounding_bound(sensitivity: float, slack: float = 1.0) -> float:
    """How far logits may be off, relative, where rounding moves them so far; `slack` times that at most."""
    return min(SAFETY * slack * sensitivity, LARGEST_BOUND)


def _difference(found_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    return float((found_TV - expected_TV).norm() / expected_TV.norm())


@torch.inference_mode()
def _logits(model: nn.Module, rows: int) -> torch.Tensor:
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(embedding.shape[0], (1, CHECK_TOKENS), generator=generator).expand(rows, -1)
    logits_BTV: torch.Tensor = model(input_ids=ids_BT.to(embedding.device), use_cache=False).logits.float()
    return logits_BTV
