"""The reductions of WIRE.md on top of `oracle`: scalar, slow, written from that page alone."""

from dataclasses import replace

import numpy as np
from oracle import Rows, geometry, rotate, round_trip
from oracle_floats import ZERO, rounded


def add(a: Rows, b: Rows) -> Rows:
    with np.errstate(all="ignore"):
        return [[p + q for p, q in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]


def rounded_rows(x: Rows, dtype: str) -> Rows:
    return [[rounded(v, dtype) for v in row] for row in x]


def zeros_like(x: Rows) -> Rows:
    return [[ZERO] * len(row) for row in x]


def decoded_sum(partials: list[Rows], fmt, dtype: str) -> tuple[Rows, int]:
    if fmt.hadamard:  # "undone once per stage"
        turned = [rounded_rows(rotate(partial), dtype) for partial in partials]
        total, broken = fp32_sum(turned, replace(fmt, hadamard=False), dtype)
        return rounded_rows(rotate(total), dtype), broken
    total, broken = fp32_sum(partials, fmt, dtype)
    return rounded_rows(total, dtype), broken


def fp32_sum(partials: list[Rows], fmt, dtype: str) -> tuple[Rows, int]:
    total, broken = zeros_like(partials[0]), 0
    for partial in partials:
        values, count = round_trip(partial, fmt, dtype)
        total, broken = add(total, values), broken + count
    return total, broken


def all_reduce(partials: list[Rows], comm, dtype: str) -> tuple[Rows, list[int]]:
    """Values in `dtype`, held in fp32, and the non-finite groups of each stage."""
    world = len(partials)
    if world == 1:
        return partials[0], []
    if comm.algorithm == "plain":
        total = partials[0]
        for partial in partials[1:]:
            total = rounded_rows(add(total, partial), dtype)
        return total, [0, 0]
    if comm.algorithm == "fp32_ordered":
        total = zeros_like(partials[0])
        for partial in partials:
            total = add(total, partial)
        return rounded_rows(total, dtype), [0, 0]
    if comm.algorithm == "ring":
        return _ring(partials, comm, dtype)

    counts = []
    node = comm.node_size if comm.algorithm == "hierarchical" else (1 if comm.algorithm == "one_step" else world)
    sums = partials
    if node > 1:
        reduced = [decoded_sum(partials[i : i + node], comm.reduce, dtype) for i in range(0, world, node)]
        sums = [values for values, _ in reduced]
        counts.append(sum(count for _, count in reduced))
    total = sums[0]
    if len(sums) > 1:
        total, count = decoded_sum(sums, comm.reduce, dtype)
        counts.append(count)
    if node > 1:
        total, count = round_trip(total, comm.gather, dtype)
        total = rounded_rows(total, dtype)
        counts.append(count)
    return total, counts


def _ring(partials: list[Rows], comm, dtype: str) -> tuple[Rows, list[int]]:
    """Group by group: every group is a one-row message of its own, and its owner is that of its block."""
    world, tokens, hidden = len(partials), len(partials[0]), len(partials[0][0])
    g, per_row, per_block, blocks = geometry(comm.reduce, tokens, hidden)
    result, counts = zeros_like(partials[0]), [0, 0]
    for token in range(tokens):
        for group in range(per_row):
            block = (token * per_row + group) // per_block
            owner = next(r for r in range(world) if r * blocks // world <= block < (r + 1) * blocks // world)
            columns = slice(group * g, min((group + 1) * g, hidden))
            running = [partials[(owner + 1) % world][token][columns]]
            for hop in range(2, world + 1):
                values, count = round_trip(rounded_rows(running, dtype), comm.reduce, dtype)
                running = add(values, [partials[(owner + hop) % world][token][columns]])
                counts[0] += count
            values, count = round_trip(rounded_rows(running, dtype), comm.gather, dtype)
            result[token][columns] = rounded_rows(values, dtype)[0]
            counts[1] += count
    return result, counts
