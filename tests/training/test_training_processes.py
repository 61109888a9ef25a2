"""`vishwamai train` in several processes: the run of one process, stopped and resumed together."""

import functools
import json
import signal
import time

import numpy as np
import pytest
import yaml

from test_processes import finish, start
from test_training import LLAMA, small, small_values, tensors
from vishwamai.training.records import read_records
from vishwamai.training.run import train
from vishwamai.training.sharding import Layout


def values(folder, mesh):
    words = "the quick brown fox jumps over the lazy dog while five dozen liquor jugs were packed".split()
    order = np.random.default_rng(0)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(order.choice(words, 20))}) + "\n" for _ in range(200))
    )
    data = {"sources": [{"paths": [str(folder / "rows.jsonl")]}], "sequence_length": 16, "holdout": 0.3}
    # A schedule that does not depend on `steps`, which a resumed run changes.
    rate = {"learning_rate": 0.001, "schedule": "constant", "eps": 1e-4}
    changes = {"data": data, "optimizer": rate, "evaluation": {"every": 2, "batches": 2}, "mesh": mesh}
    return small_values(folder, batch_size=8, checkpoint={"every": 50}, **changes)


def command(folder, run, steps, *options):
    return ("-m", "vishwamai", "train", folder / "config.yaml", f"steps={steps}", "--output", folder / run, *options)


def alone(folder, steps, *options, run="one"):
    """The records of the run in one process, which has the devices of all: a process of its own, as the two are."""
    finish(start(1, *command(folder, run, steps, *options), devices=4))
    return read_records(folder / run / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        (2, {"fsdp": 4}),
        (2, {"sequence": 2, "tensor": 2}),
        (2, {"pipeline": 2, "fsdp": 2}),
        (2, {"pipeline": 2, "sequence": 2}),
        (4, {"fsdp": 4}),
        (4, {"pipeline": 2, "sequence": 2}),
    ],
    ids=str,
)
def test_several_processes_are_one_run(tmp_path, count, mesh):
    together = functools.partial(start, count, devices=4 // count)
    described = values(tmp_path, mesh)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(described))
    metrics = tmp_path / "all" / "metrics.jsonl"
    processes = together(*command(tmp_path, "all", 100_000))
    until = time.monotonic() + 150
    while len(read_records(metrics)) < 3 and time.monotonic() < until:
        assert all(one.poll() is None for one in processes), [one.communicate()[0] for one in processes]
        time.sleep(0.05)
    processes[-1].send_signal(signal.SIGTERM)  # the others have to hear of it
    texts = finish(processes, status=143)
    stopped = read_records(metrics)[-1].step
    assert f"Stopped at step {stopped} of 100000" in texts[0]
    assert not any(word in text for text in texts[1:] for word in ("step", "Stopped"))
    assert (tmp_path / "all" / "checkpoints" / str(stopped)).is_dir()

    texts = finish(together(*command(tmp_path, "all", stopped + 2, "--resume")))
    assert ["Done in" in text for text in texts] == [True] + [False] * (count - 1)
    assert (tmp_path / "all" / "report.html").exists()
    expected, found = alone(tmp_path, stopped + 2), read_records(metrics)
    assert [r.step for r in found] == [r.step for r in expected]
    for name in ("loss", "gradient_norm", "evaluation_loss"):
        one, other = ([getattr(r, name) for r in records if getattr(r, name)] for records in (found, expected))
        np.testing.assert_allclose(one, other, rtol=2e-6 if name == "loss" else 2e-5, err_msg=name)
    left, right = tensors(tmp_path / "one"), tensors(tmp_path / "all")
    for name in left:
        np.testing.assert_allclose(right[name], left[name], atol=2e-5, err_msg=name)

    # One process goes on from what several have written.
    after, whole = (alone(tmp_path, stopped + 3, "--resume", run=run)[-1] for run in ("all", "one"))
    assert after.step == whole.step == stopped + 3 and after.loss == pytest.approx(whole.loss, rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "lora"), [({"fsdp": 2, "sequence": 2}, {}), ({"fsdp": 4}, {"rank": 4, "quantize": "int4"})], ids=str
)
def test_two_processes_prefer_as_one(tmp_path, mesh, lora):
    """Preferences, and adapters of quantized weights: their reference, their steps and the merged model."""
    model = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    list(train(small(tmp_path, steps=1, model={"config": model}), tmp_path / "start"))
    begin = str(tmp_path / "start" / "model")
    lines = [
        {"prompt": f"the quick{'!' * (n % 3)}", "chosen": " brown fox", "rejected": " lazy dog."} for n in range(21)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    described = {
        "model": {"start_from": begin, "compute_dtype": "float32"},
        "tokenizer": {"path": begin},
        "data": {"sources": [{"paths": [str(tmp_path / "pairs.jsonl")]}], "sequence_length": 64},
        "optimizer": {"learning_rate": 0.003, "schedule": "constant", "eps": 1e-4},
        "objective": "dpo",
        "lora": lora,
        "mesh": mesh,
        "batch_size": 4,
        "steps": 3,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(described))
    texts = finish(start(2, *command(tmp_path, "two", 3)))
    assert "Done in" in texts[0]
    expected, found = alone(tmp_path, 3), read_records(tmp_path / "two" / "metrics.jsonl")
    for name in ("loss", "gradient_norm", "margin"):
        one, other = ([getattr(r, name) for r in records] for records in (found, expected))
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=name)
    references = [np.load(tmp_path / run / "data" / "reference-training-0.npy") for run in ("one", "two")]
    np.testing.assert_allclose(*references, rtol=2e-6)
    left, right = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for name in left:
        np.testing.assert_allclose(right[name], left[name], atol=2e-5, err_msg=name)


class Device:
    """A device of a process, as `Layout.reader` sees it."""

    def __init__(self, process_index):
        self.process_index = process_index


@pytest.mark.parametrize(
    ("shape", "processes", "reader"),
    [
        ((1, 2, 2, 1, 1, 1), (0, 0, 1, 1), (0, 2)),
        ((1, 2, 1, 1, 1, 2), (0, 0, 1, 1), (0, 2)),
        ((1, 1, 1, 1, 2, 2), (0, 0, 1, 1), (0, 1)),  # each process has a part of every row
        ((1, 2, 1, 1, 1, 4), (0, 0, 1, 1, 2, 2, 3, 3), (0, 2)),  # two processes share a row
        ((1, 2, 1, 1, 1, 3), (0, 0, 1, 1, 2, 2), (0, 1)),  # process 1 has parts of both
        ((2, 2, 1, 1, 1, 1), (0, 0, 1, 1), (0, 1)),  # each process is a stage, which has all rows
        ((2, 2, 1, 1, 1, 1), (0, 1, 0, 1), (0, 2)),  # each process has both stages of its rows
    ],
)
def test_processes_read_the_rows_that_their_devices_have(shape, processes, reader):
    from types import SimpleNamespace

    from vishwamai.training.sharding import ALL

    devices = np.array([Device(p) for p in processes]).reshape(shape)
    layout = Layout(SimpleNamespace(devices=devices, shape=dict(zip(ALL, shape))))  # pyright: ignore[reportArgumentType]
    assert layout.reader == reader
