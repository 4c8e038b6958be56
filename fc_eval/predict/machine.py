"""The machine of a prediction: peak rates of a GPU and its link, and which share of them is reached.

Presets are the rows of `conf/hardware/gpus.yaml` and `links.yaml`; `fc-eval calibrate` writes a file of the same keys.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fc_eval.errors import FcEvalError, os_error, unknown
from fc_eval.presets import preset
from fc_eval.settings import build

GROUP = "hardware"
AUTO_LINKS = ("nvlink", "pcie")


@dataclass(frozen=True)
class Parameter:
    """A free parameter of the cost model, and where its value comes from."""

    value: float
    source: str

    def __post_init__(self) -> None:
        _positive("value", self.value)


@dataclass(frozen=True)
class Parameters:
    """The free parameters of the cost model.

    Attributes:
        gemm_bf16: share of the peak rate that a large matrix product in bf16 reaches; `gemm_int8` of the INT8 peak.
        attention: share of the bf16 peak that the attention kernel reaches.
        memory: share of the memory bandwidth that norms, rope and activations reach; `codec`: that encoding,
            decoding and summing reach.
        fused: share of the link's rate that a quantized all-reduce reaches; `nccl`: that NCCL's ring reaches.
        fused_us: fixed time of a quantized all-reduce; `nccl_us`: of NCCL's.
        step_us: time of each exchange that waits for the one before.
    """

    gemm_bf16: Parameter
    gemm_int8: Parameter
    attention: Parameter
    memory: Parameter
    codec: Parameter
    fused: Parameter
    nccl: Parameter
    fused_us: Parameter
    nccl_us: Parameter
    step_us: Parameter

    def with_values(self, values: Mapping[str, float], source: str) -> "Parameters":
        """The same with some values replaced, all from one source.

        Raises:
            FcEvalError: a value that is not above 0.
        """
        for name, value in values.items():
            _positive(name, value)
        return replace(self, **{name: Parameter(float(value), source) for name, value in values.items()})


NAMES = tuple(each.name for each in fields(Parameters))


@dataclass(frozen=True)
class Link:
    """A link: the bytes per second that a GPU sends while it receives as many, in 1e9, and parameters of its own."""

    name: str
    gb_per_s: float
    source: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _positive(f"link {self.name}: gb_per_s", self.gb_per_s)
        _mapping(f"link {self.name}: parameters", self.parameters)


@dataclass(frozen=True)
class Fitted:
    """What a fit says of itself: how many rows it used and held out, its median error on the latter, and of what."""

    points: int
    held_out: int
    median_error: float
    what: str = "prefills"

    def __post_init__(self) -> None:
        for key in ("points", "held_out", "median_error"):
            _positive(f"fitted.{key}", getattr(self, key))


@dataclass(frozen=True)
class Gpu:
    """One row of `conf/hardware/gpus.yaml`, or a file of `fc-eval calibrate`.

    Attributes:
        name: for tables.
        source: where the rates come from.
        bf16_tflops: dense peak in 1e12 operations per second; `int8_tops` of INT8, None where it is not known.
        memory_gb_per_s: memory bandwidth in 1e9 bytes per second.
        memory_gb: memory in 1e9 bytes, None where it is not known.
        device: how torch names it.
        pcie: its generation; `nvlink`: likewise, None where there is none.
        link: a link that was measured on this machine.
        parameters: its own, by name, each a value and a source.
        fitted: what the fit says that its parameters come from.
    """

    name: str
    source: str
    bf16_tflops: float
    memory_gb_per_s: float
    int8_tops: float | None = None
    memory_gb: float | None = None
    device: str | None = None
    pcie: int | None = None
    nvlink: int | None = None
    link: Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fitted: Fitted | None = None

    def __post_init__(self) -> None:
        for key in ("bf16_tflops", "memory_gb_per_s", "int8_tops", "memory_gb"):
            if getattr(self, key) is not None:
                _positive(key, getattr(self, key))
        _mapping("parameters", self.parameters)
        if self.link is not None:
            _mapping("link", self.link)


@dataclass(frozen=True)
class Machine:
    """A GPU, the link between those of one machine, and the parameters that hold for both."""

    gpu: Gpu
    link: Link
    parameters: Parameters

    @property
    def label(self) -> str:
        """'L40, pcie4'."""
        return f"{self.gpu.name}, {self.link.name}"

    def per_second(self, what: str) -> float:
        """A rate that is reached: operations per second of a product or attention, bytes per second otherwise.

        Raises:
            FcEvalError: this machine's INT8 rate is not known.
        """
        share = getattr(self.parameters, what).value
        if what in ("gemm_bf16", "attention"):
            return float(share * self.gpu.bf16_tflops * 1e12)
        if what == "gemm_int8":
            if self.gpu.int8_tops is None:
                raise FcEvalError(f"{self.gpu.name} has no int8_tops: add it to its hardware file, or use weights=bf16")
            return float(share * self.gpu.int8_tops * 1e12)
        peak = self.gpu.memory_gb_per_s if what in ("memory", "codec") else self.link.gb_per_s
        return float(share * peak * 1e9)

    def seconds(self, what: str) -> float:
        """A latency in seconds."""
        return float(getattr(self.parameters, what).value * 1e-6)

    def with_values(self, values: Mapping[str, float], source: str) -> "Machine":
        """The same machine with some parameters replaced."""
        return replace(self, parameters=self.parameters.with_values(values, source))


def machine(
    gpu: str, link: str | None = None, values: Mapping[str, float] | None = None, link_gb_per_s: float | None = None
) -> Machine:
    """The machine that a command line names.

    Args:
        gpu: a row of `gpus.yaml`, or a hardware file.
        link: a row of `links.yaml`, 'nvlink' or 'pcie' for the GPU's own generation; None for the fastest it has.
        values: parameters that replace those of all files.
        link_gb_per_s: replaces the link's rate.

    Raises:
        FcEvalError: an unknown name, a file that does not read, or a link that the GPU does not have.
    """
    row = find_gpu(gpu)
    found = _link_of(row, link)
    if link_gb_per_s is not None:
        found = replace(found, gb_per_s=link_gb_per_s, source="given")
    tree = {**preset(GROUP, "parameters"), **found.parameters, **row.parameters}
    parameters = Parameters(**{name: parameter(name, said) for name, said in tree.items()})
    return Machine(row, found, parameters.with_values(values or {}, "given"))


def find_gpu(name: str) -> Gpu:
    """A preset by name, or a hardware file by path.

    Raises:
        FcEvalError: neither is there, or the file is none.
    """
    rows = preset(GROUP, "gpus")
    if name in rows:
        return _build_gpu(f"gpus.{name}", rows[name])
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise unknown("gpu", name, rows, hint="or a file that `fc-eval calibrate` wrote, FILE.yaml")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise os_error(error, path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FcEvalError(f"{path} is no YAML file ({' '.join(str(error).split())}): calibrate again") from None
    row = _build_gpu(str(path), tree)
    for key, said in row.parameters.items():
        parameter(key, said)
    return row


def _build_gpu(where: str, tree: Any) -> Gpu:
    if isinstance(tree, Mapping) and tree.get("fitted") is not None:
        tree = {**tree, "fitted": build(f"{where}: fitted", Fitted, tree["fitted"])}
    return build(where, Gpu, tree)


def parameter(name: str, said: Any) -> Parameter:
    """A parameter as a file writes it, {value: 0.8, source: "..."}.

    Raises:
        FcEvalError: an unknown name, or no such mapping.
    """
    if name not in NAMES:
        raise unknown("parameter", name, NAMES)
    return build(name, Parameter, said)


def _link_of(gpu: Gpu, name: str | None) -> Link:
    rows = preset(GROUP, "links")
    if gpu.link is not None and name in (None, gpu.link.get("name")):
        return build(f"{gpu.name}: link", Link, gpu.link)
    own = {kind: getattr(gpu, kind) for kind in AUTO_LINKS if getattr(gpu, kind) is not None}
    if name is None:
        if not own:
            known = ", ".join(rows)
            raise FcEvalError(f"{gpu.name} does not say its link: give link=NAME, one of {known}")
        name = next(iter(own))
    if name in AUTO_LINKS:
        if name not in own:
            there = " or ".join(f"link={kind}" for kind in own) or "another link"
            raise FcEvalError(f"{gpu.name} has no {name}: use {there}")
        name = f"{name}{own[name]}"
    if name not in rows:
        raise unknown("link", name, [*rows, *AUTO_LINKS])
    for kind in AUTO_LINKS:
        generation = name.removeprefix(kind)
        if own and generation.isdigit() and int(generation) > own.get(kind, 0):
            has = f"it has {kind}{own[kind]}" if kind in own else f"it has no {kind}"
            raise FcEvalError(f"{gpu.name} cannot use link={name}: {has}")
    return build(f"links.{name}", Link, {"name": name, **rows[name]})


def _positive(what: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # whole numbers of YAML may be larger; NaN is neither
        raise FcEvalError(f"{what}={value!r} is not possible: expected a number above 0")


def _mapping(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise FcEvalError(f"{what}={value!r} is not possible: expected a mapping")
