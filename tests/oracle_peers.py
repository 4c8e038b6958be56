"""Other systems' all-reduces once more: scalar, slow, from what is known of each (the modules' docstrings say where).

Values are lists of `numpy.float16` or `numpy.float32` scalars, whose arithmetic rounds every operation once.
"""

import functools
import math

import numpy as np
from oracle_floats import rounded, small_code, small_value

F16, F32 = np.float16, np.float32
# bits, values with a scale, bytes of a scale
SIZES = {
    "quickreduce_q8": (8, 32, 2),
    "quickreduce_q6": (6, 32, 2),
    "quickreduce_q4": (4, 32, 2),
    "quickreduce_int3": (3, 32, 2),
    "flashinfer_fp8": (8, 256, 4),
    "vllm_int8": (8, 256, 4),
    "tensorrt_llm_fp8": (8, 496, 16),
    "zeropp_int8": (8, None, 4),
    "zeropp_int4": (4, None, 4),
    "channelwise_int4": (4, None, 2),
    "topk_4": (16, None, 0),
    "topk_6": (16, None, 0),
    "topk_8": (16, None, 0),
}
HALF = ("quickreduce", "zeropp")  # sum in fp16
ONE_STEP = ("channelwise", "topk")


def chunks(x: list, size: int) -> list[list]:
    assert len(x) % size == 0
    return [x[i : i + size] for i in range(0, len(x), size)]


@functools.cache
def e4m3(x) -> np.float32:
    """The nearest E4M3 value, saturated."""
    return F32(small_value(small_code(F32(min(max(x, -448), 448)), "e4m3"), "e4m3"))


def quickreduce_group(x: list, bits: int) -> list:
    if not all(math.isfinite(v) for v in x):
        return [F16("nan")] * len(x)
    top = 2 ** (bits - 1)
    extreme = max(x) if abs(max(x)) > abs(min(x)) else min(x)
    scale = extreme * F16(-1 / top)
    inverse = F16(1) / (scale + F16(2**-24))
    inverse = min(max(inverse, F16(-65504)), F16(65504))
    return [np.rint(min(max(v * inverse, F16(-top)), F16(top - 1))) * scale for v in x]


def quickreduce(x: list, bits: int, group: int) -> list:
    out = []
    for block in chunks(x, 2 * group):
        even, odd = quickreduce_group(block[::2], bits), quickreduce_group(block[1::2], bits)
        out += [v for pair in zip(even, odd, strict=True) for v in pair]
    return out


def flashinfer(x: list, bits: int, group: int) -> list:
    out = []
    for block in chunks(x, group):
        amax = max(max(abs(v) for v in block), F32(1e-12))
        out += [e4m3(v * (F32(448) / amax)) * (amax / F32(448)) for v in block]
    return out


def vllm(x: list, bits: int, group: int) -> list:
    out = []
    for block in chunks(x, group):
        scale = F32(127) / max(max(abs(v) for v in block), F32(1e-12))
        out += [F32(int(v * scale)) / scale for v in block]
    return out


def tensorrt_llm(x: list, bits: int, group: int) -> list:
    out = []
    for block in chunks(x, group):
        amax = max(abs(v) for v in block)
        scale = F32(448) / amax if amax else F32(1)
        # No rule is known for a scale that overflows: not a number.
        out += [e4m3(v * scale) / scale if math.isfinite(scale) else F32("nan") for v in block]
    return out


def zeropp(x: list, bits: int, group: int) -> list:
    out = []
    for block in chunks(x, group):
        amax = max(abs(F32(v)) for v in block)
        scale = F32(2**bits) / (F32(2) * amax) if amax else F32(1)
        half = 2 ** (bits - 1)
        codes = [min(max(np.rint(F32(v) * scale), F32(-half)), F32(half - 1)) for v in block]
        out += [F16(code * (F32(1) / scale)) for code in codes]
    return out


def channelwise(x: list, bits: int, group: int) -> list:
    out = []
    for channel in chunks(x, group):
        scale = F32(F16(max(abs(v) for v in channel) / F32(2 ** (bits - 1) - 1)))
        if not math.isfinite(scale):
            out += [F32("nan")] * len(channel)
            continue
        top = F32(2 ** (bits - 1) - 1)
        out += [min(max(np.rint(v / (scale or F32(1))), -top), top) * scale for v in channel]
    return out


def topk(x: list, one_of: int, group: int) -> list:
    out = []
    for token in chunks(x, group):
        order = sorted(range(group), key=lambda i: (-abs(token[i]), i))
        kept = set(order[: math.ceil(group / one_of)])
        sent = [F32(F16(v)) for v in token]
        fine = all(map(math.isfinite, sent))
        out += [(sent[i] if i in kept else F32(0)) if fine else F32("nan") for i in range(group)]
    return out


