"""Smoothing: factors by hand, where models can be folded, that it changes nothing, and the folder that keeps it."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import TINY_SHAPE, local_config, logits
from safetensors import SafetensorError
from torch import nn

from fc_eval import quantized
from fc_eval.cli import main
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.calibration import calibration_sequences, calibration_sources
from fc_eval.models.config import CalibrationSpec, ModelConfig, TinySpec
from fc_eval.models.load import load_model
from fc_eval.models.smoothed import SMOOTHING_FILE
from fc_eval.models.tiny import byte_tokenizer, tiny_model
from fc_eval.parallel.self_check import Otherwise, check_logits, rounding_bound, sensitivity
from fc_eval.parallel.sites import find_decoder
from fc_eval.sweep.contents import contents
from fc_eval.sweep.plan import plan
from fc_eval.weights.folds import find_folds
from fc_eval.weights.linear import W8A8Linear
from fc_eval.weights.smooth import factors, recording, smooth_

SHORT = CalibrationSpec("text", sequences=2, tokens=32)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def tiny_config(family="llama", **changes) -> ModelConfig:
    settings = {"dtype": "bf16", "weights": "w8a8", "calibration": SHORT} | changes
    return ModelConfig("tiny", tiny=TinySpec(family), shape=TINY_SHAPE, **settings)


def uneven(family: str, dtype=torch.float32, **overrides):
    """A tiny model whose biases and norms are random (but those of heads), some gains far off and some zero."""
    model = tiny_model(TINY_SHAPE, family, 0, dtype, "eager", **overrides)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith(("q_norm.weight", "k_norm.weight")):
            values = torch.rand(parameter.shape, generator=generator) * 2 - 0.5
            if name.endswith("weight"):
                values[:3] = torch.tensor([30.0, 0.0, -20.0])
            parameter.data.copy_(values)
    return model


# -- factors ------------------------------------------------------------------------------------------------------


def test_factors_by_hand():
    x, w = torch.tensor([16.0, 4.0, 0.0, 3.0]), torch.tensor([0.25, 4.0, 1.0, 0.0])
    assert factors(x, w, 0.5).tolist() == [8, 1, 1, 1]
    assert factors(x, w, 1.0).tolist() == [16, 4, 1, 1]
    assert factors(x, w, 0.0).tolist() == [4, 0.25, 1, 1]
    assert float(factors(x, w, 0.85)[0]) == pytest.approx(16.0**0.85 / 0.25**0.15, rel=1e-14)  # two powers in fp64
    assert factors(torch.tensor([1e-9]), torch.tensor([1.0]), 1.0) == 1e-5


class Block(nn.Module):
    """One norm that feeds two layers; `also` uses its output otherwise, too."""

    def __init__(self, norm: nn.Module, also: bool = False) -> None:
        super().__init__()
        self.norm, self.also = norm, also
        self.a, self.b = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x):
        x = self.norm(x)
        y = self.a(x) + self.b(input=x)
        return y + x.sum(-1, keepdim=True) if self.also else y


def test_a_layer_norm_is_folded_by_hand_with_its_bias():
    block = Block(nn.LayerNorm(2)).requires_grad_(False)
    block.norm.weight.copy_(torch.tensor([8.0, 1.0]))
    block.norm.bias.copy_(torch.tensor([8.0, 3.0]))
    block.a.weight.copy_(torch.tensor([[0.25, -4.0]]))
    block.b.weight.copy_(torch.tensor([[-0.125, 1.0]]))
    x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    (fold,) = find_folds(block, lambda: block(x))
    assert (fold.norm, fold.linears, fold.offset) == ("norm", ("a", "b"), 0.0)
    with recording(block, [fold]) as largest:
        before = block(x)
    assert largest["norm"].tolist() == pytest.approx([16, 4], rel=1e-4)  # LayerNorm's epsilon of 1e-5
    smooth_(block, [fold], {"norm": torch.tensor([16.0, 4.0])}, 0.5)  # s = 8, 1
    assert block.norm.weight.tolist() == [1, 1]
    assert block.norm.bias.tolist() == [1, 3]
    assert block.a.weight.tolist() == [[2, -4]]
    assert block.b.weight.tolist() == [[-1, 1]]
    assert torch.equal(block(x), before)  # powers of two


FAMILIES = [
    ("llama", 0.0, "post_attention_layernorm", QKV, GATE_UP),
    ("qwen2", 0.0, "post_attention_layernorm", QKV, GATE_UP),
    ("qwen3", 0.0, "post_attention_layernorm", QKV, GATE_UP),
    ("phi3", 0.0, "post_attention_layernorm", ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)),
    ("gemma", 1.0, "post_attention_layernorm", QKV, GATE_UP),
    ("gemma3_text", 1.0, "pre_feedforward_layernorm", QKV, GATE_UP),
    ("starcoder2", 0.0, "post_attention_layernorm", QKV, ("mlp.c_fc",)),  # LayerNorm with a bias
]


@pytest.mark.parametrize(("family", "offset", "second", "attention", "mlp"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_folds_are_found_and_change_nothing(family, offset, second, attention, mlp):
    model = uneven(family)
    decoder = find_decoder(model)
    folds = find_folds(decoder, lambda: check_logits(model))
    assert [(f.norm, f.linears, f.offset) for f in folds] == [
        (f"layers.{layer}.{norm}", tuple(f"layers.{layer}.{name}" for name in names), offset)
        for layer in range(TINY_SHAPE.layers)
        for norm, names in (("input_layernorm", attention), (second, mlp))
    ]
    with recording(decoder, folds) as largest:
        before = check_logits(model)
    with Otherwise().in_outputs(decoder, [name for fold in folds for name in fold.linears]):
        bound = rounding_bound(sensitivity(model))
    weights = {name: p.clone() for name, p in decoder.named_parameters()}
    smooth_(decoder, folds, largest, 0.85)
    after = check_logits(model)
    assert not any(torch.equal(decoder.get_parameter(f"{f.norm}.weight"), weights[f"{f.norm}.weight"]) for f in folds)
    # Each smoothed weight is rounded once more; the check of a run has the same bound and reason.
    assert (after - before).norm() <= bound * before.norm()
    with recording(decoder, folds) as smoother:
        check_logits(model)
    for fold in folds:  # the outliers have moved: channels are more alike than before, by far
        one, other = (found[fold.norm][found[fold.norm] > 0] for found in (largest, smoother))
        assert other.max() / other.median() < one.max() / one.median() / 2


def test_in_bf16_the_weights_make_up_for_what_a_norm_is_rounded():
    model = uneven("gemma3_text", torch.bfloat16)
    decoder = find_decoder(model)
    folds = find_folds(decoder, lambda: check_logits(model))
    name, gains = folds[0].norm, {f.norm: 1 + decoder.get_parameter(f"{f.norm}.weight").double() for f in folds}
    weight = decoder.get_parameter(f"{folds[0].linears[0]}.weight").clone()
    with recording(decoder, folds) as largest:
        check_logits(model)
    smooth_(decoder, folds, largest, 0.85)
    fell = gains[name] / (1 + decoder.get_parameter(f"{name}.weight").double())
    expected = (weight.float() * fell.float()).to(torch.bfloat16)
    kept = gains[name] != 0
    assert torch.equal(decoder.get_parameter(f"{folds[0].linears[0]}.weight")[:, kept], expected[:, kept])


def test_places_that_cannot_be_folded_are_one_sentence():
    model = tiny_model(TINY_SHAPE, "olmo2")  # norms after the layers
    with pytest.raises(FcEvalError, match=r"^Olmo2Model has no place to fold smoothing into: .* model\.smoothing=null"):
        find_folds(find_decoder(model), lambda: check_logits(model))

    class Odd(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    block = Block(Odd(2))
    with pytest.raises(FcEvalError, match=r"^norm \(Odd\) multiplies neither by its weight nor by 1 \+ weight"):
        find_folds(block, lambda: block(torch.ones(1, 2)))


def test_a_norm_that_is_used_elsewhere_is_noticed(monkeypatch, own_cache):
    own = quantized.smooth_

    def divides_only(decoder, folds, activations, alpha):  # as if nobody undid it
        own(decoder, folds, activations, alpha)
        decoder.get_parameter(f"{folds[0].linears[0]}.weight").data.mul_(2)

    monkeypatch.setattr(quantized, "smooth_", divides_only)
    with pytest.raises(FcEvalError, match="smoothing changes what the model computes"):
        quantized.load(tiny_config())


# -- calibration --------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path):
    """A mirror with the training set of WikiText-2, 40 rows, and C4's evaluation split alone."""
    for place, rows in {
        "Salesforce/wikitext/wikitext-2-raw-v1/train": [f" = Row {i} = \n" for i in range(40)],
        "allenai/c4/en/validation": ["text"],
    }.items():
        file = tmp_path / "mirror" / f"{place}.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.table({"text": rows}), file)
    return tmp_path / "mirror"


