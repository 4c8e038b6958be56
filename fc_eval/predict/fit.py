"""The free parameters of the model from measured rows: least squares of log times, tested on rows that are held out."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError, unknown
from fc_eval.predict.machine import NAMES, Machine
from fc_eval.predict.model import AllReduce

Floats = npt.NDArray[np.float64]
# Every third row is held out.
HELD_OUT_EVERY = 3
# A latency is fitted where it is at least this share of the smallest all-reduce; elsewhere no time would show it.
VISIBLE = 0.05


class Measured(Protocol):
    """What a fit is made to: a `rows.Row` or a `calls.Call`."""

    @property
    def is_quantized(self) -> bool:
        """Whether its all-reduces encode anything."""
        ...

    @property
    def shows(self) -> frozenset[str]:
        """Parameters that it shows, apart from those of latencies and links."""
        ...

    def call(self, machine: Machine) -> AllReduce:
        """One of its all-reduces, predicted."""
        ...

    def residuals(self, machine: Machine) -> list[float]:
        """ln(predicted / measured) of each of its times."""
        ...

    def error(self, machine: Machine) -> float:
        """|predicted / measured - 1| of its whole time."""
        ...


@dataclass(frozen=True)
class Fit:
    """A fit.

    Attributes:
        machine: with the fitted parameters.
        values: of these by name; `errors`: their standard errors, relative.
        points: rows that were fitted; `held_out` those that were not.
        median_error: of the whole time of the rows held out; `median_error_before` without the fit.
    """

    machine: Machine
    values: dict[str, float]
    errors: dict[str, float]
    points: int
    held_out: int
    median_error: float
    median_error_before: float


def fit(rows: Sequence[Measured], start: Machine, free: Sequence[str] = ()) -> Fit:
    """Fits parameters to two thirds of the rows and tests them on the rest.

    Times spread by factors and are all positive, so residuals are differences of logarithms, and so are parameters:
    none can become negative. Where a row has the times of its parts, these are fitted, otherwise its whole time.

    Args:
        rows: of one machine.
        start: its rates and the parameters to start from; those that are not free keep their values.
        free: names of the parameters; those that the rows can tell apart, where empty.

    Raises:
        FcEvalError: too few rows, or parameters that the rows cannot tell apart.
    """
    from scipy.optimize import least_squares  # takes half a second, and a prediction needs none

    for name in free:
        if name not in NAMES:
            raise unknown("parameter", name, NAMES)
    names = tuple(free) or visible(rows, start)
    held_out = list(rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    fitted = [row for place, row in enumerate(rows) if place % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    if not held_out or len(fitted) < len(names):
        raise FcEvalError(
            f"{len(rows)} measured rows cannot fit {len(names)} parameters ({', '.join(names)}) and test them: "
            f"expected {math.ceil(len(names) * HELD_OUT_EVERY / (HELD_OUT_EVERY - 1))} or more of this machine"
        )

    def with_logs(logs_P: Floats) -> Machine:
        values = {name: math.exp(log) for name, log in zip(names, logs_P, strict=True)}
        return start.with_values(values, f"fitted to {len(fitted)} measured rows")

    def residuals(logs_P: Floats) -> Floats:
        machine = with_logs(logs_P)
        return np.array([residual for row in fitted for residual in row.residuals(machine)])

    begin_P = np.log([getattr(start.parameters, name).value for name in names])
    found = least_squares(residuals, begin_P, x_scale="jac")
    best = with_logs(found.x)
    return Fit(
        machine=best,
        values={name: getattr(best.parameters, name).value for name in names},
        errors=dict(zip(names, _relative_errors(found.jac, found.fun, names), strict=True)),
        points=len(fitted),
        held_out=len(held_out),
        median_error=statistics.median(row.error(best) for row in held_out),
        median_error_before=statistics.median(row.error(start) for row in held_out),
    )


def visible(rows: Sequence[Measured], machine: Machine) -> tuple[str, ...]:
    """The parameters that rows can tell apart.

    Attention and memory need times of their own; a latency needs messages so small that it shows; the codec's rate,
    which acts much as the link's does, needs single calls in formats of different bits.
    """
    quantized = [row for row in rows if row.is_quantized]
    plain = [row for row in rows if not row.is_quantized]
    shown = frozenset[str]().union(*(row.shows for row in rows))
    bits = {row.call(machine).bits for row in quantized}
    wanted = {name: name in shown for name in ("gemm_bf16", "gemm_int8", "attention", "memory")}
    wanted |= {
        "codec": "codec" in shown and len(bits) > 1,
        "fused": bool(quantized),
        "nccl": bool(plain),
        "fused_us": _latency_shows(quantized, machine),
        "nccl_us": _latency_shows(plain, machine),
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def _latency_shows(rows: Sequence[Measured], machine: Machine) -> bool:
    """Whether one message is small enough for its latency to be seen, and another one of a different size."""
    calls = [row.call(machine) for row in rows]
    return len({call.wire_bytes for call in calls}) > 1 and max(c.latency_s / c.total_s for c in calls) > VISIBLE


def _relative_errors(jacobian_NP: Floats, residuals_N: Floats, names: Sequence[str]) -> list[float]:
    """Standard errors of log parameters, which are relative errors of the parameters.

    Raises:
        FcEvalError: some direction in the parameters changes no residual.
    """
    spread_P = np.linalg.svd(jacobian_NP, compute_uv=False)
    if spread_P[-1] < 1e-6 * spread_P[0]:  # differences of 1e-8 make the Jacobian: less than 1e-6 is their noise
        raise FcEvalError(f"these rows cannot tell {', '.join(names)} apart: measure more sizes or comms, or fit fewer")
    degrees = max(1, len(residuals_N) - len(names))
    variance = float(residuals_N @ residuals_N) / degrees
    covariance_PP = variance * np.linalg.inv(jacobian_NP.T @ jacobian_NP)
    return [float(error) for error in np.sqrt(np.diag(covariance_PP))]
