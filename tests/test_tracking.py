"""What a tracker is told of a finished run, and that it can fail without a run failing."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from run_fixtures import small_set

from fc_eval.cli import main
from fc_eval.errors import FcEvalError
from fc_eval.results.store import RunFolder
from fc_eval.sweep.execute import carry_out
from fc_eval.sweep.planned_run import Outcome
from fc_eval.sweep.tracking import TRACKERS, tracker_of


class Recorder(ModuleType):
    """Stands for any tracker: it keeps every call, and what it gives back is itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []
        self.summary = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append(("exit", (), {}))


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    _, int8, _ = small_set(tmp_path)
    (path,) = tmp_path.glob("*int8*")
    return RunFolder(path, int8.fingerprint)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("wandb", ["init", "update", "finish"]),
        ("trackio", ["init", "log", "finish"]),
        ("mlflow", ["set_experiment", "start_run", "log_params", "log_metrics", "exit"]),
    ],
)
def test_a_finished_run_is_logged_once_with_its_settings_and_numbers(folder, monkeypatch, name, order):
    module = Recorder(name)
    monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    tracker_of(name)(folder)
    assert [call for call, _, _ in module.calls] == order
    told = json.dumps(module.calls)
    assert f'"{folder.path.name}"' in told
    assert '"fc_eval"' in told
    told_config = [kwargs["config"] for _, _, kwargs in module.calls if "config" in kwargs]
    (config,) = told_config + [args[0] for call, args, _ in module.calls if call == "log_params"]
    assert config["fingerprint"] == folder.fingerprint
    assert config["comm_name"] == "two_step:int8-g128-asym/int8-g128-asym"
    assert str(config["tp"]) == "4"
    numbers = next(a[0] for c, a, _ in module.calls if a and isinstance(a[0], dict) and "wire/effective_bits" in a[0])
    written = folder.read_result()
    assert numbers["wikitext2/perplexity"] == written["results"]["wikitext2"]["perplexity"]
    assert numbers["arc_easy/acc_norm"] == written["results"]["arc_easy"]["acc_norm"]
    assert (numbers["wire/effective_bits"], numbers["time/total_s"]) == (8.25, 12.5)


def test_a_tracker_that_fails_is_said_and_fails_no_run(folder, monkeypatch):
    class Failing(ModuleType):
        def init(self, **kwargs):
            raise ConnectionError("no\nroute")

    monkeypatch.setitem(sys.modules, "wandb", Failing("wandb"))
    said: list[str] = []
    run = SimpleNamespace(folder=folder, baseline=None, name=folder.path.name, is_done=lambda say: False)

    def launcher(runs):
        for each in runs:
            yield each, Outcome("done", folder, 1.0)

    outcomes = carry_out([run], launcher, finished=tracker_of("wandb", said.append), say=lambda text: None)
    assert [outcome.state for outcome in outcomes] == ["done"]
    assert said == [f"! {folder.path.name}: not logged by wandb: ConnectionError: no route"]


def test_trackers_that_are_not_there_are_named_before_anything_runs(tmp_path, monkeypatch, capsys):
    assert tracker_of("none")(RunFolder(tmp_path, "")) is None
    with pytest.raises(FcEvalError, match="unknown tracking 'wandbb': did you mean 'wandb'"):
        tracker_of("wandbb")
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        assert main(["run", "model=tiny", "tp=2", f"tracking={name}", f"out={tmp_path / 'runs'}"]) == 2
        assert f"tracking={name} needs the package {name}, which is not installed: pip" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