def test_sequences_are_spread_over_the_text_and_begin_with_bos(mirror):
    whole = "\n\n".join(f" = Row {i} = \n" for i in range(40))
    tokenizer = byte_tokenizer()
    tokens = tokenizer(whole, add_special_tokens=False)["input_ids"]
    found = calibration_sequences("wikitext2", 3, 9, tokenizer, mirror, True)
    step = len(tokens) // 3
    assert found.ids.tolist() == [[tokenizer.bos_token_id, *tokens[i * step : i * step + 8]] for i in range(3)]
    assert found.origin["split"] == "train"
    assert found.origin["where"] == "data.root"
    other = calibration_sequences("wikitext2", 3, 9, tokenizer, mirror, False)
    assert other.ids.tolist() == [tokens[i * step : i * step + 9] for i in range(3)]
    assert other.origin["token_ids_sha256"] != found.origin["token_ids_sha256"]
    most = len(tokens) // 99
    said = rf"{len(tokens)} tokens .* 9 sequences of 99 are .*set model\.calibration\.sequences={most} or less"
    with pytest.raises(FcEvalError, match=said):
        calibration_sequences("wikitext2", 9, 99, tokenizer, mirror, False)
    calibration_sequences("wikitext2", most, 99, tokenizer, mirror, False)


