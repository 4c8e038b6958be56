"""Bits for layers: the model is fitted, the assignment is optimal or nearly so, and a policy file says it."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from layer_fixtures import add_layers
from run_fixtures import Run, quantized, write_run

from fc_eval.cli import main
from fc_eval.commands.allocate import Fitted, Measured, Site, read_measured, run_allocate, weights_of
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.results.allocation import Option, allocate, fit_weights, front, hull
from fc_eval.results.record import load_run

# Of every layer, bits and loss in nats by kind.
COMMS = {"int8": (9.17, 1e-5), "int6": (6.94, 2e-4), "int4": (4.72, 3e-3), "int3": (3.61, 1.5e-2)}
KIND = {"o_proj": 1, "down_proj": 10}
NATS = 0.5  # per unit of mean square error
INT4 = "two_step:int4-g128-asym"


def test_weights_are_found_again_and_never_negative():
    energies = np.array([[1.0, 2.0], [3.0, 1.0], [0.1, 0.7]])
    truth = np.array([0.2, 0.05])
    found, errors = fit_weights(energies, energies @ truth, np.full(3, 1e-3))
    assert (errors > 0).all()
    assert np.isfinite(errors).all()
    np.testing.assert_allclose(found, truth, rtol=1e-10)  # a least-squares solution in fp64
    found, errors = fit_weights(energies, energies @ [0.2, -0.05], np.full(3, 1e-3))
    assert (found[1], errors[1]) == (0, np.inf)
    assert found[0] > 0


def test_the_error_of_a_single_weight_is_that_of_a_weighted_mean():
    # Two runs of energy 1 whose losses are known to 0.1: the mean of both is known to 0.1 / sqrt(2).
    found, errors = fit_weights(np.ones((2, 1)), np.array([0.02, 0.04]), np.full(2, 0.1))
    assert found[0] == pytest.approx(0.03, rel=0.05)  # losses weigh a little by their own size, too (MODEL_ERROR)
    assert errors[0] == pytest.approx(0.1 / math.sqrt(2), rel=0.05)  # as above


def test_losses_that_are_noise_give_no_allocation():
    def measured(*deltas):
        fitted = tuple(
            Fitted(f"INT{8 - i}", dict.fromkeys(KIND, 0.1 + i), SimpleNamespace(ln_ratio=d, ln_ratio_stderr=e))
            for i, (d, e) in enumerate(deltas)
        )
        sites = tuple(Site(kind, kind, 8, {INT4: 0.1}) for kind in ("o_proj", "down_proj"))
        return Measured(sites, fitted, (), "wikitext2", 8)

    with pytest.raises(FcEvalError, match=r"cannot be told from 0 \(weight 0, "):
        weights_of(measured((-0.002, 0.001), (-0.01, 0.02)))
    with pytest.raises(FcEvalError, match=r"cannot be told from 0 \(weight 0\.00"):
        weights_of(measured((0.0001, 0.01), (0.01, 0.02)))
    with pytest.raises(FcEvalError, match="the errors of the losses in 'wikitext2' are not known"):
        weights_of(measured((-0.002, math.nan), (0.08, math.nan)))
    assert weights_of(measured((0.01, 0.001), (0.11, 0.01), (0.0, 0.0)))["o_proj"] == pytest.approx(
        0.05, rel=0.05
    )  # 0.01 / 0.2


def test_hull_leaves_out_what_no_exchange_rate_chooses():
    options = [Option("a", 3, 9), Option("b", 4, 8.5), Option("c", 5, 2), Option("d", 9, 1), Option("e", 10, 1.5)]
    assert [o.name for o in hull(options)] == ["a", "c", "d"]


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_within_the_budget_and_close_to_the_best_of_all(seed):
    generator = random.Random(seed)
    options_S = [
        [Option(str(bits), bits, generator.uniform(0.5, 2) * 4.0**-bits) for bits in (3, 4, 5, 6, 8)] for _ in range(5)
    ]
    budget = generator.uniform(0.002, 0.05)
    found = allocate(options_S, budget)
    best = min(
        sum(o.cost for o in chosen) for chosen in itertools.product(*options_S) if sum(o.loss for o in chosen) <= budget
    )
    assert found.loss <= budget
    assert found.bound <= best <= found.cost
    assert found.cost - best <= 2  # the dearest step of one layer, from 6 to 8 bits
    losses, costs = zip(*((each.loss, each.cost) for each in front(options_S)), strict=True)
    assert list(costs) == sorted(costs)
    assert list(losses) == sorted(losses, reverse=True)


def test_a_budget_that_nothing_meets_has_no_allocation():
    assert allocate([[Option("a", 1, 0.5)]], 0.1) is None
    assert allocate([[Option("a", 1, 0.5), Option("b", 2, 0.4)]], 0.6).cost == 1


def test_runs_with_policies_tell_the_kinds_of_layers_apart(tmp_path):
    base, weight = Run(), {"o_proj": 0.9, "down_proj": 0.2}
    add_layers(write_run(tmp_path, base), "fp32_ordered", lambda *_: 0.0)
    for policy, only in (("uniform", KIND), ("o_proj_only", ["o_proj"]), ("down_proj_only", ["down_proj"])):
        energy = {kind: sum(KIND[kind] * 1e-3 * (kind in only) for _ in range(3)) for kind in KIND}
        shift = sum(weight[kind] * energy[kind] for kind in KIND)
        path = write_run(tmp_path, quantized(base, "int4", 4.25, shift, policy=policy))
        add_layers(path, INT4, lambda kind, layer, mode, part, only=only: KIND[kind] * 1e-3 * (kind in only))
    assert weights_of(read_measured([tmp_path])) == pytest.approx(weight, rel=1e-6)  # least squares in fp64


@pytest.fixture
def runs(tmp_path):
    """Uniform runs whose deltas are exactly what their layers' errors add up to."""
    base = Run()
    add_layers(write_run(tmp_path / "runs", base), "fp32_ordered", lambda *_: 0.0)
    for comm, (bits, mse) in COMMS.items():
        energy = sum(KIND[kind] * mse * (layer + 1) for kind in KIND for layer in range(3))
        run = quantized(base, comm, bits, NATS * energy)
        path = write_run(tmp_path / "runs", run)
        name = f"two_step:{comm}-g128-asym"
        add_layers(path, name, lambda kind, layer, mode, part, mse=mse: KIND[kind] * mse * (layer + 1))
    return tmp_path / "runs"


