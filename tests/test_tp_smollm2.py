"""The real default model over real ranks: every reduced tensor, the logits and the perplexity are the emulator's."""

import pytest
import rank_models
import torch
from conftest import model_config
from rank_group import shared_group

from fc_eval.evaluate.spec import PerplexitySpec
from fc_eval.models.load import load_model
from fc_eval.parallel.emulate import communicate

pytestmark = pytest.mark.model
COMMS = ["int4-g32", "fp32_ordered"]
TEXT = PerplexitySpec("text", "text", 48, limit=2)


@pytest.fixture(scope="module")
def smollm2():
    """The configuration, with its file converted and in the cache before the ranks ask for it."""
    config = model_config("smollm2")
    return config, load_model(config)


# 9 heads and 3 key/value heads: 3 ranks hold whole heads, 2 and 4 split the row-parallel layers alone.
@pytest.mark.parametrize(("world_size", "plan"), [(3, "full"), (2, "row_only"), (4, "row_only")])
def test_smollm2_over_real_ranks_is_the_emulator(smollm2, world_size, plan, one_thread):
    config, loaded = smollm2
    ids = torch.randint(1000, (1, 40), generator=torch.Generator().manual_seed(0))
    with communicate(loaded.model, COMMS[0], world_size, "auto", plan) as attachment:
        expected = rank_models.measured(loaded.model, attachment, COMMS, ids)
        attachment.set_comm(COMMS[0])
        measured = rank_models.evaluated(loaded.model, attachment, TEXT, 1, loaded.tokenizer)
    assert len(expected["int4-g32"]["layers"]) == 60
    assert not torch.equal(*(found["logits"] for found in expected.values()))
    answers = shared_group().run(world_size, rank_models.compared, config, plan, COMMS, ids, expected, TEXT, measured)
    assert answers == ["the same"] * world_size
