"""How a model is split over W ranks: which layers by the rows of their weight, which by the columns, which stay whole.

full        as serving systems do it: q, k, v, gate and up by rows (column-parallel), o_proj and down_proj by columns
            (row-parallel); each rank holds whole attention heads
row_only    the row-parallel layers alone; the others are whole on each rank, which splits their output locally

Read from the model's own tensor-parallel plan. What the plan shards only to gather it again at once (fused projections,
the vocabulary) stays whole on every rank: the same numbers, and nothing travels but what is reduced.
"""

from dataclasses import dataclass

from torch import nn

from fc_eval.errors import FcEvalError, unknown
from fc_eval.parallel.site import Site, check_world_size
from fc_eval.parallel.sites import ROW_PARALLEL, decoder_prefix, find_decoder, find_sites, plan_targets, tp_plan
from fc_eval.weights.linear import is_plain

PLANS = ("full", "row_only")
COLUMN_PARALLEL = frozenset({"colwise"})
INPUT_ARRIVES_SPLIT = frozenset({"rowwise"})
WHOLE = frozenset(
    {
        *("colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise"),
        *("replicated_with_grad_allreduce", "replicate"),
    }
)


@dataclass(frozen=True)
class Split:
    """How one model is split.

    Attributes:
        plan: one of `PLANS`.
        world_size: W.
        sites: the row-parallel layers, as they are in the whole model.
        columns: full names of the column-parallel layers, none under `row_only`.
        whole_inputs: full names of the sites whose input is whole on each rank, and split there.
    """

    plan: str
    world_size: int
    sites: tuple[Site, ...]
    columns: tuple[str, ...]
    whole_inputs: frozenset[str]


def find_split(model: nn.Module, world_size: int, plan: str) -> Split:
    """How a whole model (its weights may be on the meta device) is split over W ranks.

    Raises:
        FcEvalError: an unknown plan, W does not divide what it has to divide, a mixture of experts, or a style of the
            model's plan that is not covered.
    """
    if plan not in PLANS:
        raise unknown("plan", plan, PLANS)
    sites = find_sites(model)
    check_world_size(sites, world_size)
    if plan == "row_only" or world_size == 1:
        return Split(plan, world_size, sites, (), frozenset(site.name for site in sites))
    decoder, prefix = find_decoder(model), decoder_prefix(model)
    columns, arrives_split = [], set()
    for pattern, style in tp_plan(model).items():
        names = [prefix + name for name, _ in plan_targets(decoder, pattern)]
        if style in COLUMN_PARALLEL:
            columns += names
        elif style in INPUT_ARRIVES_SPLIT:
            arrives_split |= set(names)
        elif names and style not in WHOLE | ROW_PARALLEL:
            raise FcEvalError(
                f"the plan of {type(model).__name__} has the style {style!r} for {names[0]}, which is not covered: "
                "use plan=row_only, which splits nothing but the row-parallel layers"
            )
    for name in columns:
        _check_columns(model, name, world_size)
    return Split(plan, world_size, sites, tuple(columns), frozenset(s.name for s in sites) - arrives_split)


def _check_columns(model: nn.Module, name: str, world_size: int) -> None:
    """Makes sure that every rank gets whole heads, or the same number of features."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear) or not is_plain(module):
        raise FcEvalError(f"{name} is a {type(module).__name__}, not a plain nn.Linear: use plan=row_only")
    # An attention module knows the size of a head; a projection of an MLP has none around it.
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None) or 1
    units = module.out_features // head_dim
    if units % world_size:
        what = f"the {units} heads" if head_dim > 1 else f"the {units} output features"
        fits = ", ".join(str(w) for w in range(1, 17) if units % w == 0)
        raise FcEvalError(
            f"tp={world_size} does not divide {what} of {name}: choose a tp that does ({fits}), or plan=row_only, "
            "which splits the row-parallel layers alone"
        )