def test_a_mirror_without_training_text_is_told_what_to_do(mirror):
    with pytest.raises(FcEvalError, match=r"has no split 'train': it has validation; .* set model\.calibration\.text"):
        calibration_sources("c4", mirror)
    assert [hub.id for hub in calibration_sources("c4", None).hub] == ["allenai/c4"]
    with pytest.raises(FcEvalError, match=r"text file '\./none\.txt' does not exist: give model\.calibration\.text"):
        calibration_sources("./none.txt", None)


def test_the_fingerprint_knows_weights_strength_and_text(mirror):
    def identity(*overrides):
        base = ["model=tiny", "tp=2", "device=cpu", "threads=1", f"data.root={mirror}", "eval=text"]
        return plan(compose_one([*base, *overrides])).fingerprint

    w8a8 = ["model.weights=w8a8"]
    different = [
        identity(),
        identity(*w8a8),
        identity(*w8a8, "model.smoothing=0.5"),
        identity(*w8a8, "model.smoothing=null"),
        identity(*w8a8, "model.calibration.text=text"),
        identity(*w8a8, "model.calibration.sequences=7"),
    ]
    assert len(set(different)) == len(different)
    # What is not smoothed looks at no text.
    assert identity("model.smoothing=0.5", "model.calibration.text=c4") == different[0]
    assert identity(*w8a8, "model.smoothing=null", "model.calibration.text=c4") == different[3]
    file = mirror / "Salesforce/wikitext/wikitext-2-raw-v1/train.parquet"
    pq.write_table(pa.table({"text": ["another text"]}), file)
    assert identity(*w8a8) != different[1]
    (line,) = contents(compose_one(["model=tiny", f"data.root={mirror}", *w8a8])).model
    assert re.fullmatch("calibration [0-9a-f]{64}", line)


def test_activations_are_looked_at_once(own_cache, capsys):
    first = quantized.load(tiny_config())
    assert "the model reads 2 sequences of 32 tokens once" in capsys.readouterr().out
    again = quantized.load(tiny_config(smoothing=0.5))
    assert "reads" not in capsys.readouterr().out
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.model.get_parameter(weight), again.model.get_parameter(weight))
    (kept,) = (own_cache / "activations").glob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])  # a disk has lost the rest
    whole = quantized.load(tiny_config())
    assert "reads" in capsys.readouterr().out
    assert torch.equal(first.model.get_parameter(weight), whole.model.get_parameter(weight))


# -- models -------------------------------------------------------------------------------------------------------


def test_a_loaded_model_says_how_it_was_quantized(own_cache):
    loaded = quantized.load(tiny_config())
    assert loaded.config.weights == "w8a8"
    assert re.search(r"W8A8 \(alpha 0\.85\), calibrated on pydoc_data\.topics, 2 sequences of 32", loaded.notes[-1])
    assert isinstance(loaded.model.model.layers[0].mlp.down_proj, W8A8Linear)
    plain = quantized.load(tiny_config(smoothing=None))
    assert plain.notes[-1] == "W8A8 (no smoothing)"
    native = quantized.load(tiny_config(weights="native"))
    assert type(native.model.model.layers[0].mlp.down_proj) is nn.Linear
    with pytest.raises(FcEvalError, match=r"not weights=w8a8: use fc_eval\.quantized\.load"):
        load_model(tiny_config())


