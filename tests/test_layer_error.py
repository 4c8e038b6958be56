"""Layer errors: known answers, direct computation on hooked activations, every comm, and the whole way of a run."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import attach

from fc_eval.codec.faults import faults_of
from fc_eval.codec.reference import ReferenceCodec
from fc_eval.collective.all_reduce import all_reduce
from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.layer_error import COUNTS, layer_errors, moments
from fc_eval.evaluate.windows import Windows
from fc_eval.parallel.emulate import communicate
from fc_eval.parallel.layer_probe import LayerProbe
from fc_eval.parallel.policy import Policy, Rule
from fc_eval.parallel.row_parallel import partial_sums
from fc_eval.wire.format import parse_format


def some_windows(n=2, window=24):
    return Windows(np.random.default_rng(1).integers(0, 200, (n, window)), np.arange(n), True, {})


def errors(model, comm, tp=2, windows=None, **options):
    with attach(model, comm, tp) as attachment:
        found = layer_errors(model, windows or some_windows(), LayerProbe(attachment), **options)
        attachment.check_calls()
        return found


def by_key(found):
    return {(row["site"], row["mode"], row["part"]): row for row in found.rows}


# -- sums ---------------------------------------------------------------------------------------------------------


class TwoLayers(torch.nn.Module):
    """Stands in for a model: each forward pass hands its probe the next pairs."""

    layers = ({"site": "a", "kind": "k", "layer": 0}, {"site": "b", "kind": "k", "layer": 1})
    notes = ()

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.watch = None

    def forward(self, input_ids, use_cache):
        self.watch(float(input_ids.sum()))

    @contextmanager
    def isolated(self, observe):
        def watch(x):
            counts = torch.tensor([1, 1, 0, 0, 4])
            observe("a", "reduce", torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]]), counts)
            observe("a", "reduce", torch.tensor([[0.0, x]]), torch.tensor([[0.0, x]]), counts)
            observe("a", "output", torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), None)
            observe("b", "output", torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]]), None)

        self.watch = watch
        yield

    @contextmanager
    def _output(self, observe):
        def watch(x):
            observe("a", torch.tensor([[1.0, 1.0]]))
            observe("b", torch.tensor([[2.0, 0.0]]))

        self.watch = watch
        yield

    def accumulated(self, stages):
        return {"output": self._output}


def test_sums_of_a_case_computed_by_hand():
    model = TwoLayers()
    windows = Windows(np.array([[1, 4], [2, 3]]), np.arange(2), True, {})  # x is 5 in both
    found = by_key(layer_errors(model, windows, model))
    row = found["a", "isolated", "reduce"]
    # Per window: elements 4, exact^2 = 9 + 16 + 25, (exact - found)^2 = 1, exact * found = 9 + 12 + 25.
    assert (row["elements"], row["mse"], row["signal_power"]) == (8, 0.25, 12.5)
    assert row["relative_error"] == math.sqrt(1 / 50)
    assert row["sqnr_db"] == 10 * math.log10(50)
    assert row["cosine"] == pytest.approx(46 / math.sqrt(50 * 43), rel=1e-14)  # two roots, each rounded
    assert (row["saturated_codes"], row["saturated_groups"], row["zero_range_groups"]) == (0.5, 0.25, 0.0)
    exact = found["a", "isolated", "output"]
    assert (exact["mse"], exact["relative_error"], exact["sqnr_db"], exact["cosine"]) == (0, 0, math.inf, 1)
    assert exact["saturated_codes"] is exact["zero_range_groups"] is None
    assert found["b", "isolated", "output"]["cosine"] == 0
    assert found["b", "isolated", "output"]["mse"] == 4
    assert found["a", "accumulated", "output"]["mse"] == 0.5
    assert found["b", "accumulated", "output"]["sqnr_db"] == math.inf
    metrics = layer_errors(model, windows, model).metrics()
    assert metrics["k isolated output mse"] == 2
    assert metrics["k isolated output relative_error"] == math.sqrt(8 / 5)
    assert metrics["windows"] == 2


def test_chunks_change_nothing_but_the_last_bits(monkeypatch):
    exact, found = torch.randn(3, 7, 11).bfloat16(), torch.randn(3, 7, 11)
    whole = moments(exact, found)
    x, y = exact.double(), found.double()
    expected = [231.0, *(float(v.sum()) for v in (x * x, y * y, x * y, (x - y) ** 2))]
    np.testing.assert_allclose(whole.tolist(), expected, rtol=1e-13)  # fp64 sums in another order
    monkeypatch.setattr("fc_eval.evaluate.layer_error.CHUNK", 10)
    np.testing.assert_allclose(moments(exact, found).tolist(), expected, rtol=1e-13)  # as above


# -- groups at their limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("int4-g8", [0.0, 1, 2, 3, 5, 5, 5, 5], [0, 0, 1, 2]),
        ("int4-g8-sym", [0.0, 1, 2, 3, 5, 5, 5, 5], [0, 0, 0, 2]),
        ("int4-g8-sym", [0.0, 0, 0, 0, -7, 7, 0, 0], [0, 0, 1, 2]),
        # Signed extreme: the step is -(-8) / 8 = 1 towards the negative end, so that +8 has no code, and +7.4 has 7.
        ("int4-g8-se", [-8.0, 8, 7, 0, -8, 7.4, 0, 0], [1, 1, 0, 2]),
        # E2M1 with a power-of-two scale: 7.5 / 2^0 is above 6 and nearer to the next value of a wider type, 8.
        ("mxfp4-g8", [7.5, 1, 0, 0, 6.5, 1, 0, 0], [1, 1, 0, 2]),
        ("fp4_e2m1-g8", [7.5, 1, 0, 0, 6.5, 1, 0, 0], [0, 0, 0, 2]),
        ("int4-g8", [math.nan, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 2]),
    ],
)
def test_faults_of_groups(name, row, expected):
    groups = [half + 4 * half[-1:] for half in (row[:4], row[4:])]  # two of 8 elements, the smallest size there is
    assert faults_of(torch.tensor([[*groups[0], *groups[1]]]), parse_format(name)).tolist() == expected


def test_a_short_group_counts_once_and_nothing_is_written():
    x = torch.tensor([8 * [1.0] + [2.0, 3.0]] * 3)
    before = x.clone()
    assert faults_of(x, parse_format("int4-g8-sr")).tolist() == [0, 0, 6, 6]
    assert torch.equal(x, before)


# -- a model ------------------------------------------------------------------------------------------------------


def hooked(model, windows):
    """The inputs [T, K] of the row-parallel layers of the baseline, by name."""
    inputs = {}
    layers = {n: m for n, m in model.named_modules() if n.endswith(("o_proj", "down_proj"))}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, n=n: inputs.setdefault(n, []).append(args[0].flatten(0, 1)))
        for n, m in layers.items()
    ]
    with attach(model, BASELINE, 2), torch.inference_mode():
        for ids in windows.ids:
            model(input_ids=torch.tensor(ids[None]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return layers, inputs


def mse(pairs):
    """Mean square difference over lists of pairs, in fp64."""
    sums = [(float(((x.double() - y.double()) ** 2).sum()), x.numel()) for x, y in pairs]
    return sum(s for s, _ in sums) / sum(n for _, n in sums)


@torch.inference_mode()
def test_isolated_errors_equal_a_direct_computation(tiny_bf16):
    windows, codec, comm = some_windows(), ReferenceCodec(), parse_comm("int4_int8-g32")
    layers, inputs = hooked(tiny_bf16, windows)
    found = by_key(errors(tiny_bf16, comm))
    for name, module in layers.items():
        partials = [partial_sums(x, module.weight, 2) for x in inputs[name]]
        exact = [all_reduce(p, BASELINE, codec).values for p in partials]
        sent = [(r, codec.round_trip(r, comm.reduce).values) for p in partials for r in p]
        gathered = [(y, codec.round_trip(y, comm.gather).values) for y in exact]
        outputs = [(y, all_reduce(p, comm, codec).values) for p, y in zip(partials, exact, strict=True)]
        for part, pairs in (("reduce", sent), ("gather", gathered), ("output", outputs)):
            row = found[name, "isolated", part]
            assert row["mse"] == pytest.approx(mse(pairs), rel=1e-12)  # fp64 sums in another order
            assert row["elements"] == sum(x.numel() for x, _ in pairs)


@torch.inference_mode()
def test_accumulated_errors_are_those_of_two_separate_models(tiny_bf16):
    windows, outputs = some_windows(), {}
    for comm in ("fp32_ordered", "int3-g32"):
        with attach(tiny_bf16, comm, 2) as attachment:

            def keep(site, partials, own, comm=comm):
                values = own(site, partials)
                outputs.setdefault((comm, site.name), []).append(values)
                return values

            with attachment.reducing(keep):
                for ids in windows.ids:
                    tiny_bf16(input_ids=torch.tensor(ids[None]), use_cache=False)
    found = by_key(errors(tiny_bf16, "int3-g32"))
    for site in {name for _, name in outputs}:
        pairs = list(zip(outputs["fp32_ordered", site], outputs["int3-g32", site], strict=True))
        row = found[site, "accumulated", "output"]
        assert row["mse"] == pytest.approx(mse(pairs), rel=1e-12)  # fp64 sums in another order
        assert row["mse"] > 0
    first = "model.layers.0.self_attn.o_proj"  # nothing came before the first one
    assert found[first, "accumulated", "output"]["mse"] == found[first, "isolated", "output"]["mse"]
    assert found[first, "accumulated", "reduce_only"]["mse"] == found[first, "isolated", "reduce_only"]["mse"]
    assert found[first, "accumulated", "gather_only"]["mse"] > 0


def test_no_quantization_loses_nothing(tiny_bf16):
    found = errors(tiny_bf16, "fp32_ordered")
    assert {(row["mode"], row["part"]) for row in found.rows} == {("isolated", "output"), ("accumulated", "output")}
    assert {(row["mse"], row["relative_error"], row["sqnr_db"]) for row in found.rows} == {(0.0, 0.0, math.inf)}
    assert all(row["cosine"] == pytest.approx(1, abs=1e-15) for row in found.rows)  # a root of a square
    assert len(found.rows) == 8
    plain = by_key(errors(tiny_bf16, "plain", tp=4))
    assert plain["model.layers.1.mlp.down_proj", "isolated", "output"]["mse"] > 0


BOTH = {"reduce", "reduce_only", "gather", "output"}


@pytest.mark.parametrize(
    ("comm", "isolated", "accumulated", "note"),
    [
        ("int4", BOTH, {"output", "reduce_only", "gather_only"}, ""),
        ("one_step_int4", {"reduce", "reduce_only", "output"}, {"output"}, ""),
        ("ring:int4-g32", {"output"}, {"output"}, "ring sends sums of several ranks"),
        ("hierarchical@2:int4", {"output"}, {"output"}, "hierarchical sends sums"),
        ("int4+min25", {"output"}, {"output", "reduce_only", "gather_only"}, ""),
    ],
)
def test_every_comm_has_the_parts_that_mean_something(tiny_bf16, comm, isolated, accumulated, note):
    windows = some_windows(1)
    found = errors(tiny_bf16, comm, tp=4, windows=windows)
    parts = {mode: {row["part"] for row in found.rows if row["mode"] == mode} for mode in ("isolated", "accumulated")}
    assert parts == {"isolated": isolated, "accumulated": accumulated}
    output = by_key(found)["model.layers.0.mlp.down_proj", "isolated", "output"]
    assert (output["mse"] > 0) == (comm != "int4+min25")  # windows of 24 tokens are below that threshold
    with attach(tiny_bf16, comm, 4) as attachment:
        assert " ".join(LayerProbe(attachment).notes).startswith(note)
    if comm == "one_step_int4":  # its output is what its one stage gives
        assert output["mse"] == by_key(found)["model.layers.0.mlp.down_proj", "isolated", "reduce_only"]["mse"]


def test_a_policy_gives_each_layer_its_own_comm(tiny_bf16):
    policy = Policy(parse_comm("int2"), (Rule("*.o_proj", BASELINE),))
    found = by_key(errors(tiny_bf16, policy))
    for (site, mode, _), row in found.items():
        assert row["comm"] == ("fp32_ordered" if site.endswith("o_proj") else "two_step:int2-g128-asym")
        if mode == "isolated":
            assert (row["mse"] == 0) == site.endswith("o_proj")
    assert ("model.layers.0.self_attn.o_proj", "isolated", "reduce") not in found


def test_batches_and_stages_change_no_other_number(tiny):
    windows = some_windows(3)
    one, three = (errors(tiny, "int4-g32", windows=windows, window_batch=n) for n in (1, 3))
    for a, b in zip(one.rows, three.rows, strict=True):
        assert (a["site"], a["mode"], a["part"], a["elements"]) == (b["site"], b["mode"], b["part"], b["elements"])
        # fp32 products of more rows at once are rounded otherwise, and a code near a border may change its side.
        assert a["mse"] == pytest.approx(b["mse"], rel=2e-2)  # see above
    without = by_key(errors(tiny, "int4-g32", windows=windows, stages=False))
    assert without == {key: row for key, row in by_key(one).items() if key in without}
    assert len(without) == 4 * 5


def test_only_the_model_as_it_is_counts(tiny_bf16):
    with attach(tiny_bf16, "int4", 2) as attachment:
        probe = LayerProbe(attachment)
        layer_errors(tiny_bf16, some_windows(3), probe)
        stats = attachment.stats()
    assert stats.forwards == 3
    assert set(stats.calls.values()) == {3}
    assert stats.tokens == 3 * 24


def test_one_rank_is_refused(tiny):
    with communicate(tiny, "int4", 1) as attachment, pytest.raises(FcEvalError, match="at least 2 ranks"):
        LayerProbe(attachment)


def test_counts_of_the_probe_are_those_that_are_read(tiny_bf16):
    seen = []
    with attach(tiny_bf16, "int4", 2) as attachment, LayerProbe(attachment).isolated(lambda *x: seen.append(x)):
        tiny_bf16(input_ids=torch.tensor(some_windows(1).ids), use_cache=False)
    counts = [x[4] for x in seen if x[1] == "reduce"]
    assert {len(c) for c in counts} == {len(COUNTS)}
    assert {int(c[-1]) for c in counts} == {24 * 2}  # rows of 192 values have two groups of 128
