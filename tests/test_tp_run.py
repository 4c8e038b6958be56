"""exec=tp as a run: the record of real ranks beside the emulator's, deaths, what is refused before anything starts."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import rank_models
import torch
from conftest import logits
from launching import ROOT
from rank_group import shared_group
from shared_evaluations import write_tasks

from fc_eval import machine, run
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError
from fc_eval.models.config import ModelConfig
from fc_eval.models.load import load_model
from fc_eval.parallel.emulate import communicate
from fc_eval.results.store import RunFolder, RunStore
from fc_eval.sweep.child import child_command
from fc_eval.sweep.execute import execute
from fc_eval.sweep.foresight import check_ahead
from fc_eval.sweep.plan import plan
from fc_eval.sweep.planned_run import write_plan

TINY = ["model=tiny", "tp=2", "device=cpu", "threads=1", "eval=text", "eval.limit=3"]


def prepared(config, root: Path) -> RunFolder:
    """The folder of a run, ready for its child process."""
    item = plan(config)
    store = RunStore(root)
    store.prepare()
    folder = store.folder(item.name, item.fingerprint)
    write_plan(item, None, folder)
    return folder


def test_a_run_of_real_ranks_records_what_the_emulator_records(tmp_path, monkeypatch, one_thread):
    """Two groups of two ranks share windows and questions; the emulator computes all of it in this process."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_tasks(tmp_path)
    settings = [*TINY, "comm=int4", "eval.divergence=true", "eval.runs.text.window_tokens=64"]
    config = compose_one([*settings, f"eval.tasks=[{tmp_path / 'sampled.yaml'}]", "exec=tp", "processes=2"])
    real = prepared(config, tmp_path / "real")
    done = subprocess.run(child_command(real), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("self-check") == 1  # one process speaks

    emulated = prepared(replace(config, exec="emulated", plan="full", processes=1), tmp_path / "emulated")
    assert run.main(str(emulated.path)) == 0
    files = sorted(p.name for p in emulated.path.iterdir() if p.suffix in (".npz", ".jsonl"))
    assert len(files) == 2
    for name in files:
        assert (real.path / name).read_bytes() == (emulated.path / name).read_bytes(), name
    one, two = (json.loads((folder.path / "result.json").read_text()) for folder in (real, emulated))
    for key in ("results", "evals", "wire", "calls", "nonfinite_groups", "protocol"):
        assert one[key] == two[key], key
    assert one["arm"] == two["arm"] | {"exec": "tp", "reducer": "torch"}
    assert one["arm"]["plan"] == "full"
    assert [result["env"]["processes"] for result in (one, two)] == [2, 1]
    assert one["fingerprint"] != two["fingerprint"]
    assert "ranks2" in real.path.name


def test_a_rank_that_dies_is_named_and_the_next_run_goes_on(tmp_path, monkeypatch, one_thread):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os, signal
            if os.environ.get("RANK") == "1":
                import fc_eval.collective.distributed as distributed
                reduce, calls = distributed.all_reduce, []
                def die_in_the_middle(*args):
                    calls.append(1)
                    if len(calls) == 6:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return reduce(*args)
                distributed.all_reduce = die_in_the_middle
            """
        )
    )
    store = RunStore(tmp_path / "runs")
    store.prepare()
    config = compose_one([*TINY, "comm=fp32_ordered", "eval.runs.text.window_tokens=64", "exec=tp"])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (broken,) = execute(config, store, say=lambda text: None)
    assert broken.state == "failed"
    assert "process 1 of 2 (counted from 0) was killed by SIGKILL" in str(broken.error)
    assert "rank 0 of 2 waited for the others in an all-reduce" in broken.folder.log_path.read_text()
    assert not list(broken.folder.path.glob("result.json"))


SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import fc_eval

part = fc_eval.load_tensor_parallel(sys.argv[1], tp=2, comm="int4", device="cpu", codec="reference", dtype="bf16")
ids = torch.load(sys.argv[2])
found = {}
with torch.no_grad():
    for comm in ("int4", "int8-g32"):
        part.communication.set_comm(comm)
        found[comm] = part.model(input_ids=ids, use_cache=False).logits
        part.communication.check_calls()
torch.save(found, f"{sys.argv[2]}.{dist.get_rank()}")
part.communication.close()
dist.destroy_process_group()
"""


def test_inside_of_a_users_own_torchrun(checkpoint, tmp_path, token_ids, one_thread):
    (tmp_path / "script.py").write_text(SCRIPT)
    torch.save(token_ids, tmp_path / "ids")
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(checkpoint), str(tmp_path / "ids")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = load_model(ModelConfig("mine", path=str(checkpoint))).model
    for rank in range(2):
        found = torch.load(tmp_path / f"ids.{rank}")
        for comm, values in found.items():
            with communicate(model, comm, 2, "reference", "full"):
                assert torch.equal(logits(model, token_ids), values), (comm, rank)


def test_consecutive_groups_of_a_larger_world(checkpoint, token_ids, one_thread):
    config = ModelConfig("mine", path=str(checkpoint))
    model = load_model(config).model
    with communicate(model, "int4", 2, "reference", "full"):
        expected = logits(model, token_ids)
    for found in shared_group().run(8, rank_models.in_consecutive_groups, config, token_ids):
        assert torch.equal(found, expected)
    for said in shared_group().run(8, rank_models.load_in_world, config, 3):
        assert said == "FcEvalError: tp=3 does not divide the 8 processes of this world: start a multiple of 3"


# -- refused before anything starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reducer=torch"], "reducer=torch reduces between real ranks: add exec=tp"),
        (["exec=tp", "tp=1"], "exec=tp needs at least 2 ranks"),
        (["exec=tp", "model.device_map=auto"], "exec=tp and model.device_map=auto do not go together"),
        (["exec=torchrun"], "unknown exec 'torchrun'"),
        (["exec=tp", "reducer=gather"], "unknown reducer 'gather': did you mean 'gathered'"),
        (["plan=rows"], "unknown plan 'rows': did you mean 'row_only'"),
        (["exec=tp", "eval.batch_size=auto"], "eval.batch_size='auto' is not possible: expected a whole number"),
    ],
)
def test_settings_that_do_not_go_together(overrides, words):
    with pytest.raises(FcEvalError, match=re.escape(words)):
        compose_one([*TINY, *overrides])


