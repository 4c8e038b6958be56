"""Mistakes that show from settings and configuration files alone, found before anything is loaded or computed."""

import importlib.util
from collections.abc import Sequence

from fc_eval.collective.comm import Comm
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.models.config import Shape
from fc_eval.models.shape import known_shape
from fc_eval.parallel.site import Site, check_world_size

EXTENSIONS = {"cpu": "fc_eval._native", "cuda": "fc_eval._native_cuda"}


def check_ahead(config: RunConfig) -> None:
    """Checks a run whose device is settled, without a tensor library.

    Raises:
        FcEvalError: W does not divide a row-parallel layer (or the heads, where they are split), a policy rule has no
            effect, another system's all-reduce is to run between ranks or in a native codec, or the codec that is asked
            for was not built or works on another device.
    """
    shape = known_shape(config.model)
    policy = config.build_policy()
    if shape is not None:
        sites = llama_sites(shape)
        check_world_size(sites, config.tp)
        if config.split_plan == "full":
            _check_heads(shape, sites, config.tp)
        policy.assign(sites)
    comms = (policy.default, *(rule.comm for rule in policy.rules))
    _check_peers(config, comms)
    if config.exec == "tp":
        _check_ranks(config, comms)
    if config.codec in EXTENSIONS:
        if importlib.util.find_spec(EXTENSIONS[config.codec]) is None:
            raise FcEvalError(
                f"codec={config.codec} is not part of this installation: use codec=auto, or see `fc-eval doctor`"
            )
        if config.codec != config.device and any(comm.is_quantized for comm in comms):
            raise FcEvalError(
                f"codec={config.codec} works on {config.codec} tensors, but device={config.device}: use codec=auto"
            )


def _check_peers(config: RunConfig, comms: Sequence[Comm]) -> None:
    """Makes sure that the all-reduce of another system runs where it is emulated."""
    for peer in (comm.peer for comm in comms if comm.peer is not None):
        if config.exec == "tp":
            raise FcEvalError(
                f"{peer.name} is the all-reduce of another system, which exists in emulation only: leave out exec=tp"
            )
        if config.codec not in ("auto", "reference"):
            raise FcEvalError(
                f"codec={config.codec} does not cover {peer.name}, the all-reduce of another system: use codec=auto"
            )


def _check_ranks(config: RunConfig, comms: Sequence[Comm]) -> None:
    """Makes sure that the reducer can do what is asked of it."""
    name = config.reducer
    if name in ("fused", "staged") and config.device != "cuda":
        raise FcEvalError(f"reducer={name} reduces between GPUs, but device={config.device}: use reducer=auto")
    if name in ("fused", "staged") and importlib.util.find_spec(EXTENSIONS["cuda"]) is None:
        raise FcEvalError(f"reducer={name} is not part of this installation: use reducer=auto, or see `fc-eval doctor`")
    if config.reducer != "gathered":
        for comm in comms:
            comm.check_between_ranks()


def _check_heads(shape: Shape, sites: tuple[Site, ...], world_size: int) -> None:
    """Makes sure that every rank gets whole heads, as `parallel.split.find_split` does."""
    for what, heads in (("attention", shape.heads), ("key/value", shape.kv_heads)):
        if heads % world_size:
            widths = (shape.heads, shape.kv_heads, *(site.in_features for site in sites))
            fits = (w for w in range(1, 17) if not any(width % w for width in widths))
            raise FcEvalError(
                f"tp={world_size} does not divide the {heads} {what} heads: choose a tp that does "
                f"({', '.join(map(str, fits))}), or plan=row_only, which splits the row-parallel layers alone"
            )


def llama_sites(shape: Shape) -> tuple[Site, ...]:
    """The row-parallel layers of a LLaMA-type model of these sizes, as `parallel.sites.find_sites` finds them."""
    widths = {
        "self_attn.o_proj": shape.heads * (shape.head_dim or shape.hidden // shape.heads),
        "mlp.down_proj": shape.intermediate,
    }
    return tuple(
        Site(f"model.layers.{layer}.{part}", part.rpartition(".")[2], layer, width, shape.hidden)
        for layer in range(shape.layers)
        for part, width in widths.items()
    )
