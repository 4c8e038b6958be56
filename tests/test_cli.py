"""The command line: what it prints, and one clear sentence for each kind of mistake."""

import sys
from pathlib import Path

import pytest
import yaml

from fc_eval.cli import main
from fc_eval.collective.comm import parse_comm
from fc_eval.compose import compose_one
from fc_eval.config import CommConfig
from fc_eval.errors import FcEvalError
from fc_eval.presets import options, preset
from fc_eval.results.store import RunFolder
from fc_eval.sweep.execute import summarize
from fc_eval.sweep.planned_run import Outcome

TINY = ["model=tiny", "tp=2", "eval=text", "eval.limit=1", "eval.runs.text.window_tokens=64", "device=cpu"]


def run_cli(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


MISTAKES = {
    "unknown comm": (["comm=int44"], "unknown comm 'int44': did you mean 'int4'"),
    "unknown format": (["comm.reduce=itn4"], "unknown format 'itn4': did you mean 'int4'"),
    "unknown model": (["model=smollm"], "unknown model 'smollm': did you mean 'smollm2'"),
    "unknown eval": (["eval=wikitext"], "unknown eval 'wikitext': did you mean 'wikitext"),
    "unknown eval in a list": (["eval=[text,pika]"], "unknown eval 'pika'"),
    "unknown key": (["comm.grop_size=32"], "unknown key 'comm.grop_size': did you mean 'comm.group_size'"),
    "group size 0": (["comm=int4", "comm.group_size=0"], "group size 0 of format 'int4' is not possible"),
    "group of words": (["comm=int4", "comm.group_size=many"], "group size 'many' is not possible"),
    "gather for one_step": (["comm=one_step_int4", "comm.gather=int8"], "leave out the gather format 'int8-g128-asym'"),
    "no reduce format": (["comm.reduce=null"], "two_step needs a reduce format"),
    "node size": (["comm=hierarchical_int4", "comm.node_size=3", "tp=4"], "node_size=3 does not divide tp=4"),
    "tp 0": (["tp=0"], "tp=0 is not possible"),
    "codec": (["codec=cpuu"], "unknown codec 'cpuu': did you mean 'cpu'"),
    "exec": (["exec=emulate"], "unknown exec 'emulate': did you mean 'emulated'"),
    "batch size": (["eval.batch_size=0"], "eval.batch_size=0 is not possible"),
    "limit": (["eval.limit=0"], "limit=0"),
    "no eval": (["eval=[]"], "nothing to evaluate"),
    "missing data folder": (["eval=wikitext2", "data.root=/nonexistent/data"], "/nonexistent/data"),
    "missing model path": (["model=local", "model.path=/nonexistent/model"], "/nonexistent/model does not exist"),
    "tp text": (["tp=two"], "tp='two' is not possible: expected a whole number"),
    "tp fraction": (["tp=2.5"], "tp=2.5 is not possible"),
    "threads": (["threads=abc"], "threads='abc' is not possible: expected a whole number or null"),
    "threads 0": (["threads=0"], "threads=0 is not possible"),
    "seed": (["seed=-1"], "seed=-1 is not possible"),
    "seed text": (["seed=abc"], "seed='abc' is not possible: expected a whole number"),
    "node size text": (["comm=hierarchical_int4", "comm.node_size=2.0"], "comm.node_size=2.0 is not possible"),
    "algorithm list": (["comm.algorithm=[two_step]"], "comm.algorithm=['two_step'] is not possible: expected text"),
    "shape text": (["model.shape.layers=abc"], "model.shape.layers='abc' is not possible"),
    "shape 0": (["model.shape.heads=0"], "model.shape.heads=0 is not possible"),
    "tiny seed": (["model.tiny.seed=abc"], "model.tiny.seed='abc' is not possible"),
    "dry_run word": (["dry_run=no"], "dry_run='no' is not possible: expected true or false"),
    "divergence word": (["eval.divergence=no"], "eval.divergence='no' is not possible: expected true or false"),
    "unparsable": (["comm=["], "could not be read"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence_and_a_status(case, capsys, tmp_path):
    overrides, sentence = MISTAKES[case]
    # An override of the text evaluation makes no sense where another one is chosen.
    base = TINY if not any(o.startswith("eval=") for o in overrides) else [o for o in TINY if "runs.text" not in o]
    status, _, err = run_cli(capsys, "run", *base, *overrides, f"out={tmp_path / 'runs'}")
    assert status == 2
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert sentence in lines[0]
    assert not list((tmp_path / "runs").glob("*/result.json"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
def test_out_that_is_a_file_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run_cli(capsys, "run", *TINY, f"out={tmp_path / 'file'}")
    assert status == 2
    assert "not writable" in err
    assert "out=DIR" in err


def test_world_size_that_does_not_divide_is_a_sentence_before_anything_is_computed(capsys, tmp_path):
    status, out, err = run_cli(capsys, "run", *TINY, "tp=7", f"out={tmp_path / 'runs'}")
    assert status == 2
    assert out == ""
    assert err.startswith("error: tp=7 does not divide model.layers.0.")
    assert not list((tmp_path / "runs").glob("*/status.json"))


def test_unknown_command(capsys):
    status, _, err = run_cli(capsys, "rnu")
    assert status == 2
    assert "did you mean 'run'" in err


def test_help_and_version(capsys):
    assert run_cli(capsys, "--help")[0] == 0
    assert run_cli(capsys)[1].startswith("usage: fc-eval")
    assert run_cli(capsys, "--version")[1].startswith("fc-eval ")


def test_formats_lists_bits(capsys):
    status, out, _ = run_cli(capsys, "formats", "--tokens", "4", "--hidden", "128")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("int4-g128-asym"))
    # 4 rows of one group of 128: half a block of 8 groups, so padding doubles the cost; in the limit it is 4.25 bits.
    assert row.split()[1:3] == ["4.25", "8.5000"]
    assert "reference" in row


def test_formats_rejects_an_unknown_one(capsys):
    assert "did you mean 'int4'" in run_cli(capsys, "formats", "imt4")[2]


@pytest.mark.parametrize("option", ["--tokens", "--hidden"])
def test_formats_refuses_a_message_of_no_size_that_is_sent(capsys, option):
    status, _, err = run_cli(capsys, "formats", option, "9" * 400)
    assert status == 2
    assert "--tokens and --hidden are at most 2147483647" in err


def test_doctor_says_what_works(capsys):
    status, out, _ = run_cli(capsys, "doctor", *TINY)
    assert status == 0, out
    assert "reference yes" in out
    assert "INT8 two-step all-reduce of known sum is exact" in out
    assert "no network needed" in out


def test_doctor_finds_what_does_not_work(capsys):
    status, out, _ = run_cli(capsys, "doctor", *TINY, "tp=7")
    assert status == 1
    assert "FAIL  divisibility: tp=7 does not divide" in out


@pytest.mark.parametrize("group", ["model", "comm", "policy", "eval"])
def test_every_choice_composes(group):
    names = options(group)
    assert names
    for name in names:
        extra = ["model.path=/some/folder"] if name == "local" else []
        config = compose_one([f"{group}={name}", "tp=8", *extra])
        assert config == type(config).from_dict(config.as_dict())


@pytest.mark.parametrize("name", options("comm"))
def test_a_preset_means_in_python_and_in_rules_what_it_means_on_the_command_line(name):
    comm = CommConfig(**preset("comm", name)).build()
    assert parse_comm(name) == comm
    assert parse_comm(comm.name) == comm


def test_group_size_overrides_both_stages():
    comm = compose_one(["comm=int4_int8", "comm.group_size=32"]).comm.build()
    assert comm.name == "two_step:int4-g32-asym/int8-g32-asym"


def test_baseline_of_a_run_differs_in_the_comm_alone():
    config = compose_one([*TINY, "comm=int4", "policy=down_proj_int8", "eval.divergence=true"])
    baseline = config.baseline()
    assert baseline.is_baseline
    assert not config.is_baseline
    assert baseline.eval.specs == config.eval.specs
    assert baseline.model == config.model
    assert baseline == config.baseline().baseline()


def test_a_policy_rule_of_the_wrong_form_is_a_sentence():
    with pytest.raises(FcEvalError, match="policy rule 0"):
        compose_one([*TINY, "policy.rules=[{match: '*.o_proj'}]"])


def test_conf_files_exist_where_the_package_looks():
    from fc_eval.presets import conf_dir

    assert (conf_dir() / "config.yaml").exists()
    assert Path(conf_dir()).name == "conf"


def test_a_mistake_in_a_sweep_is_said_before_anything_runs_and_the_rest_is_planned(capsys, tmp_path):
    sweep = ["-m", *TINY, "comm=int4,fp32_ordered", "comm.group_size=32", f"out={tmp_path}", "dry_run=true"]
    status, out, err = run_cli(capsys, "run", *sweep)
    assert status == 2
    assert "does not quantize" in err
    assert out.count("would run") == 2  # INT4 and its baseline
    assert "not run: " in out
    assert "would run" not in run_cli(capsys, "run", *sweep, "fail_fast=true")[1]


def test_cfg_prints_every_job_and_runs_none(capsys, tmp_path):
    status, out, _ = run_cli(capsys, "run", "-m", *TINY, "tp=2,4", f"out={tmp_path / 'runs'}", "--cfg", "job")
    assert status == 0
    assert [tree["tp"] for tree in yaml.safe_load_all(out)] == [2, 4]
    assert not (tmp_path / "runs").exists()


def test_help_of_run_names_every_choice_and_key(capsys):
    out = run_cli(capsys, "run", "--help")[1]
    assert all(name in out for group in ("model", "comm", "policy", "eval") for name in options(group))
    for key in ("tp: 4", "batch_size: 8", "root: null", "dry_run: false"):
        assert key in out


def test_an_unknown_flag_is_one_sentence(capsys):
    status, _, err = run_cli(capsys, "run", "--multirn")
    assert status == 2
    assert "did you mean '--multirun'" in err


def test_the_exit_status_tells_mistakes_from_defects(tmp_path):
    def ends(*outcomes):
        return summarize(
            [Outcome(*o[:1], RunFolder(tmp_path, str(i)), 0.0, *o[1:]) for i, o in enumerate(outcomes)], list
        )

    done, mistake, defect = ("done",), ("failed", "tp=7 does not divide", True), ("failed", "killed", False)
    assert ends(done, done) == 0
    assert ends(done, mistake) == 2
    assert ends(mistake, defect) == 1
    assert ends(defect) == 1
