"""The command that a report prints for a run, read back by a shell and by Hydra, is the same run."""

import functools
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fc_eval.cli import main
from fc_eval.compose import compose_one
from fc_eval.config import RunConfig
from fc_eval.report.command import rerun_command

ROOT = Path(__file__).parents[1]
RULE = "policy.rules=[{match:'*.o_proj',comm:int8}]"

COMMANDS = {
    "defaults": [],
    "formats of its own": ["comm.reduce=int4-g32-sym", "comm.gather=int8-g64"],
    "group size": ["comm=int4_int8", "comm.group_size=token"],
    "node size": ["comm=hierarchical_int8", "comm.node_size=4", "tp=8"],
    "no preset's algorithm": ["comm=int5", "comm.algorithm=ring"],
    "baseline": ["comm=fp32_ordered"],
    "policy": ["policy=first_last_int8"],
    "own rules": [RULE],
    "own rules with a name": [RULE, "policy.name=mine"],
    "data and seeds": ["data.root='/mnt/my data'", "seed=3", "threads=2", "device=cpu", "codec=reference"],
    "a local model": ["model=local", "model.path=/models/x.gguf", "model.name=mine", "model.dtype=fp16"],
    "a file for a preset": ["model=smollm2", "model.path=/models/x.gguf"],
    "another tiny model": ["model=tiny", "model.tiny.seed=4", "model.shape.hidden=256", "model.shape.head_dim=64"],
    "published": ["model=smollm2", "model.published={wikitext2:5.5}"],
    "one limit": ["eval=[wikitext2,commonsense]", "eval.limit=5", "eval.divergence=true", "eval.batch_size=4"],
    "several limits": ["eval=[text,piqa]", "eval.limit=5", "eval.runs.text.limit=3", "eval.runs.text.window_tokens=64"],
    "tasks": ["eval=text", "eval.tasks=[boolq,{task: gsm8k, num_fewshot: 5},my/own.yaml,{name: '5', task: x}]"],
    "tasks alone": ["eval=[]", "eval.tasks=[boolq]"],
    "runs between": [
        "eval=piqa",
        "+eval.runs={mine:{kind:task,task:boolq,limit:2},a.b:{kind:perplexity,protocol:text,window_tokens:64,path:f}}",
        "eval.tasks=[wikitext2]",
    ],
    "a preset's name for another kind": ["eval=[]", "+eval.runs={piqa:{kind:perplexity,protocol:text}}"],
    "a preset changed": ["eval=piqa", "eval.runs.piqa.num_fewshot=3"],
}


def repeated(config: RunConfig) -> RunConfig:
    """What the printed command composes to; the recorded tree takes the way through `config.yaml`."""
    recorded = yaml.safe_load(yaml.safe_dump(config.as_dict()))
    program, command, *overrides = shlex.split(rerun_command(recorded))
    assert (program, command) == ("fc-eval", "run")
    return compose_one(overrides)


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_repeats_the_run(case):
    config = compose_one(COMMANDS[case])
    again = repeated(config)
    assert again.identity() == config.identity()
    assert again == config  # places of files too, which the identity leaves out
    assert repeated(config.baseline()) == config.baseline()


def test_it_says_only_what_differs():
    assert rerun_command(compose_one([]).as_dict()) == "fc-eval run model=smollm2 comm=int4 tp=4 'eval=[text,everyday]'"
    command = rerun_command(compose_one([RULE, "comm.group_size=32", "data.root=/d", "eval=[text,piqa]"]).as_dict())
    assert command == (
        "fc-eval run model=smollm2 comm=int4 comm.group_size=32 'policy.rules=[{match:\"*.o_proj\",comm:int8}]' tp=4 "
        "'eval=[text,piqa]' 'data.root=\"/d\"'"
    )


@functools.cache
def defaults() -> RunConfig:
    return compose_one([])


@given(st.text(alphabet="ab/ '\"\\${}[](),:=~#@?*&;<>|`!%+-\t\né☃", max_size=12))
@settings(max_examples=30, deadline=None)
def test_any_path_survives_the_shell_and_hydra(path):
    config = replace(defaults(), data_root=path)
    assert repeated(config).data_root == path


@pytest.mark.parametrize(
    "file", sorted((ROOT / "reports").glob("*/runs/*/config.yaml"))[::7], ids=lambda f: f.parts[-2]
)
def test_committed_runs_can_be_repeated(file):
    config = RunConfig.from_dict(yaml.safe_load(file.read_text())["config"])
    assert repeated(config) == replace(config, processes="auto")


def test_a_printed_command_finds_its_run_done_before(tmp_path, capsys, in_this_process):
    tiny = ["model=tiny", "tp=2", "eval=text", "eval.limit=1", "eval.runs.text.window_tokens=64", "device=cpu", RULE]
    (tmp_path / "my text.txt").write_text("a text of its own, " * 40)
    tiny += [f"eval.runs.text.path='{tmp_path / 'my text.txt'}'", "comm.reduce=int4-g32-sym", "comm.gather=int8-g64"]
    assert main(["run", *tiny, f"out={tmp_path / 'runs'}"]) == 0
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    commands = re.findall(r"`(fc-eval run [^`]*)`", (tmp_path / "report" / "report.md").read_text())
    assert len(commands) == 2
    for command in commands:
        capsys.readouterr()
        assert main([*shlex.split(command)[1:], f"out={tmp_path / 'runs'}", "dry_run=true"]) == 0
        out = capsys.readouterr().out
        assert "would run" not in out
        assert "done before" in out
    assert "*.o_proj int8" in (tmp_path / "report" / "results.csv").read_text()
