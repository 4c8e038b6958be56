"""Other systems' all-reduces equal a scalar second opinion, lose what they must lose, and cost what they cost."""

import math

import numpy as np
import oracle_floats
import oracle_peers
import pytest
import torch
from cases import DISTRIBUTIONS, Case

import fc_eval
from fc_eval.codec.base import DTYPES
from fc_eval.codec.peers.round_trip import SYSTEMS, round_trip
from fc_eval.codec.peers.table import PEERS
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import parse_comm
from fc_eval.collective.peer_rules import RULES, message_of
from fc_eval.collective.traffic import traffic_of

CODEC = ReferenceCodec()
# One distribution per shape: every one is seen, at W of 2, 3, 4 and 8.
WORLDS = (2, 3, 4, 8)
SHAPES = [(1, 1), (3, 70), (2, 300)]


def numbers(values: torch.Tensor) -> list:
    """Numpy scalars of flat values, in fp16 or fp32."""
    return list(values.reshape(-1).numpy())


def same(found: torch.Tensor, expected: list) -> None:
    """Equal numbers; a zero of either sign is a zero, and NaN is NaN."""
    assert np.array_equal(found.reshape(-1).float().numpy(), np.array(expected, dtype=np.float32), equal_nan=True)


def test_every_row_has_its_arithmetic_and_its_rules():
    assert {row.system for row in PEERS.values()} == set(SYSTEMS) == set(RULES)
    assert list(PEERS) == list(oracle_peers.SIZES)
    assert {system for system, rule in RULES.items() if rule.one_step} == set(oracle_peers.ONE_STEP)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_round_trip_equals_the_oracle(name, distribution):
    fmt = PEERS[name]
    group = fmt.group_size or 100
    dtype = DTYPES[RULES[fmt.system].sums_in]
    x = Case("int4", "bf16", 2, 2 * group, distribution).values().to(dtype).reshape(-1)
    with np.errstate(all="ignore"):
        expected = oracle_peers.qdq(name, numbers(x), group)
    found = round_trip(x, fmt, group)
    assert found.values.dtype == dtype
    same(found.values, expected)
    assert found.nonfinite_groups.item() == oracle_peers.broken(name, expected, group)