def test_from_runs_to_a_policy_that_a_run_uses(runs, tmp_path):
    out = tmp_path / "mine.yaml"
    text = run_allocate([runs], 0.02, "bits", None, out)
    policy = yaml.safe_load(out.read_text())
    assert policy["name"] == "allocated_bits_2pct"
    comms = {rule["match"]: rule["comm"] for rule in policy["rules"]}
    other = comms.pop("*")

    def bits_of(site):
        return int(comms.get(site, other).split(":int")[1][0])

    first, last = "model.layers.0.self_attn.o_proj", "model.layers.2.mlp.down_proj"
    assert bits_of(first) < bits_of(last)  # thirty times the error energy
    predicted = NATS * sum(
        KIND[kind] * COMMS[f"int{bits_of(f'model.layers.{layer}.{part}.{kind}')}"][1] * (layer + 1)
        for part, kind in (("self_attn", "o_proj"), ("mlp", "down_proj"))
        for layer in range(3)
    )
    assert 0.5 * math.log(1.02) < predicted <= math.log(1.02)
    assert f"predicted {100 * math.expm1(predicted):+.3f} %" in text
    assert "weights: o_proj 0.5, down_proj 0.5" in text

    config = compose_one(["model=tiny", "tp=2", "eval=text", f"policy={out}"])
    assert config.policy_name == "allocated_bits_2pct"
    assert config.policy == tuple((rule["match"], rule["comm"]) for rule in policy["rules"])
    assert set(config.build_policy().rules[-1].match) == {"*"}


def test_what_was_verified_stands_beside_the_prediction(runs, tmp_path):
    out = tmp_path / "mine.yaml"
    assert "measured by" not in run_allocate([runs], 0.02, "bytes", None, out)
    rules = [[rule["match"], rule["comm"]] for rule in yaml.safe_load(out.read_text())["rules"]]
    path = write_run(runs, quantized(Run(), "int4", 4.9, 0.015, policy="allocated_bytes_2pct"))
    file = path / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["config"]["policy"] = rules
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert load_run(path).arm.policy == "allocated_bytes_2pct"
    text = run_allocate([runs], 0.02, "bytes", None, out)
    assert f"measured by {path.name}: +1.511" in text
    assert "4.90 bits" in text
    assert "bytes per rank and token" in text


def test_tight_and_wide_budgets(runs, tmp_path):
    tight = run_allocate([runs], 1e-7, "bits", None, tmp_path / "a.yaml")
    assert "fp32_ordered" in tight.partition("within 1e-05 %")[2]
    run_allocate([runs], 1.5, "bits", None, tmp_path / "b.yaml")
    rules = yaml.safe_load((tmp_path / "b.yaml").read_text())["rules"]
    assert rules == [{"match": "*", "comm": "two_step:int3-g128-asym"}]


def test_mistakes_are_one_sentence(runs, tmp_path, capsys):
    out = tmp_path / "x.yaml"
    with pytest.raises(FcEvalError, match="expected a share of the perplexity"):
        run_allocate([runs], 0, "bits", None, out)
    with pytest.raises(FcEvalError, match="lacks the perplexity 'c4' that errors are weighed by"):
        run_allocate([runs], 0.01, "bits", "c4", out)
    write_run(tmp_path / "bare", Run())
    with pytest.raises(FcEvalError, match="no run here has layer errors"):
        run_allocate([tmp_path / "bare"], 0.01, "bits", None, out)
    assert not out.exists()
    assert main(["allocate", str(runs), "--budget", "0.01", "--out", str(out)]) == 0
    assert "loss model: nats on wikitext2" in capsys.readouterr().out
    with pytest.raises(FcEvalError, match="No such file"):
        compose_one(["model=tiny", f"policy={tmp_path}/missing.yaml"])
    (tmp_path / "bad.yaml").write_text("rules: [")
    with pytest.raises(FcEvalError, match="is no YAML"):
        compose_one(["model=tiny", f"policy={tmp_path}/bad.yaml"])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(FcEvalError, match="expected a mapping with name, rules"):
        compose_one(["model=tiny", f"policy={tmp_path}/list.yaml"])
