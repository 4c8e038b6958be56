"""Packages that only some users need: imported when they are asked for."""

import importlib
from types import ModuleType

from fc_eval.errors import FcEvalError


def optional(module: str, wanted: str) -> ModuleType:
    """The module, whose package is an extra of the same name.

    Args:
        module: its name.
        wanted: what asked for it, as on the command line.

    Raises:
        FcEvalError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise FcEvalError(f"{wanted} needs {module}, which does not import here: {error}") from None
        raise FcEvalError(
            f"{wanted} needs the package {module}, which is not installed: pip install 'fc-eval[{module}]'"
        ) from None
