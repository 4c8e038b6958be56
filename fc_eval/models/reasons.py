"""Why a model could not be made, in words that say what to do."""

from pathlib import Path


def no_gguf(file: Path) -> str:
    """Why a path is no GGUF file that could be read."""
    if file.is_dir():
        return f"{file} is a folder, and this preset's model is a .gguf file: choose model=local model.path={file}"
    return f"{file} does not exist: expected a .gguf file"


def reason(error: Exception, attn_implementation: str) -> str:
    """The first line of an error, or advice where a setting of ours decides.

    Configurations, weights and a model's own code have no common error type, so this is asked of any of them.
    """
    text = str(error)
    if "trust_remote_code" in text:
        return "it brings its own code; if you trust it, set model.trust_remote_code=true"
    if "Unrecognized configuration class" in text:
        return "transformers has no causal language model of this type"
    if "ignore_mismatched_sizes" in text:
        return "its weights have other sizes than its config.json says; fetch or copy it again"
    attention = ("attention implementation", "attn_implementation", "FlashAttention", "scaled_dot_product_attention")
    if any(word in text for word in attention):
        return f"there is no {attn_implementation!r} attention for it here; set model.attn_implementation=eager"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # a validator's name, then what it found
        return lines[1]
    return lines[0] if lines else type(error).__name__
