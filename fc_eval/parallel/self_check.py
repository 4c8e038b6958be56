"""Before anything is measured: splitting the model must not change what it computes."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from fc_eval.collective.comm import BASELINE
from fc_eval.errors import FcEvalError
from fc_eval.parallel.emulate import communicate

CHECK_TOKENS = 64
# Splitting rounds W partial sums per site to the dtype instead of one, each an independent relative error of at most
# eps / 2 of the site's output; over S sites these add like sqrt(S), and layers may amplify them a few times. A wrong
# split (a slice twice, a bias W times) is off by the order of the signal itself, far above 4 * sqrt(S) * eps / 2.
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


def self_check(model: nn.Module, tp: int, codec: str = "auto") -> SelfCheck:
    """Compares the model split over W ranks (`fp32_ordered`) with itself unsplit.

    Raises:
        FcEvalError: they differ by more than rounding can explain, or the unsplit model gives NaN.
    """
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.shape[0], (1, CHECK_TOKENS), generator=generator).to(embedding.device)
    with torch.inference_mode():
        unsplit = model(input_ids=ids, use_cache=False).logits.float()
        with communicate(model, BASELINE, tp, codec) as attachment:
            split = model(input_ids=ids, use_cache=False).logits.float()
        attachment.check_calls()
    if not bool(torch.isfinite(unsplit).all()):
        raise FcEvalError("the model's own logits are not finite: check model.dtype (some models need bf16 or fp32)")
    dtype = next(model.parameters()).dtype
    bound = AMPLIFICATION * math.sqrt(len(attachment.sites)) * torch.finfo(dtype).eps / 2
    error = float((split - unsplit).norm() / unsplit.norm())
    check = SelfCheck(error, bound, float((split.argmax(-1) == unsplit.argmax(-1)).float().mean()))
    if not error <= bound:
        raise FcEvalError(f"the split model does not compute what the unsplit one does: {check.text}")
    return check
