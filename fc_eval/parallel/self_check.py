"""Before anything is measured: splitting the model must not change what it computes."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from fc_eval.collective.comm import BASELINE
from fc_eval.errors import FcEvalError
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.split import Split

CHECK_TOKENS = 64
# Splitting rounds W partial sums per site to the dtype instead of one, each an independent relative error of at most
# eps / 2 of the site's output; over S sites these add like sqrt(S), and layers may amplify them a few times. A wrong
# split (a slice twice, a bias W times) is off by the order of the signal itself, far above 4 * sqrt(S) * eps / 2.
# In fp32 the terms of a product are rounded as they are added, so that each of K terms counts.
AMPLIFICATION = 4


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
    attachment.check_calls()
    return compare(unsplit_TV, split_TV, attachment.split, next(model.parameters()).dtype)


@torch.inference_mode()
def check_logits(model: nn.Module) -> torch.Tensor:
    """Logits [T, V] in fp32 of a few random tokens, always the same ones."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.shape[0], (1, CHECK_TOKENS), generator=generator).to(embedding.device)
    logits_TV: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits_TV


def rounding_bound(layers: int, dtype: torch.dtype, widest: int) -> float:
    """How far logits may be off, relative, when so many layers of at most `widest` inputs are rounded otherwise."""
    roundings = layers * (widest if dtype == torch.float32 else 1)
    return AMPLIFICATION * math.sqrt(roundings) * torch.finfo(dtype).eps / 2


def compare(
    unsplit_TV: torch.Tensor, split_TV: torch.Tensor, split: Split, dtype: torch.dtype, slack: float = 1.0
) -> SelfCheck:
    """How far the logits [T, V] of a split model are from those of the whole one.

    Args:
        unsplit_TV: of the whole model.
        split_TV: of the split one.
        split: which products are rounded otherwise.
        dtype: what they are rounded to.
        slack: multiplies the bound, where still more is rounded otherwise.

    Raises:
        FcEvalError: they differ by more than rounding can explain, or the unsplit model gives NaN.
    """
    if not bool(torch.isfinite(unsplit_TV).all()):
        raise FcEvalError("the model's own logits are not finite: check model.dtype (some models need bf16 or fp32)")
    widest = max(site.in_features for site in split.sites)
    bound = slack * rounding_bound(len(split.sites) + len(split.columns), dtype, widest)
    error = float((split_TV - unsplit_TV).norm() / unsplit_TV.norm())
    check = SelfCheck(error, bound, float((split_TV.argmax(-1) == unsplit_TV.argmax(-1)).float().mean()))
    if not error <= bound:
        raise FcEvalError(f"the split model does not compute what the unsplit one does: {check.text}")
    return check
