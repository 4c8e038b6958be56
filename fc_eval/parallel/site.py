"""A row-parallel layer as far as plans need to know it: its name and its widths. No tensor library."""

from dataclasses import dataclass

from fc_eval.errors import FcEvalError


@dataclass(frozen=True)
class Site:
    """A row-parallel linear layer.

    Attributes:
        name: full module name in the model, such as 'model.layers.3.mlp.down_proj'.
        kind: last component of the name.
        layer: index of the decoder layer, None for a layer outside the stack.
        in_features: K, which is split over the ranks.
        out_features: H, the width of what is reduced.
    """

    name: str
    kind: str
    layer: int | None
    in_features: int
    out_features: int


def check_world_size(sites: tuple[Site, ...], world_size: int) -> None:
    """Makes sure that W divides the input of every site.

    Raises:
        FcEvalError: W is no whole number of at least 1, or does not divide every `in_features`; names the W up to 16
            that would work.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise FcEvalError(f"tp={world_size!r} is not possible: expected a whole number of ranks, at least 1")
    for site in sites:
        if site.in_features % world_size:
            fits = [str(w) for w in range(1, 17) if all(s.in_features % w == 0 for s in sites)]
            raise FcEvalError(
                f"tp={world_size} does not divide {site.name}, which has {site.in_features} input features: "
                f"choose tp={', '.join(fits)}"
            )
