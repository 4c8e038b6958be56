"""`fc-eval doctor`: what is installed, found and possible here, in one page, before hours are spent on a run."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from fc_eval.compose import compose_one
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.data import mirror_serves_all
from fc_eval.evaluate.sources import data_files
from fc_eval.machine import settled
from fc_eval.results.fingerprint import package_versions
from fc_eval.wire.layout import DTYPE_BYTES

HUB_TIMEOUT_S = 3.0


class UncertainError(Exception):
    """Something that may stop a run, or may not."""


def doctor(overrides: Sequence[str]) -> int:
    """Prints every check; overrides are those of `fc-eval run`.

    Returns:
        0 when a run with these overrides can start, 1 when a check failed.

    Raises:
        FcEvalError: overrides that compose to nothing sensible.
    """
    config = compose_one(overrides)
    checks: list[tuple[str, Callable[[RunConfig], str]]] = [
        ("python and packages", _packages),
        ("device", _device),
        ("codecs", _codecs),
        ("codec self-test", _self_test),
        ("INT8 weights", _int8),
        ("data", _data),
        ("hub", _hub),
        ("model", _model),
        ("divisibility", _divisibility),
        ("BOS", _bos),
    ]
    failed = 0
    for name, check in checks:
        try:
            print(f"ok    {name}: {check(config)}")
        except UncertainError as doubt:
            print(f"warn  {name}: {doubt}")
        except FcEvalError as error:
            failed += 1
            print(f"FAIL  {name}: {error}")
    return 1 if failed else 0


def _packages(config: RunConfig) -> str:
    versions = package_versions()
    missing = [name for name, version in versions.items() if version == "missing"]
    if missing:
        raise FcEvalError(f"{', '.join(missing)} not installed: pip install 'fc-eval' again in this environment")
    return f"python {platform.python_version()}, " + ", ".join(f"{name} {v}" for name, v in versions.items())


def _device(config: RunConfig) -> str:
    import torch

    ranks = f" groups of {config.ranks} ranks" if config.ranks > 1 else ""
    shared = f"processes of a run: {settled(config).processes}{ranks}"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{len(names)} CUDA: {', '.join(names)}; torch uses {torch.get_num_threads()} CPU threads; {shared}"
    return f"CPU with {torch.get_num_threads()} threads (torch sees no CUDA device); {shared}"


def _codecs(config: RunConfig) -> str:
    from fc_eval.codec.select import codecs_available

    return "; ".join(f"{name} {'yes' if why is None else f'no ({why})'}" for name, why in codecs_available().items())


def _self_test(config: RunConfig) -> str:
    """Two ranks whose sum is known: in a group from 0 to 255 INT8 has scale 1, so whole numbers must be exact."""
    import torch

    from fc_eval.codec.select import codecs_available
    from fc_eval.library import all_reduce

    x = torch.zeros(2, 3, 256, dtype=torch.float32)
    x[0, :, 0::128], x[1, :, 1::128] = 255.0, 51.0
    x[1, :, 2::128] = 255.0
    names = [name for name, why in codecs_available().items() if why is None]
    for name in names:
        device = "cuda" if name == "cuda" else "cpu"
        reduced = all_reduce(x.to(device), "int8-g128", codec=name).cpu()
        if not torch.equal(reduced, x.sum(0)):
            raise FcEvalError(f"codec {name} reduced {reduced[0, :2].tolist()} instead of [255, 51]: do not use it")
    return f"an INT8 two-step all-reduce of known sum is exact in {', '.join(names)}"


def _int8(config: RunConfig) -> str:
    import torch

    from fc_eval.weights.int8 import way_of_products

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return f"model.weights=w8a8 multiplies on {device.type} with {way_of_products(device)}"


def _data(config: RunConfig) -> str:
    root = Path(config.data_root) if config.data_root else None
    files = data_files(config.eval.specs, root)
    names = ", ".join(spec.name for spec in config.eval.specs)
    if mirror_serves_all(config.eval.specs, root):
        return f"{names}: all local ({len(files)} files), no network needed"
    where = f"{len(files)} files below {root}, the rest" if root else "data"
    return f"{names}: {where} from the Hugging Face Hub at run time"


def _hub(config: RunConfig) -> str:
    """Whether the Hub answers, and whether it is needed; what its local cache holds is not asked for."""
    import httpx
    from huggingface_hub import constants

    root = Path(config.data_root) if config.data_root else None
    needed = [spec.name for spec in config.eval.specs if not mirror_serves_all([spec], root)]
    if config.model.hub_id is not None and config.model.path is None:
        needed.append(f"model {config.model.name}")
    what = f"{', '.join(needed)} must be in its local cache, or given with data.root=FOLDER or model.path=FOLDER"
    if constants.HF_HUB_OFFLINE:
        if needed:
            raise UncertainError(f"offline mode is set (HF_HUB_OFFLINE): {what}")
        return "offline mode is set (HF_HUB_OFFLINE); this run needs nothing from it"
    try:
        answer = httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        state = f"answers with HTTP {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        answer, state = None, f"does not answer within {HUB_TIMEOUT_S:.0f} s ({type(error).__name__})"
    if needed and (answer is None or answer.is_server_error):
        raise UncertainError(f"{constants.ENDPOINT} {state}: {what}")
    return f"{constants.ENDPOINT} {state}; this run needs {', '.join(needed) or 'nothing'} from it"


def _model(config: RunConfig) -> str:
    from fc_eval.models.load import load_model

    loaded = load_model(config.model, "cpu" if config.device == "auto" else config.device)
    return "; ".join([loaded.summary, *loaded.notes])


def _divisibility(config: RunConfig) -> str:
    shape = config.model.shape
    if shape is None:
        return "checked when the model is loaded (its sizes are not listed in conf/model)"
    for name, width in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
        if width % config.tp:
            fits = [w for w in range(1, 9) if shape.hidden % w == 0 and shape.intermediate % w == 0]
            raise FcEvalError(f"tp={config.tp} does not divide {name} {width}: expected one of {fits}")
    heads = "also" if not (shape.heads % config.tp or shape.kv_heads % config.tp) else "not"
    parameters = shape.layers * shape.hidden * shape.intermediate * 3
    gigabytes = parameters * DTYPE_BYTES[config.model.dtype] / 2**30
    return (
        f"tp={config.tp} divides hidden {shape.hidden} and intermediate {shape.intermediate}; "
        f"{heads} {shape.heads} heads and {shape.kv_heads} key/value heads (it matters for real tensor parallelism); "
        f"the MLP weights alone need {gigabytes:.1f} GiB in {config.model.dtype}"
    )


def _bos(config: RunConfig) -> str:
    return (
        f"a BOS token is {'' if config.model.add_bos_token else 'not '}put in front of every text (model.add_bos_token)"
    )
