"""A model with quantized communication for lm-eval's own command line, under the name `fc_eval`.

    python -m fc_eval.lm_eval_model run --model fc_eval --tasks piqa \\
        --model_args pretrained=FOLDER,dtype=bfloat16,comm=int4,tp=4,add_bos_token=True

lm-eval finds models in a table of its own and in what was registered before it looks; it reads no entry points. So this
module registers itself and then is lm-eval's command line. In Python, importing it is enough.
"""

import inspect
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from fc_eval.codec.select import LOADERS
from fc_eval.collective.comm import parse_comm
from fc_eval.errors import FcEvalError, unknown
from fc_eval.evaluate.progress import Progress
from fc_eval.evaluate.scoring_lm import ScoringLM
from fc_eval.evaluate.task_data import mirrored_download
from fc_eval.evaluate.tasks import replaced
from fc_eval.models.half_products import half_products
from fc_eval.models.reasons import reason
from fc_eval.parallel.emulate import communicate

# What HFLM takes, and of all that it hands on to transformers the one thing that matters here.
_PASSED_ON = ({*inspect.signature(HFLM.__init__).parameters} - {"self", "kwargs"}) | {"attn_implementation"}
_OWN = ("pretrained", "comm", "tp", "codec", "add_bos_token", "data_root")


@register_model("fc_eval")
class CommunicatingLM(ScoringLM):
    """lm-eval's Hugging Face model whose row-parallel layers communicate as `tp` ranks do.

    Args:
        pretrained: a checkpoint folder, a Hub id, or a loaded model.
        comm: name of the comm, such as 'int4', 'one_step:int6-g32' or a preset's.
        tp: tensor-parallel world size W.
        codec: 'auto', 'reference', 'cpu' or 'cuda'.
        add_bos_token: one BOS token in front of each request, or none. lm-eval's default has changed over time, so it
            has to be said.
        data_root: folder that mirrors dataset ids; the tasks that lm-eval loads until `close` take their data from it.
        progress: called with (done, total) requests; a bar on the screen where it is None.
        kwargs: all other arguments of lm-eval's `hf` model.

    Raises:
        FcEvalError: an argument that is unknown or not possible, a model that cannot be loaded or does not allow this
            world size, or no word about BOS.
    """

    def __init__(
        self,
        pretrained: Any = None,
        comm: str = "int4",
        tp: int = 1,
        codec: str = "auto",
        add_bos_token: bool | None = None,
        data_root: str | None = None,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        _check(pretrained, comm, tp, codec, add_bos_token, data_root, kwargs)
        try:
            super().__init__(
                pretrained=pretrained, add_bos_token=bool(add_bos_token), progress=progress or RequestBar(), **kwargs
            )
        except FcEvalError:
            raise
        except Exception as error:  # what lm-eval and transformers raise has no common type
            why = reason(error, str(kwargs.get("attn_implementation")))
            name = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
            raise FcEvalError(f"pretrained={name} cannot be loaded: {why}") from error
        self._undo = ExitStack()
        self._undo.enter_context(half_products(self.model))
        self._undo.enter_context(communicate(self.model, comm, tp, codec))
        if data_root is not None:
            download = mirrored_download(ConfigurableTask.download, Path(data_root), 0, [])
            self._undo.enter_context(replaced(ConfigurableTask, "download", download))

    def close(self) -> None:
        """Gives the model its own layers and lm-eval its own data back, for callers that go on using them."""
        self._undo.close()


def _check(
    pretrained: Any, comm: Any, tp: Any, codec: Any, add_bos_token: Any, data_root: Any, others: dict[str, Any]
) -> None:
    """Finds a mistake in the arguments before a model is loaded."""
    for key in others:
        if key not in _PASSED_ON:
            raise unknown("argument in --model_args:", key, [*_OWN, *_PASSED_ON])
    if pretrained is None:
        raise FcEvalError("say pretrained=FOLDER (or a Hub id) in --model_args")
    parse_comm(comm)
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise FcEvalError(f"tp={tp!r} is not possible: expected a whole number of ranks, at least 1")
    if codec not in ("auto", *LOADERS):
        raise unknown("codec", str(codec), ["auto", *LOADERS])
    if not isinstance(add_bos_token, bool):
        given = "" if add_bos_token is None else f", not {add_bos_token!r}"
        raise FcEvalError(f"say add_bos_token=True or add_bos_token=False in --model_args (LLaMA: True){given}")
    if data_root is not None and not Path(str(data_root)).is_dir():
        raise FcEvalError(f"data_root={data_root} is not a folder: give one that holds data sets as OWNER/NAME")


class RequestBar:
    """Progress as a bar on the screen, a new one for each kind of requests."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Takes requests done so far, of all."""
        if self._bar is None:
            self._bar = tqdm(total=total, unit=" requests")
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None


def main() -> int:
    """lm-eval's command line, with the model `fc_eval` known to it; a mistake in its arguments is one sentence."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except FcEvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
