"""The model of a run, loaded, checked and communicating: emulated on one device, or one rank's part of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fc_eval.collective.ranks import Ranks
from fc_eval.config import RunConfig
from fc_eval.evaluate.processes import Processes
from fc_eval.models.half_products import half_products
from fc_eval.models.load import LoadedModel, load_model
from fc_eval.parallel.emulate import Attachment, communicate
from fc_eval.parallel.self_check import SelfCheck, self_check
from fc_eval.quantized import quantize_, smoothed
from fc_eval.tensor_parallel import TIMEOUT_S, consecutive_group, part_of


class Ready(NamedTuple):
    """What a run evaluates: the model, how far splitting it changes its logits, and how it communicates."""

    loaded: LoadedModel
    check: SelfCheck
    attachment: Attachment


@contextmanager
def ready(config: RunConfig, processes: Processes) -> Iterator[Ready]:
    """The model of a run while it communicates, in each of its processes.

    Raises:
        FcEvalError: anything about the model, the comm or the device that the user can mend.
        LostProcessError: another rank has ended, or has not come in time.
    """
    policy, plan = config.build_policy(), config.split_plan
    if config.exec == "tp":
        ranks = Ranks(consecutive_group(config.tp, torch.device(processes.device).type, TIMEOUT_S))
        options = {"plan": plan, "reducer": config.reducer, "codec": config.codec}
        part = part_of(config.model, ranks, policy, device=processes.device, data_root=config.data_root, **options)
        with half_products(part.model):
            yield Ready(part.loaded, part.check, part.communication)
        part.communication.close()
        return
    loaded = smoothed(load_model(config.model.unquantized(), processes.device), config.model, config.data_root)
    with half_products(loaded.model):
        check = self_check(loaded.model, config.tp, config.codec, plan)
        quantize_(loaded)  # afterwards each rank rounds its own slice of activations, which changes more than rounding
        with communicate(loaded.model, policy, config.tp, config.codec, plan) as attachment:
            yield Ready(loaded, check, attachment)
