"""Rules in order, the first match wins; a rule without effect is an error, and presets fit real models."""

from pathlib import Path

import pytest
import yaml

from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.errors import FcEvalError
from fc_eval.parallel.policy import Policy, Rule
from fc_eval.parallel.site import Site

PRESETS = sorted((Path(__file__).parents[1] / "conf" / "policy").glob("*.yaml"))
INT4, INT6, INT8 = (parse_comm(name) for name in ("int4", "int6", "int8"))
SITES = tuple(
    Site(f"model.layers.{layer}.{part}", part.rpartition(".")[2], layer, 64, 64)
    for layer in range(12)
    for part in ("self_attn.o_proj", "mlp.down_proj")
)


def test_without_rules_every_site_gets_the_default():
    assert Policy(INT4).assign(SITES) == {site.name: INT4 for site in SITES}


def test_the_first_match_wins():
    chosen = Policy(INT4, (Rule("*.layers.3.*", BASELINE), Rule("*.down_proj", INT8))).assign(SITES)
    assert list(chosen) == [site.name for site in SITES]
    for site in SITES:
        expected = BASELINE if site.layer == 3 else INT8 if site.kind == "down_proj" else INT4
        assert chosen[site.name] == expected


def test_one_layer_number_is_not_the_beginning_of_another():
    chosen = Policy(INT4, (Rule("*.layers.1.*", INT8),)).assign(SITES)
    assert [name for name, comm in chosen.items() if comm == INT8] == [s.name for s in SITES if s.layer == 1]


def test_last_layer():
    chosen = Policy(INT4, (Rule("*.layers.{last}.mlp.*", INT8),)).assign(SITES)
    assert [name for name, comm in chosen.items() if comm == INT8] == ["model.layers.11.mlp.down_proj"]


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(
        FcEvalError, match=r"rule 1 \('\*\.fc2'\) matches no row-parallel layer.*\*\.o_proj, \*\.down_proj"
    ):
        Policy(INT4, (Rule("*.o_proj", INT8), Rule("*.fc2", INT8))).assign(SITES)


def test_a_rule_whose_layers_are_all_taken_is_an_error():
    rules = (Rule("*.o_proj", INT8), Rule("*.down_proj", INT6), Rule("*.layers.0.*", INT8))
    with pytest.raises(FcEvalError, match=r"rule 2 \('\*\.layers\.0\.\*'\) has no effect.*all 2 layers"):
        Policy(INT4, rules).assign(SITES)


def test_there_are_presets():
    assert {"uniform", "down_proj_int8", "first_last_int8"} <= {path.stem for path in PRESETS}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_fit_a_model_and_do_what_their_name_says(path):
    tree = yaml.safe_load(path.read_text())
    assert tree["name"] == path.stem
    rules = tuple(Rule(rule["match"], parse_comm(rule["comm"])) for rule in tree["rules"])
    changed = {name for name, comm in Policy(INT4, rules).assign(SITES).items() if comm != INT4}
    expected = {
        "uniform": set(),
        "down_proj_only": {s.name for s in SITES if s.kind == "o_proj"},  # the others are left unquantized
        "o_proj_only": {s.name for s in SITES if s.kind == "down_proj"},
        "down_proj": {s.name for s in SITES if s.kind == "down_proj"},
        "o_proj": {s.name for s in SITES if s.kind == "o_proj"},
        "first_last": {s.name for s in SITES if s.layer in (0, 11)},
    }
    assert changed == next(sites for start, sites in expected.items() if path.stem.startswith(start))
