"""A model with quantized communication for lm-eval's own command line, under the name `fc_eval`.

    python -m fc_eval.lm_eval_model run --model fc_eval --tasks piqa \\
        --model_args pretrained=FOLDER,dtype=bfloat16,comm=int4,tp=4,add_bos_token=True

lm-eval finds models in a table of its own and in what was registered before it looks; it reads no entry points. So this
module registers itself and then is lm-eval's command line. In Python, importing it is enough.
"""

from contextlib import ExitStack
from typing import Any

from lm_eval.api.registry import register_model

from fc_eval.errors import FcEvalError
from fc_eval.evaluate.tasks import ScoringLM
from fc_eval.parallel.emulate import communicate


@register_model("fc_eval")
class CommunicatingLM(ScoringLM):
    """lm-eval's Hugging Face model whose row-parallel layers communicate as `tp` ranks do.

    Args:
        pretrained: a checkpoint folder, a Hub id, or a loaded model.
        comm: name of the comm, such as 'int4' or 'one_step:int6-g32'.
        tp: tensor-parallel world size W.
        codec: 'auto', 'reference', 'cpu' or 'cuda'.
        add_bos_token: one BOS token in front of each request, or none. lm-eval's default has changed over time, so it
            has to be said.
        kwargs: all other arguments of lm-eval's `hf` model.

    Raises:
        FcEvalError: an unknown comm, a world size that the model does not allow, or no word about BOS.
    """

    def __init__(
        self,
        pretrained: Any,
        comm: str = "int4",
        tp: int = 1,
        codec: str = "auto",
        add_bos_token: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if add_bos_token is None:
            raise FcEvalError("say add_bos_token=True or add_bos_token=False in --model_args (LLaMA: True)")
        super().__init__(pretrained=pretrained, add_bos_token=add_bos_token, **kwargs)
        self._communication = ExitStack()
        self._communication.enter_context(communicate(self.model, comm, int(tp), codec))

    def close(self) -> None:
        """Gives the model its own layers back, for callers that go on using it."""
        self._communication.close()


def main() -> None:
    """lm-eval's command line, with the model `fc_eval` known to it."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