def test_heads_that_do_not_divide_are_found_without_a_tensor_library():
    for overrides in (["exec=tp"], ["plan=full"]):
        with pytest.raises(
            FcEvalError, match=r"tp=3 does not divide the 8 attention heads: .*\(1, 2, 4\), or plan=row"
        ):
            check_ahead(compose_one([*TINY, "tp=3", *overrides]))
        with pytest.raises(FcEvalError, match="tp=8 does not divide the 4 key/value heads"):
            check_ahead(compose_one([*TINY, "tp=8", *overrides]))
    check_ahead(compose_one([*TINY, "tp=3", "exec=tp", "plan=row_only"]))
    check_ahead(compose_one([*TINY, "tp=8"]))


def test_ranks_and_groups_are_settled_for_the_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)

    def settled(gpus, *overrides):
        monkeypatch.setattr(machine, "gpu_count", lambda: gpus)
        return machine.settled(compose_one(["model=tiny", "eval=text", "tp=2", "exec=tp", *overrides]))

    assert (settled(8).processes, settled(8).device) == (4, "cuda")
    assert settled(3).processes == 1
    assert (settled(0).processes, settled(0).threads) == (1, 4)
    assert settled(0, "processes=2").threads == 2
    with pytest.raises(FcEvalError, match="exec=tp with tp=2 needs as many GPUs, but torch sees 1"):
        settled(1)
    with pytest.raises(FcEvalError, match="processes=3 of 2 GPUs each needs as many GPUs, but torch sees 4"):
        settled(4, "processes=3")


def test_what_a_run_is_includes_how_it_is_split_and_reduced():
    settings = [[], ["plan=full"], ["exec=tp"], ["exec=tp", "plan=row_only"], ["exec=tp", "reducer=gathered"]]
    prints = [plan(compose_one([*TINY, *more])).fingerprint for more in settings]
    assert len(set(prints)) == len(prints)
    same = [plan(compose_one([*TINY, *more])).fingerprint for more in (["plan=row_only"], ["exec=tp", "plan=full"])]
    assert same == [prints[0], prints[2]]
    baselines = [plan(compose_one([*TINY, *more]).baseline()).fingerprint for more in settings]
    assert baselines[2] == baselines[4]  # the same bits whoever reduces
    assert len(set(baselines)) == 4
