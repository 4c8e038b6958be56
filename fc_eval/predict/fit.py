"""The free parameters of the model from measured rows: least squares of log times, tested on rows that are held out."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fc_eval.errors import FcEvalError, unknown
from fc_eval.predict.machine import NAMES, Machine
from fc_eval.predict.rows import PARTS, Row, predicted, relative_errors

Floats = npt.NDArray[np.float64]
# Every third row is held out.
HELD_OUT_EVERY = 3
# A latency is fitted where it is at least this share of the smallest all-reduce; elsewhere no time would show it.
VISIBLE = 0.05


@dataclass(frozen=True)
class Fit:
    """A fit.

    Attributes:
        machine: with the fitted parameters.
        values: of these by name; `errors`: their standard errors, relative.
        points: rows that were fitted; `held_out` those that were not.
        median_error: of the time to first token on the rows held out; `median_error_before` without the fit.
    """

    machine: Machine
    values: dict[str, float]
    errors: dict[str, float]
    points: int
    held_out: int
    median_error: float
    median_error_before: float


def fit(rows: Sequence[Row], start: Machine, free: Sequence[str] = ()) -> Fit:
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
        return np.array([residual for row in fitted for residual in _residuals(row, machine)])

    begin_P = np.log([getattr(start.parameters, name).value for name in names])
    found = least_squares(residuals, begin_P, x_scale="jac")
    best = with_logs(found.x)
    return Fit(
        machine=best,
        values={name: getattr(best.parameters, name).value for name in names},
        errors=dict(zip(names, _relative_errors(found.jac, found.fun, names), strict=True)),
        points=len(fitted),
        held_out=len(held_out),
        median_error=statistics.median(relative_errors(held_out, best)),
        median_error_before=statistics.median(relative_errors(held_out, start)),
    )


def visible(rows: Sequence[Row], machine: Machine) -> tuple[str, ...]:
    """The parameters that rows can tell apart.

    Attention and memory need times of their own; a latency needs messages so small that it shows; the codec's rate,
    which acts as the link's does, is left as it is.
    """
    quantized = [row for row in rows if row.comm.at(row.prefill.rows).is_quantized]
    plain = [row for row in rows if row not in quantized]
    wanted = {
        "gemm_bf16": any(row.prefill.weights == "bf16" for row in rows),
        "gemm_int8": any(row.prefill.weights == "w8a8" for row in rows),
        "attention": any("attention_ms" in row.parts for row in rows),
        "memory": any("other_ms" in row.parts for row in rows),
        "fused": bool(quantized),
        "nccl": bool(plain),
        "fused_us": _latency_shows(quantized, machine),
        "nccl_us": _latency_shows(plain, machine),
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def _latency_shows(rows: Sequence[Row], machine: Machine) -> bool:
    """Whether one message is small enough for its latency to be seen, and another one of a different size."""
    calls = [predicted(row, machine).call for row in rows]
    return len({call.wire_bytes for call in calls}) > 1 and max(c.latency_s / c.total_s for c in calls) > VISIBLE


def _residuals(row: Row, machine: Machine) -> list[float]:
    times = predicted(row, machine)
    whole = () if len(row.parts) == len(PARTS) else (math.log(1e3 * times.total_s / row.ttft_ms),)
    parts = [math.log(1e3 * getattr(times, PARTS[name]) / value) for name, value in row.parts.items() if value > 0]
    return [*whole, *parts]


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