CODECS = {f.__name__: f for f in (quickreduce, flashinfer, vllm, tensorrt_llm, zeropp, channelwise, topk)}


def qdq(name: str, x: list, group: int) -> list:
    """Encoded and decoded; a group with a NaN or an Inf is NaN (QuickReduce, whose groups interleave, sees to it)."""
    system, bits = name.rpartition("_")[0], SIZES[name][0]
    if system == "quickreduce":
        return quickreduce(x, bits, group)
    if system == "topk":
        bits = int(name.rpartition("_")[2])
    if system == "channelwise":
        x = turned(x, group)
    out = []
    for block in chunks(x, group):
        fine = all(map(math.isfinite, block))
        out += CODECS[system](block, bits, group) if fine else [type(block[0])("nan")] * group
    return turned(out, len(x) // group) if system == "channelwise" else out


def turned(x: list, rows: int) -> list:
    """[rows, n] flat to [n, rows] flat."""
    return [v for column in range(len(x) // rows) for v in x[column :: len(x) // rows]]


def broken(name: str, values: list, group: int) -> int:
    """Groups that are NaN."""
    if name.startswith("quickreduce"):
        return sum(math.isnan(block[i]) for block in chunks(values, 64) for i in (0, 1))
    if name.startswith("channelwise"):
        values = turned(values, group)
    return sum(math.isnan(block[0]) for block in chunks(values, group))


def padded(x: list, multiple: int) -> list:
    return x + [type(x[0])(0)] * (-len(x) % multiple)


def all_reduce(name: str, partials: list[list], tokens: int, hidden: int, dtype: str) -> tuple[list, list[int], int]:
    """Flat values in `dtype` as fp32, non-finite groups per stage, values that the owner has otherwise."""
    system, world, count = name.rpartition("_")[0], len(partials), tokens * hidden
    group = SIZES[name][1] or math.ceil(count / max(tokens, hidden, world))
    if system in ONE_STEP:
        group = tokens if system == "channelwise" else hidden
        with np.errstate(all="ignore"):
            total, found = summed(name, [[F32(v) for v in partial] for partial in partials], group)
            return [rounded(v, dtype) for v in total], [found], 0
    to = F16 if system in HALF else F32
    with np.errstate(all="ignore"):
        messages = [[to(v) for v in partial] for partial in partials]
        if system == "tensorrt_llm" and world != 8:  # a part per rank, summed by its owner, who begins with its own
            size = math.ceil(count / world)
            messages = [padded(m, size * world)[: size * world] for m in messages]
            results = [
                reduce_part(name, [m[r * size : (r + 1) * size] for m in messages[r:] + messages[:r]], group, dtype)
                for r in range(world)
            ]
        elif system == "tensorrt_llm":
            results = [islands_of_4(name, messages, group, dtype)]
        else:
            results = [reduce_part(name, messages, group, dtype)]
    values = [v for result in results for v in result[0]][:count]
    exact = [v for result in results for v in result[1]][:count]
    counts = [sum(stage) for stage in zip(*(result[2] for result in results), strict=True)]
    if system not in ("flashinfer", "vllm"):
        return values, counts, 0
    differing = sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in zip(values, exact, strict=True))
    return values, counts, differing


def summed(name: str, contributions: list[list], group: int) -> tuple[list, int]:
    total, found = [contributions[0][0].dtype.type(0)] * len(contributions[0]), 0
    for contribution in contributions:
        decoded = qdq(name, contribution, group)
        found += broken(name, decoded, group)
        total = [a + b for a, b in zip(total, decoded, strict=True)]
    return total, found


def finished(name: str, total: list, real: int, group: int, dtype: str) -> tuple[list, list, int]:
    decoded = qdq(name, total, group)
    held, exact = ([rounded(F32(v), dtype) for v in values[:real]] for values in (decoded, total))
    return held, exact, broken(name, decoded, group)


def reduce_part(name: str, messages: list[list], group: int, dtype: str) -> tuple[list, list, list[int]]:
    multiple = 64 if name.startswith("quickreduce") else group  # zeros that fill up a tile change no value
    total, first = summed(name, [padded(m, multiple) for m in messages], group)
    held, exact, second = finished(name, total, len(messages[0]), group, dtype)
    return held, exact, [first, second]


def islands_of_4(name: str, messages: list[list], group: int, dtype: str) -> tuple[list, list, list[int]]:
    filled = [padded(m, group) for m in messages]
    (a, first), (b, second) = summed(name, filled[:4], group), summed(name, filled[4:], group)
    total, third = summed(name, [a, b], group)
    held, exact, last = finished(name, total, len(messages[0]), group, dtype)
    return held, exact, [first + second, third, last]
