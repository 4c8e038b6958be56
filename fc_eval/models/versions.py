"""Which versions of transformers are supported: those whose plans, models and loading the tests have seen."""

import transformers

from fc_eval.errors import FcEvalError

OLDEST, TOO_NEW = (5, 16), (6, 0)


def check_transformers() -> None:
    """Makes sure that the installed transformers is a supported one.

    Raises:
        FcEvalError: it is older or newer.
    """
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= found < TOO_NEW:
        oldest = ".".join(map(str, OLDEST))
        raise FcEvalError(
            f"transformers {transformers.__version__} is not supported: expected {oldest} or later, below "
            f"{TOO_NEW[0]}; pip install 'transformers>={oldest},<{TOO_NEW[0]}'"
        )
