"""Layer errors as an evaluation of a run: composed, refused where they mean nothing, carried out, kept, resumed."""

import json

import pytest

from fc_eval.compose import compose_one
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.evaluate.run import evaluate
from fc_eval.evaluate.spec import LayerErrorSpec, parse_spec
from fc_eval.models.tiny import byte_tokenizer
from fc_eval.report.command import rerun_command
from fc_eval.results.record import load_run
from fc_eval.results.store import RunStore
from fc_eval.sweep.execute import execute

TINY = ["model=tiny", "tp=2", "eval=[text,layer_error]", "eval.limit=2", "threads=1", "device=cpu", "comm=int4"]
TINY += ["eval.runs.text.window_tokens=64", "eval.runs.layer_error.window_tokens=64"]


def test_it_composes_beside_others_and_is_written_back():
    config = compose_one(TINY)
    assert [spec.kind for spec in config.eval.specs] == ["perplexity", "layer_error"]
    assert config.eval.specs[1] == LayerErrorSpec("layer_error", "text", 64, limit=2)
    assert RunConfig.from_dict(config.as_dict()) == config
    changed = [*TINY, "eval.runs.layer_error.stages=false", "eval.runs.layer_error.protocol=c4"]
    command = rerun_command(compose_one(changed).as_dict())
    assert "eval.runs.layer_error.protocol=c4 eval.runs.layer_error.window_tokens=64" in command
    assert "eval.runs.layer_error.stages=false" in command


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["exec=tp"], "need partial sums of 2 ranks or more"),
        (["tp=1"], "in one process: exec=emulated tp=2"),
        (["eval.runs.layer_error.stages=3"], "expected true or false"),
        (["eval.runs.layer_error.protocol=wiki"], "unknown perplexity protocol 'wiki'"),
    ],
)
def test_what_means_nothing_is_one_sentence(overrides, message):
    with pytest.raises(FcEvalError, match=message):
        compose_one([*TINY, *overrides])


def test_a_protocol_is_required_and_a_probe_is(tiny):
    with pytest.raises(FcEvalError, match="lacks its 'protocol'"):
        parse_spec("x", {"kind": "layer_error"})
    spec = LayerErrorSpec("x", "text", 64, limit=1)
    with pytest.raises(FcEvalError, match="whose layers can be watched"):
        evaluate(tiny, byte_tokenizer(), spec, data_root=None, add_bos_token=False)


def test_a_run_measures_keeps_and_takes_up_again(tmp_path, in_this_process):
    config, store, said = compose_one(TINY), RunStore(tmp_path), []
    store.prepare()
    outcomes = execute(config, store, say=said.append)
    assert [outcome.state for outcome in outcomes] == ["done", "done"], said
    folder = outcomes[1].folder
    record = load_run(folder.path)
    table = record.layers["layer_error"].table
    parts = ("self_attn.o_proj", "mlp.down_proj")
    assert set(table["site"]) == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    assert set(table["elements"][table["part"] == "output"]) == {2 * 64 * 192}
    assert set(table["elements"][table["part"] == "reduce"]) == {2 * 2 * 64 * 192}
    assert (table["mse"] > 0).all()
    result = folder.read_result()
    assert result["results"]["layer_error"]["down_proj isolated output mse"] > 0
    # One counted forward pass per window: the model as it is; the other passes are forgotten.
    assert result["calls"]["forwards"] == 4
    baseline = load_run(outcomes[0].folder.path).layers["layer_error"].table
    assert set(baseline["mse"]) == {0.0}

    assert [outcome.state for outcome in execute(config, store, say=said.append)] == ["skipped", "skipped"]
    (folder.path / "result.json").unlink()
    (folder.path / "layers_layer_error.csv").unlink()
    folder.set_status("failed", error="stopped")
    assert [outcome.state for outcome in execute(config, store, say=said.append)] == ["skipped", "done"]
    log = folder.log_path.read_text()
    assert "text: kept from before" in log
    assert "layer_error: not kept from before" in log
    assert load_run(folder.path).layers["layer_error"].table.equals(table)
    assert json.loads((folder.path / "evals/layer_error.json").read_text())["kind"] == "layer_error"
