"""The numbers of a run in TensorBoard, wandb and trackio, by the real packages and without network."""

import importlib.util
import json

import pytest

from vishwamai.core.errors import ConfigError
from vishwamai.training import tracking
from vishwamai.training.config_file import from_dict
from vishwamai.training.records import Record, RecordFiles

RECORDS = [Record(step, 10.0 / step, 64 * step, 100.0, 1.0, 0.1, 0, 2**20, 1.0, 1.0) for step in (1, 2, 3)]


def written(folder, trackers, records=RECORDS, last=0):
    config = from_dict({"log": {"trackers": trackers, "project": "tests"}})
    with RecordFiles(folder, last, tracking.open_trackers(config, folder, last)) as files:
        for record in records:
            files.write(record)


def test_trackio_has_the_numbers(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    import trackio.utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in (trackio.utils, importlib.import_module("trackio.sqlite_storage")):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    written(tmp_path, ["trackio"])
    written(tmp_path, ["trackio"], [RECORDS[2]], last=2)
    logs = SQLiteStorage.get_logs("tests", tmp_path.name)
    assert [(row["step"], row["loss"]) for row in logs][:3] == [(1, 10.0), (2, 5.0), (3, pytest.approx(10 / 3))]
    assert "memory" in logs[0] and "evaluation_loss" not in logs[0]


@pytest.mark.long
def test_wandb_writes_without_network_and_goes_on_with_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    written(tmp_path, ["wandb"], RECORDS[:2])
    written(tmp_path, ["wandb"], [RECORDS[2]], last=2)
    (name,) = json.loads((tmp_path / tracking._IDS).read_text()).values()
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    content = b"".join(file.read_bytes() for file in files)
    assert files and b"loss" in content and b"tests" in content and b"learning_rate" in content


def test_wandb_gets_one_run_and_every_step(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    calls = []

    class Run:
        def define_metric(self, *names, **options):
            calls.append(("metric", names, options))

        def log(self, numbers):
            calls.append(("log", numbers["step"], numbers["loss"]))

        def finish(self):
            calls.append(("finish",))

    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(("init", options)) or Run())
    written(tmp_path, ["wandb"], RECORDS[:1])
    written(tmp_path, ["wandb"], RECORDS[1:], last=1)
    starts = [call[1] for call in calls if call[0] == "init"]
    assert starts[0]["id"] == starts[1]["id"] and {options["resume"] for options in starts} == {"allow"}
    assert starts[0]["project"] == "tests" and starts[0]["config"]["steps"] == 1000
    assert [call[1] for call in calls if call[0] == "log"] == [1, 2, 3] and calls[-1] == ("finish",)


def test_tensorboard_has_two_spellings():
    for values in (
        {"tensorboard": True},
        {"trackers": ["tensorboard"]},
        {"tensorboard": True, "trackers": ["tensorboard"]},
    ):
        assert tracking.trackers_of(from_dict({"log": values})) == ("tensorboard",)
    with pytest.raises(ConfigError, match="log.trackers.0 is 'mlflow'"):
        from_dict({"log": {"trackers": ["mlflow"]}})


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    with pytest.raises(ConfigError, match=r"log\.trackers has wandb, which needs the package wandb: .*\[track\]"):
        tracking.check_trackers(from_dict({"log": {"trackers": ["wandb"]}}))
