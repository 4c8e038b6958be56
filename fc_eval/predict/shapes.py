"""The shape of a model by the name of its preset, or from the config.json of a folder."""

from pathlib import Path

from fc_eval.errors import FcEvalError, unknown
from fc_eval.models.config import Shape
from fc_eval.models.shape import shape_of
from fc_eval.presets import options, preset
from fc_eval.settings import build


def named_shape(name: str) -> Shape:
    """Sizes of `conf/model/NAME.yaml`, or of a checkpoint folder.

    Raises:
        FcEvalError: no such model, or its sizes are not known.
    """
    if name in options("model"):
        sizes = preset("model", name)["shape"]
        if sizes is None:
            raise FcEvalError(f"conf/model/{name}.yaml lists no sizes: give model=FOLDER, a checkpoint's folder")
        return build("model.shape", Shape, sizes)
    path = Path(name).expanduser()
    if not path.is_dir():
        raise unknown("model", name, options("model"), hint="or the folder of a checkpoint")
    found = shape_of(path / "config.json")
    if found is None:
        raise FcEvalError(f"{path}/config.json is missing or of no LLaMA-type model: give another folder")
    return found