@pytest.mark.parametrize("name", [name for name in PEERS if RULES[PEERS[name].system].sums_in == "fp16"])
def test_every_fp16_value_equals_the_oracle(name):
    """Beside extremes from subnormal to the top, where reciprocals saturate and scales vanish."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    rows = []
    for top in (2.0**-24, 2.0**-22, 1e-5, 0.001, 0.3, 8.0, 65504.0):
        for sign in (1.0, -1.0):
            extreme = torch.tensor(sign * top, dtype=torch.float16)
            inside = finite[finite.abs() <= extreme.abs()][::61]
            row = torch.zeros(-(-len(inside) // 62) * 64, dtype=torch.float16).view(-1, 64)
            row[:, 2:].reshape(-1)[: len(inside)] = inside
            row[:, :2] = extreme
            rows.append(row)
    x = torch.cat(rows).reshape(-1)
    with np.errstate(all="ignore"):
        expected = oracle_peers.qdq(name, numbers(x), 32)
    same(round_trip(x, PEERS[name], 32).values, expected)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("dtype_name", ["bf16", "fp32"])
def test_an_all_reduce_equals_the_oracle(name, dtype_name):
    kinds = list(DISTRIBUTIONS)
    for index, world_size in enumerate(WORLDS):
        shape = SHAPES[index % len(SHAPES)]
        for kind in (kinds[index % len(kinds)], "normal"):
            partials = Case("int4", dtype_name, *shape, kind).partials(world_size)
            result = all_reduce(partials, parse_comm(name), CODEC)
            flat = [numbers(partial.float()) for partial in partials]
            values, counts, differing = oracle_peers.all_reduce(name, flat, *shape, dtype_name)
            assert result.values.dtype == partials.dtype
            same(result.values, values)
            assert result.nonfinite_groups.tolist() == counts
            assert len(result.traffic.stages) == len(counts)
            assert (0 if result.differing_values is None else result.differing_values.item()) == differing


def test_sums_in_fp16_lose_what_fp32_keeps():
    """2048 + 1 + 1 + 1: each single addition is a tie that fp16 rounds away; constant groups are exact but for that."""
    partials = torch.tensor([2048.0, 1.0, 1.0, 1.0])[:, None, None].expand(4, 1, 64).clone()
    assert all_reduce(partials, parse_comm("quickreduce_q8"), CODEC).values.unique().tolist() == [2048.0]
    fp32 = all_reduce(partials, parse_comm("flashinfer_fp8"), CODEC).values
    assert (fp32 > 2050).all()


def test_the_owner_begins_with_its_own():
    """2^24, 1, 1, -2^24 in fp32: what is left depends on who begins, so on the part that a value lies in."""
    partials = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])[:, None, None].expand(4, 1, 4 * 16).clone()
    values = all_reduce(partials, parse_comm("tensorrt_llm_fp8"), CODEC).values
    # ((2^24 + 1) + 1) - 2^24; ((1 + 1) - 2^24) + 2^24; ((1 - 2^24) + 2^24) + 1; ((-2^24 + 2^24) + 1) + 1.
    assert values.view(4, 16)[:, 0].tolist() == [0.0, 2.0, 2.0, 2.0]


def sqnr_db(name: str, partials: torch.Tensor) -> float:
    exact = partials.double().sum(0)
    error = fc_eval.all_reduce(partials, name, codec="reference").double() - exact
    return 10 * math.log10(exact.square().sum() / error.square().sum())


@pytest.fixture(scope="module")
def gaussian() -> torch.Tensor:
    return torch.randn(8, 32, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(
    ("name", "published_db"),
    # Gaussian sums of 8 ranks, groups as they are; Q6 also equals what ROCm/aiter publishes for its INT6 (30.4 dB).
    [
        ("quickreduce_q6", 30.4),
        ("quickreduce_q4", 18.3),
        ("quickreduce_int3", 12.2),
        ("flashinfer_fp8", 28.7),
        ("vllm_int8", 32.5),
    ],
)
def test_sqnr_is_what_is_known(gaussian, name, published_db):
    assert abs(sqnr_db(name, gaussian) - published_db) < 0.15  # dB: one draw of 131072 values, one digit published


def test_truncation_costs_what_its_error_says(gaussian):
    """7.7 dB at W = 8, where rounding would have done.

    In steps of a code, truncation is off by u in [0, 1) toward zero, with a mean square of 1/3; rounding by up to 1/2,
    with 1/12. W contributions of step d and a sum of step sqrt(W) d, all independent, would make that 4 times the
    noise, 6.0 dB. But contributions and sum both shrink: the mean errors of 1/2 step are correlated as the signs of a
    Gaussian contribution and of the sum are, E[sign x sign S] = (2 / pi) asin(1 / sqrt(W)).
    """
    partials, world_size = gaussian.float(), len(gaussian)
    exact = partials.double().sum(0)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(-1, 256)
        step = groups.abs().amax(1, keepdim=True) / 127
        return ((groups / step).round() * step).view(x.shape)

    error = (rounded(torch.stack([rounded(x) for x in partials]).sum(0)).double() - exact).square().mean()
    truncated = (all_reduce(partials, parse_comm("vllm_int8"), CODEC).values.double() - exact).square().mean()
    correlated = 2 * math.sqrt(world_size) * world_size * (2 / math.pi) * math.asin(1 / math.sqrt(world_size)) / 4
    expected = (2 * world_size / 3 + correlated) / (2 * world_size / 12)
    lost_db = 10 * math.log10(truncated / error)
    assert abs(lost_db - 10 * math.log10(expected)) < 0.2  # dB: steps vary between groups
    assert lost_db > 7.4


def test_a_signed_extreme_gains_over_a_symmetric_scale(gaussian):
    """Q4 is the signed extreme of 16 levels, in fp16; as `int4-g32-se`, and a dB better than 15 levels."""
    q4 = sqnr_db("quickreduce_q4", gaussian)
    assert abs(q4 - sqnr_db("int4-g32-se", gaussian)) < 0.1  # dB: fp16 against fp32 arithmetic
    assert q4 - sqnr_db("int4-g32-sym", gaussian) > 0.9


def test_a_third_quantization_costs_at_8_ranks(gaussian):
    """TensorRT-LLM at W = 8 quantizes three times, at W = 4 twice: each time about the same noise beside the signal."""
    assert len(traffic_of(parse_comm("tensorrt_llm_fp8"), 8, 32, 4096, "bf16").stages) == 3
    lost = sqnr_db("tensorrt_llm_fp8", gaussian[:4]) - sqnr_db("tensorrt_llm_fp8", gaussian)
    assert abs(lost - 10 * math.log10(3 / 2)) < 0.1  # dB: equal noises


def test_small_groups_shrink_where_the_reciprocal_saturates():
    """A Q8 group whose extreme is below 128 / 65504 comes back smaller, as reported of the real one."""
    x = torch.full((1, 64), 0.001, dtype=torch.float16)
    back = round_trip(x, PEERS["quickreduce_q8"], 32).values
    assert (back > 0).all()
    assert (back < 0.6 * x).all()
    large = torch.full((1, 64), 0.01, dtype=torch.float16)
    assert torch.equal(round_trip(large, PEERS["quickreduce_q8"], 32).values, large)


def test_values_beyond_fp16_are_lost_and_counted():
    partials = torch.ones(2, 2, 4096, dtype=torch.bfloat16)
    partials[1, 0, 6] = 1e5
    result = all_reduce(partials, parse_comm("quickreduce_q4"), CODEC)
    assert result.values[0, :64:2].isnan().all()
    assert result.values[0, 1:64:2].isfinite().all()
    assert result.nonfinite_groups.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "nbytes", "values"),
    [
        ("quickreduce_q8", 2176, 2048),
        ("quickreduce_q6", 1664, 2048),
        ("quickreduce_q4", 1152, 2048),
        ("quickreduce_int3", 896, 2048),
        ("flashinfer_fp8", 256 + 4, 256),
        ("vllm_int8", 256 + 4, 256),
        ("tensorrt_llm_fp8", 512, 496),
    ],
)
def test_bytes_of_a_unit_are_the_published_ones(name, nbytes, values):
    tokens = 16 * 31  # a multiple of every unit
    message = message_of(PEERS[name], 2, tokens, 16384)
    assert message.total_bytes * values == nbytes * tokens * 16384
    assert message.owned_bytes() == (message.total_bytes // 2,) * 2
    assert PEERS[name].nominal_bits(16384) == 8 * nbytes / values


@pytest.mark.parametrize("name", [name for name, row in PEERS.items() if not RULES[row.system].one_step])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_byte_has_one_owner(name, world_size):
    for tokens, hidden in ((0, 5), (1, 1), (1, 4096), (7, 300), (9, 4096)):
        message = message_of(PEERS[name], world_size, tokens, hidden)
        owned = message.owned_bytes()
        assert len(owned) == message.node_size
        # Groups of an odd number of 4-bit codes (ZeRO++ of an odd shape) end in the middle of a byte.
        assert 0 <= sum(owned) - message.total_bytes < len(owned)
        assert message.total_bytes * 8 >= tokens * hidden * PEERS[name].bits


def test_one_step_sends_whole_messages_of_codes_scales_and_positions():
    """T = 2048, H = 4096: 4 bits and an fp16 scale per channel; of 8 values one, 16 bits and 12 for where it was."""
    channelwise = traffic_of(parse_comm("channelwise_int4"), 4, 2048, 4096, "bf16")
    assert channelwise.stages[0].encoded_bytes == 2048 * 4096 // 2 + 2 * 4096
    topk = traffic_of(parse_comm("topk_8"), 4, 2048, 4096, "bf16")
    assert topk.stages[0].encoded_bytes == 2048 * (512 * (16 + 12) // 8)
    assert topk.effective_bits == PEERS["topk_8"].nominal_bits(4096) == 3.5
    for traffic in (channelwise, topk):
        (stage,) = traffic.stages
        assert stage.bytes_per_rank == (3 * stage.encoded_bytes,) * 4
        assert traffic.qdq_rounds == 1
    odd = traffic_of(parse_comm("topk_6"), 2, 3, 100, "bf16").stages[0].encoded_bytes
    assert odd == 3 * -(-17 * (16 + 7) // 8)  # ceil(100 / 6) values of each token, in whole bytes


def test_of_equal_magnitudes_the_first_are_kept():
    x = torch.tensor([[1.0, -3.0, 3.0, 3.0, 0.0, -2.0, 3.0, 1.0]])
    assert round_trip(x, PEERS["topk_4"], 8).values.tolist() == [[0.0, -3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_a_single_token_pays_for_what_travels():
    """QuickReduce sends whole tiles of 16384 values; the one block of 4096 values in FlashInfer has one owner."""
    tile = traffic_of(parse_comm("quickreduce_q4"), 4, 1, 576, "bf16")
    assert tile.stages[0].encoded_bytes == 8 * 1152
    assert tile.wire_bytes_per_rank == 2 * 3 * 2 * 1152
    block = traffic_of(parse_comm("flashinfer_fp8"), 4, 1, 576, "bf16")
    assert block.stages[0].bytes_per_rank == (0, 576 + 12, 576 + 12, 576 + 12)
    assert block.stages[1].bytes_per_rank == (3 * (576 + 12), 0, 0, 0)


def test_oracle_rounds_to_fp8_as_ml_dtypes():
    """The second opinion's own foundation, where the definitions agree."""
    import ml_dtypes

    x = np.linspace(-448, 448, 5001, dtype=np.float32)
    assert [float(oracle_peers.e4m3(v)) for v in x] == x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
    assert oracle_floats.SMALL_FLOATS["e4m3"][-1] == 448