def test_a_smoothed_folder_is_an_ordinary_checkpoint_and_is_not_smoothed_twice(
    checkpoint, token_ids, tmp_path, own_cache, capsys, one_thread
):
    folder = tmp_path / "smoothed"
    words = ["model=local", "model.dtype=bf16", "model.calibration.text=text", "model.calibration.sequences=2"]
    assert main(["smooth", *words, f"model.path={checkpoint}", "device=cpu", "threads=1", f"out={folder}"]) == 0
    said = json.loads((folder / SMOOTHING_FILE).read_text())
    assert said["alpha"] == 0.85
    assert said["calibration"]["dataset"] == "pydoc_data.topics"
    calibration = CalibrationSpec("text", sequences=2)
    direct = quantized.load(
        local_config(checkpoint, dtype="bf16", weights="w8a8", calibration={"text": "text", "sequences": 2})
    )
    config = local_config(folder, dtype="bf16", weights="w8a8")
    kept = quantized.load(config)
    assert torch.equal(logits(direct.model, token_ids), logits(kept.model, token_ids))
    whole = load_model(local_config(checkpoint, dtype="bf16")).model
    original = logits(whole, token_ids).float()
    native = quantized.load(config.unquantized())
    found = logits(native.model, token_ids).float()
    names = [f"model.layers.{layer}.{name}" for layer in range(TINY_SHAPE.layers) for name in (*QKV, *GATE_UP)]
    with Otherwise().in_outputs(whole, names):  # the weights of these are rounded once more
        assert (found - original).norm() <= rounding_bound(sensitivity(whole)) * original.norm()
    assert native.notes[-1].startswith("smoothed with 0.85")
    sentence = r"model\.smoothing=0\.5 is not possible: .* is smoothed with 0\.85 already; set model\.smoothing=0\.85"
    with pytest.raises(FcEvalError, match=sentence):
        quantized.load(replace(config, smoothing=0.5, calibration=calibration))
    (folder / SMOOTHING_FILE).write_text("{}")
    with pytest.raises(FcEvalError, match="does not say how the folder was smoothed"):
        quantized.load(config)


MISTAKES = {
    "no folder": ([], "say where the smoothed checkpoint goes: out=DIR"),
    "a folder that is there": (["out=."], "out=. exists already: name a folder that does not"),
    "no strength": (["model.smoothing=null", "out=new"], "nothing is to be smoothed: give model.smoothing=ALPHA"),
    "a sweep": (["model.smoothing=0.5,0.85", "out=new"], "gives several values"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_of_the_command_is_one_sentence(case, capsys):
    words, sentence = MISTAKES[case]
    assert main(["smooth", "model=tiny", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert sentence in err


def test_a_disk_that_is_full_is_one_sentence_and_leaves_nothing(tmp_path, own_cache, capsys, monkeypatch):
    def full(self, folder, **_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    words = ["model=tiny", "model.calibration.text=text", "model.calibration.sequences=2", "device=cpu", "threads=1"]
    assert main(["smooth", *words, f"out={tmp_path / 'kept' / 'new'}"]) == 2
    assert "No space left on device (ENOSPC): free some, or set out= to a folder elsewhere" in capsys.readouterr().err
    assert list((tmp_path / "kept").iterdir()) == []


def test_smoothing_helps_where_activations_have_outliers(own_cache):
    """What it is for: a few channels a hundred times the others, whose weights are small, drown the rest otherwise."""
    errors = {}
    for alpha in (None, 0.5):
        model = tiny_model(TINY_SHAPE, dtype=torch.float32)
        for fold in find_folds(model.model, lambda model=model: check_logits(model)):
            model.model.get_parameter(f"{fold.norm}.weight").data[:4] *= 100
            for name in fold.linears:
                model.model.get_parameter(f"{name}.weight").data[:, :4] /= 100
        exact = check_logits(model)
        loaded = replace(load_model(tiny_config(weights="native", dtype="fp32")), model=model)
        quantized.quantize_(quantized.smoothed(loaded, tiny_config(smoothing=alpha, dtype="fp32")))
        errors[alpha] = float((check_logits(model) - exact).norm() / exact.norm())
    assert errors[0.5] < errors[None] / 5
