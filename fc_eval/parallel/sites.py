"""Which layers are row-parallel: read from the model's own tensor-parallel plan, never from a list of names.

A plan (`base_model_tp_plan` of a transformers config) maps module patterns such as `layers.*.mlp.down_proj` to a
style; the row-parallel styles are the ones whose output is a partial sum per rank, which an all-reduce completes.
"""

import re
from collections.abc import Iterator, Mapping

from torch import nn

from fc_eval.errors import FcEvalError
from fc_eval.parallel.site import Site
from fc_eval.weights.linear import is_plain

# Styles of one linear layer whose partial sums are all-reduced; they differ only in how the input reaches the ranks.
ROW_PARALLEL = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
# Styles that sum over ranks somewhere else than in a plain linear layer.
UNCOVERED = frozenset({"moe_tp_experts", "moe_identity_expert", "packed_rowwise", "all_reduce"})


def find_decoder(model: nn.Module) -> nn.Module:
    """The text decoder of a transformers model (the model itself, or a part of a multimodal wrapper).

    Raises:
        FcEvalError: not a transformers model, or an encoder-decoder.
    """
    get_decoder = getattr(model, "get_decoder", None)
    if get_decoder is None:
        raise FcEvalError(
            f"{type(model).__name__} is not a transformers model: expected one with a tensor-parallel plan, "
            "as AutoModelForCausalLM loads it"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise FcEvalError(f"{type(model).__name__} has an encoder: only decoder-only language models are covered")
    decoder: nn.Module = get_decoder()
    return decoder


def tp_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan of the text decoder: module pattern (relative to the decoder) to style.

    Raises:
        FcEvalError: the model has none.
    """
    config = getattr(find_decoder(model), "config", None)
    # A wrapper that is its own decoder keeps the plan with its text model.
    text = getattr(config, "text_config", None)
    for source in (config, text):
        plan: Mapping[str, str] | None = getattr(source, "base_model_tp_plan", None)
        if plan:
            return dict(plan)
    raise FcEvalError(
        f"{type(model).__name__} has no tensor-parallel plan (config.base_model_tp_plan), so its row-parallel layers "
        "are not known: choose a model that transformers can shard, such as LLaMA, Mistral, Qwen or Gemma"
    )


def decoder_prefix(model: nn.Module) -> str:
    """What stands in front of a module's name in the decoder to make its name in the model: 'model.' or nothing."""
    decoder = find_decoder(model)
    return next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)


def plan_targets(decoder: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose name matches a plan pattern, in which `*` stands for one component."""
    wanted = re.compile(r"[^.]+".join(re.escape(piece) for piece in pattern.split("*")))
    return ((name, module) for name, module in decoder.named_modules() if wanted.fullmatch(name))


def _refuse_experts(decoder: nn.Module, plan: Mapping[str, str], prefix: str) -> None:
    for pattern, style in plan.items():
        found = next(plan_targets(decoder, pattern), None) if style in UNCOVERED else None
        if found is not None:
            raise FcEvalError(
                f"{prefix}{found[0]} ({type(found[1]).__name__}) is summed over ranks by the plan's style {style!r}: "
                "mixtures of experts are not covered, because part of their all-reduces would stay unquantized; "
                "choose a dense model"
            )


def _check_linear(name: str, module: nn.Module) -> None:
    # Quantized layers and weights come as subclasses of either; only the plain ones and our own are known to split.
    if not is_plain(module):
        kind = type(module) if type(module) is not nn.Linear else type(module.weight)
        raise FcEvalError(
            f"{name} is a {kind.__module__}.{kind.__name__}, not a plain nn.Linear: layers with quantized or wrapped "
            "weights cannot be split over ranks; load the model in bf16, fp16 or fp32 (dequantized)"
        )


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """All row-parallel layers of the text decoder, in the model's own order.

    Raises:
        FcEvalError: no plan, no matching layer, a mixture of experts, or a target that is not a plain `nn.Linear`.
    """
    decoder, plan = find_decoder(model), tp_plan(model)
    prefix = decoder_prefix(model)
    _refuse_experts(decoder, plan, prefix)
    patterns = [pattern for pattern, style in plan.items() if style in ROW_PARALLEL]
    rows = {name: module for pattern in patterns for name, module in plan_targets(decoder, pattern)}
    sites = []
    for name, module in decoder.named_modules():
        if name not in rows:
            continue
        _check_linear(prefix + name, module)
        index = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        layer = int(index.group(1)) if index else None
        assert isinstance(module, nn.Linear)
        sites.append(Site(prefix + name, name.rpartition(".")[2], layer, module.in_features, module.out_features))
    if not sites:
        raise FcEvalError(
            f"no layer of {type(model).__name__} matches the row-parallel rules of its tensor-parallel plan "
            f"({', '.join(patterns) or 'there are none'}): it is not covered"
        )
    return tuple(sites)
