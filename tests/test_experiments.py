"""Every experiment: its file is complete, all its runs compose, LLaMA plans without weights, a tiny version runs."""

import math
import re
from dataclasses import replace

import pytest

from fc_eval.cli import main
from fc_eval.collective.comm import parse_comm
from fc_eval.compose import compose_mappings
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.experiment import Experiment, braces, experiment
from fc_eval.machine import settled
from fc_eval.models.config import ModelConfig
from fc_eval.presets import options, preset
from fc_eval.sweep import hub_commit
from fc_eval.sweep.foresight import check_ahead

NAMES = options("experiment")
LARGE = ("llama3_8b", "llama3_70b")
TINY = ["model=tiny", "tp=2", "eval=text", "eval.limit=1", "eval.runs.text.window_tokens=32", "threads=1", "device=cpu"]
TINY += ["model.calibration.text=text", "model.calibration.sequences=2"]  # of those with W8A8 weights


def run_cli(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["run", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("name", NAMES)
def test_every_run_composes_and_could_work_with_large_models(name):
    found = experiment(name)
    configs = [
        RunConfig.from_mapping(m) for m in compose_mappings([f"experiment={name}", "model=llama3_8b"], sweep=True)
    ]
    assert len(configs) == len({c.comm.build().name + c.policy_name + str(c.tp) for c in configs})
    assert len(configs) == math.prod(len(values) for values in found.sweep.values())
    assert {config.comm.build().name for config in configs} == set(found.comms)
    assert {config.policy_name for config in configs} == set(found.policies)
    assert all(tuple(spec.name for spec in config.eval.specs) == found.evals for config in configs)
    for model in LARGE:
        other = ModelConfig.from_mapping(preset("model", model))
        for config in configs:
            check_ahead(settled(replace(config, model=other, device="cpu")))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_says_what_a_reader_must_know(name):
    found = experiment(name)
    for text in (found.title, found.source, found.asks, found.fixed, found.finding):
        assert len(text) > 10, text
    assert "tp" in found.ours
    assert found.shows
    assert all(row.model in options("model") for row in found.published)
    if not name.startswith(("effective", "full", "peers")):
        assert re.search(r"\(arXiv \d{4}\.\d{5}\)", found.source)


@pytest.mark.parametrize("model", LARGE)
def test_a_dry_run_needs_no_weights_and_says_the_command(model, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_commit, "_ask", lambda kind, repo, revision: hub_commit.Commit(None, "no network"))
    arguments = ["-m", "experiment=flash_c4_perplexity", f"model={model}", "device=cpu", f"out={tmp_path / 'runs'}"]
    status, out, _ = run_cli(capsys, *arguments, "dry_run=true")
    assert status == 0
    assert out.count("would run") == 5
    assert f"to run: fc-eval run {' '.join(arguments)} (meta-llama/" in out
    assert "HF_TOKEN" in out
    assert not (tmp_path / "runs").exists()


def test_the_command_line_replaces_what_it_names():
    def jobs(*overrides):
        mappings = compose_mappings([*overrides, *TINY], sweep=True)
        return [(RunConfig.from_mapping(m).comm.build().name, m["tp"], list(m["eval"]["runs"])) for m in mappings]

    whole = jobs("experiment=flash_c4_perplexity")
    assert [name for name, *_ in whole] == list(experiment("flash_c4_perplexity").comms)
    assert {(tp, *evals) for _, tp, evals in whole} == {(2, "text")}
    assert jobs("experiment=flash_c4_perplexity", "comm=int3-g64") == [("two_step:int3-g64-asym", 2, ["text"])]
    two = jobs("experiment=flash_c4_perplexity,flash_wikitext2_perplexity")
    assert two == whole + whole


def test_a_comm_has_any_name_on_the_command_line():
    def comm(*overrides):
        (mapping,) = compose_mappings([*overrides, *TINY], sweep=False)
        return RunConfig.from_mapping(mapping).comm.build()

    for name in ("int4-g32-sym", "one_step:mxfp4-g8-e5m0", "int4-g128/int8-g64", "hierarchical@2:int4", "int4+min64"):
        assert comm(f"comm={name}") == parse_comm(name)
    assert comm("comm.group_size=64", "comm=ring:int4") == parse_comm("ring:int4-g64")
    assert comm("comm=int8-g32", "comm.min_tokens=5") == parse_comm("int8-g32+min5")


MISTAKES = {
    "unknown": (["-m", "experiment=flash_c4_perplexit"], "unknown experiment 'flash_c4_perplexit': did you mean"),
    "no -m": (["experiment=flash_c4_perplexity"], "is a sweep, which needs -m"),
    "a list": (["-m", "experiment=[a]"], "choose by name, experiment=NAME"),
    "several without -m": (["experiment=flash_c4_perplexity,mx_one_step"], "gives several values"),
    "comm": (["-m", "experiment=flash_c4_perplexity", "comm=int44"], "unknown comm 'int44': did you mean 'int4'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(case, capsys):
    arguments, sentence = MISTAKES[case]
    status, _, err = run_cli(capsys, *arguments, *TINY)
    assert status == 2
    assert len(err.splitlines()) == 1, err
    assert sentence in err


def test_a_file_that_cannot_be_meant_is_one_sentence():
    def make(**changes):
        given = {"run": {"eval": "text"}, "sweep": {"comm": ("int4",)}, "shows": ("bits",)} | changes
        return Experiment("mine", "t", "s", "a", "f", {}, finding="", **given)

    assert make().evals == ("text",)
    for changes, sentence in (
        ({"shows": ("bit",)}, "unknown entry of shows in experiment mine: 'bit': did you mean 'bits'"),
        ({"sweep": {"comm": ()}}, "sweeps over no comm"),
        ({"sweep": {"comm": ("int44",)}}, "unknown comm 'int44'"),
        ({"run": {}}, "evaluates nothing"),
    ):
        with pytest.raises(FcEvalError, match=re.escape(sentence)):
            make(**changes)


def test_braces_are_a_shells():
    assert braces("int4") == ["int4"]
    assert braces("a{1,2}b{,-c}") == ["a1b", "a1b-c", "a2b", "a2b-c"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("experiments") / "runs"


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_version_of_each_runs(name, store, capsys, in_this_process):
    """Two arms of each, into one store: arms are shared."""
    found = experiment(name)
    comms = ",".join(f'"{comm}"' for comm in dict.fromkeys((found.comms[0], found.comms[-1])))
    policies = [f"policy={','.join((found.policies[0], found.policies[-1]))}"] if len(found.policies) > 1 else []
    layers = [o.replace("text", "layer_error") if o.startswith("eval") else o for o in TINY]
    tiny = layers if "layers" in found.shows else TINY
    status, out, err = run_cli(capsys, "-m", f"experiment={name}", *tiny, f"comm={comms}", *policies, f"out={store}")
    assert status == 0, out + err
    assert "failed" not in out
    assert ("layer_error" if "layers" in found.shows else "perplexity") in out
