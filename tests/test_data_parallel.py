"""Several processes share a run: the bytes of one, uneven shares, what `auto` means."""

import pickle
from dataclasses import replace

import pytest
import torch
from conftest import attach, logits
from rank_group import RankGroup
from shared_evaluations import everything, everything_shared, write_tasks

from fc_eval import machine, run
from fc_eval.compose import compose_one
from fc_eval.errors import FcEvalError, LostProcessError
from fc_eval.evaluate.processes import ALONE, Processes
from fc_eval.evaluate.progress import Ticker
from fc_eval.results.store import RunStore
from fc_eval.sweep.execute import execute
from fc_eval.sweep.plan import plan
from fc_eval.sweep.planned_run import write_plan

RUN = ["model=tiny", "tp=2", "eval.limit=3", "eval.runs.text.window_tokens=64"]


# -- the same numbers ---------------------------------------------------------------------------------------------


def test_three_processes_give_the_bytes_of_one(tmp_path, monkeypatch, one_thread):
    write_tasks(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    group = RankGroup(world=3)
    try:
        together = group.run(3, everything_shared, tmp_path)
    finally:
        group.close()
    alone = everything(tmp_path, ALONE)
    assert len(alone) == 9
    for index, shared in enumerate(together):
        assert shared.keys() == alone.keys()
        for name, expected in alone.items():
            assert shared[name] == expected, (index, name)
    assert {key: len(value["progress"]) for key, value in alone.items()} == dict.fromkeys(alone, 1)


def test_counts_of_several_processes_add_up_to_those_of_one(tiny_bf16, token_ids):
    batches = [token_ids, token_ids[:1, :10], token_ids[:, :17]]
    counts = []
    for share in (batches[0::2], batches[1::2], []):
        with attach(tiny_bf16) as attachment:
            for ids in share:
                logits(tiny_bf16, ids)
            counts.append(attachment.counts())
    with attach(tiny_bf16) as attachment:
        for ids in batches:
            logits(tiny_bf16, ids)
        expected = attachment.stats()
        attachment.set_counts(pickle.loads(pickle.dumps(counts)))
        assert attachment.stats() == expected
        assert expected.forwards == 3
        attachment.check_calls()


@pytest.mark.gpu
def test_two_gpus_give_the_bytes_of_one(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results = []
    for processes in (1, 2):
        store = RunStore(tmp_path / str(processes))
        store.prepare()
        config = compose_one([*RUN, "device=cuda", "comm=int4", "eval=[text,everyday]", f"processes={processes}"])
        outcomes = execute(replace(config, eval=replace(config.eval, divergence=True)), store)
        assert [outcome.state for outcome in outcomes] == ["done", "done"]
        files = [p for o in outcomes for p in sorted(o.folder.path.iterdir()) if p.suffix in (".npz", ".jsonl")]
        results.append({path.relative_to(store.root): path.read_bytes() for path in files})
    assert len(results[0]) == 4
    assert results[0] == results[1]


# -- progress, configuration --------------------------------------------------------------------------------------


def test_progress_of_one_process_stands_for_all():
    seen = []
    ticker = Ticker(lambda *x: seen.append(x), 10, processes=3)
    for count in (2, 2):
        ticker.advance(count)
    ticker.finish()
    ticker.finish()
    assert seen == [(6, 10), (9, 10), (10, 10)]  # not at the end before the others are


def with_gpus(monkeypatch, count, *overrides):
    monkeypatch.setattr(machine, "gpu_count", lambda: count)
    return machine.settled(compose_one([*RUN, "eval=text", *overrides]))


def test_auto_is_one_process_per_gpu_and_one_on_a_cpu(monkeypatch):
    assert with_gpus(monkeypatch, 4).processes == 4
    assert with_gpus(monkeypatch, 4, "processes=2").processes == 2
    assert with_gpus(monkeypatch, 4, "model.device_map=auto").processes == 1
    assert with_gpus(monkeypatch, 4, "device=cpu").processes == 1
    assert with_gpus(monkeypatch, 0).processes == 1
    with pytest.raises(FcEvalError, match="processes=5 needs as many GPUs, but torch sees 4"):
        with_gpus(monkeypatch, 4, "processes=5")
    for wrong in ("0", "some", "1.5", "true"):
        with pytest.raises(FcEvalError, match=f"(?i)processes='?{wrong}'? is not possible"):
            with_gpus(monkeypatch, 4, f"processes={wrong}")
    with pytest.raises(FcEvalError, match="do not go together"):
        with_gpus(monkeypatch, 4, "processes=2", "model.device_map=auto")


@pytest.mark.parametrize(
    ("environment", "overrides", "threads"),
    [
        (None, [], 8),
        (None, ["processes=3"], 2),
        (None, ["processes=9"], 1),
        ("", ["processes=2"], 4),
        ("5", [], 5),
        ("5,2", ["processes=3"], 5),
        ("5", ["processes=3", "threads=4"], 4),
    ],
)
def test_threads_are_settled_on_a_cpu(monkeypatch, environment, overrides, threads):
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert with_gpus(monkeypatch, 0, *overrides).threads == threads


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", "1025"])
def test_an_impossible_number_of_threads_in_the_environment_is_refused(monkeypatch, wrong):
    monkeypatch.setenv("OMP_NUM_THREADS", wrong)
    with pytest.raises(FcEvalError, match=f"OMP_NUM_THREADS='{wrong}' .* expected 1 to 1024"):
        with_gpus(monkeypatch, 0)
    assert with_gpus(monkeypatch, 0, "threads=2").threads == 2
    assert with_gpus(monkeypatch, 1).threads is None


def test_threads_are_part_of_what_a_run_is_on_a_cpu_alone(monkeypatch):
    monkeypatch.setattr(machine, "cpu_count", lambda: 8)
    prints = []
    for number in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        prints.append(plan(compose_one([*RUN, "eval=text", "device=cpu"])).fingerprint)
    assert prints[0] != prints[1]
    assert plan(compose_one([*RUN, "eval=text", "device=cpu", "threads=1"])).fingerprint == prints[0]
    on_gpu = [with_gpus(monkeypatch, 2, f"threads={n}", f"processes={n}").identity() for n in (1, 2)]
    assert on_gpu[0] == on_gpu[1] == with_gpus(monkeypatch, 2).identity()
    monkeypatch.delenv("OMP_NUM_THREADS")
    few, many = (compose_one([*RUN, "eval=text", "device=cpu", "threads=2", f"processes={n}"]) for n in (1, 4))
    assert plan(few).fingerprint == plan(many).fingerprint
    assert plan(replace(many, threads=None)).config.threads == 2
    assert plan(replace(many, threads=None)).fingerprint == plan(few).fingerprint
    assert plan(replace(few, threads=None)).fingerprint != plan(few).fingerprint


def test_a_run_computes_with_the_threads_that_were_settled(tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    target = plan(compose_one([*RUN, "eval=text", "device=cpu", "comm=fp32_ordered"]))
    folder = RunStore(tmp_path).folder(target.name, target.fingerprint)
    write_plan(target, None, folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run.main(str(folder.path)) == 0
    assert folder.read_result()["env"]["threads"] == 3


def test_a_lost_process_is_an_error_of_its_own(monkeypatch):
    import accelerate.utils

    def lost(value):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711\nand more")

    monkeypatch.setattr(accelerate.utils, "gather_object", lost)
    with pytest.raises(LostProcessError, match=r"process 1 lost the others: Connection closed by peer"):
        Processes(1, 2).map(str, [1, 2, 3])
    assert Processes().map(str, [1, 2, 3]) == ["1", "2", "3"]
    assert ALONE.gather("x") == ["x"]
