"""GGUF files: dequantized once, into the same weights, and never half; a damaged file is one sentence."""

import errno
from pathlib import Path

import gguf as gguf_package
import pytest
import torch
from conftest import TINY_SHAPE, local_config
from safetensors import SafetensorError

from fc_eval.errors import FcEvalError
from fc_eval.models import gguf
from fc_eval.models.load import load_model
from fc_eval.models.tiny import byte_tokenizer
from fc_eval.parallel.sites import find_sites

pytestmark = pytest.mark.usefixtures("own_cache")
BYTES = byte_tokenizer()


@pytest.fixture
def gguf_file(tmp_path, tiny):
    """The tiny LLaMA as a GGUF file with 8-bit weights in its row-parallel layers, and its tokenizer."""
    path = tmp_path / "tiny.gguf"
    shape, tokens = TINY_SHAPE, list(BYTES.get_vocab())
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(tokens, key=BYTES.get_vocab().get)[:-2], "!!", "##"])
    writer.add_token_merges(["! !", "# #"])  # without merges it would be another kind of tokenizer
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.LLAMA, shape.layers)
    for name, weight in tiny.state_dict().items():
        tensor = weight.numpy()
        name = names.get_name(name.removesuffix(".weight")) + ".weight"
        if "output.weight" in name or "ffn_down" in name:
            q8 = gguf_package.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf_package.quants.quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gguf_is_dequantized_once_into_the_same_weights(gguf_file, tiny, token_ids, monkeypatch, capsys, dtype):
    loaded = load_model(local_config(gguf_file, dtype=dtype))
    assert "dequantizing once" in capsys.readouterr().out
    assert loaded.source_files == (gguf_file,)
    assert loaded.notes == ("dequantized from tiny.gguf",)
    assert not hasattr(loaded.model.config, "quantization_config")
    assert len(find_sites(loaded.model)) == 4
    q8 = gguf_package.GGMLQuantizationType.Q8_0
    for name, weight in tiny.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            packed = gguf_package.quants.quantize(weight.numpy(), q8)
            expected = torch.from_numpy(gguf_package.quants.dequantize(packed, q8)).to(loaded.model.dtype)
            assert torch.equal(loaded.model.get_parameter(name), expected)
    monkeypatch.setattr(gguf, "_convert", None)  # nothing is left to convert
    again = load_model(local_config(gguf_file, dtype=dtype))
    assert torch.equal(again.model(token_ids).logits, loaded.model(token_ids).logits)
    assert loaded.tokenizer.encode("ab ", add_special_tokens=False) == BYTES.encode("ab ", add_special_tokens=False)


def test_an_interrupted_conversion_leaves_no_folder(gguf_file, monkeypatch, own_cache):
    def killed(self, folder):
        Path(folder).mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            load_model(local_config(gguf_file))
    assert not [path for path in (own_cache / "converted").iterdir() if path.suffix != ".lock"]
    assert load_model(local_config(gguf_file)).source_files == (gguf_file,)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1000], "truncated or corrupt"),
        (lambda data: data[:300], "truncated or corrupt"),
        (lambda data: data[:4], "truncated or corrupt"),
        (lambda data: data[:4] + b"\xff" * 40 + data[44:], "truncated or corrupt"),
        (lambda data: b"<html>404</html>", "is not a GGUF file"),
        (lambda data: b"", "is not a GGUF file"),
    ],
)
def test_a_damaged_gguf_is_one_sentence(gguf_file, damage, message):
    gguf_file.write_bytes(damage(gguf_file.read_bytes()))
    with pytest.raises(FcEvalError, match=message) as caught:
        load_model(local_config(gguf_file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=["safetensors", "tokenizers", "system"],
)
def test_a_disk_that_is_full_during_the_conversion_is_one_sentence(gguf_file, monkeypatch, own_cache, error):
    def full(self, folder):
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    expected = rf"{own_cache}/converted.*: No space left on device \(ENOSPC\): free some, or set FC_EVAL_CACHE"
    with pytest.raises(FcEvalError, match=expected):
        load_model(local_config(gguf_file))


def test_a_cache_that_is_a_file_is_one_sentence(gguf_file, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FC_EVAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(FcEvalError, match=r"/file.* \((ENOTDIR|EEXIST)\): set FC_EVAL_CACHE to a folder elsewhere"):
        load_model(local_config(gguf_file))


def test_a_gguf_of_an_architecture_that_cannot_be_read(tmp_path):
    writer = gguf_package.GGUFWriter(tmp_path / "other.gguf", "notamodel")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(FcEvalError, match=r"other\.gguf cannot be read as GGUF by transformers"):
        load_model(local_config(tmp_path / "other.gguf"))


def test_a_folder_where_a_preset_has_a_file_is_told_what_to_choose(tmp_path):
    with pytest.raises(FcEvalError, match=r"is a folder, .*: choose model=local model\.path="):
        gguf.checkpoint_of(tmp_path, torch.bfloat16)
