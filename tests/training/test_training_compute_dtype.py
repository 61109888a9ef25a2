"""The default dtype of activations and products: bfloat16 where the chip has units for it, and kept on resumption."""

import json

import numpy as np
import pytest

from plans import LLAMA as PLANNED
from test_training import LLAMA, small_values
from vishwamai.cli import main
from vishwamai.core.config import ambient_target
from vishwamai.core.errors import ConfigError
from vishwamai.core.target import Target
from vishwamai.planning.memory.analytic import training_memory
from vishwamai.planning.search.batch import throughput_bound
from vishwamai.planning.time.speed import training_speed, training_time
from vishwamai.training.checks import check
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import from_dict, read_config
from vishwamai.training.program import program_on
from vishwamai.training.records import read_records

NARROW = ["v4", "v5e:2x2", "tpu7x", "sm_80", "a100", "h200", "sm_120", "mi300x", "cpu:avx512_bf16", "cpu:amx"]
WIDE = ["sm_70", "sm_75", "gfx906", "gfx1030", "cpu", "cpu:generic", "cpu:avx2", "cpu:avx512"]


def test_the_units_of_the_chip_decide():
    for dtype, names in (("bfloat16", NARROW), ("float32", WIDE)):
        assert {resolved(TrainConfig(), Target.parse(name)).model.compute_dtype for name in names} == {dtype}
    for dtype in ("float32", "bfloat16", "float16"):
        config = from_dict({"model": {"compute_dtype": dtype}})
        assert resolved(config, Target.parse("v5e")) == resolved(config, Target.parse("cpu:avx2")) == config
    here = ambient_target().multiplies_bfloat16
    assert resolved(TrainConfig()).model.compute_dtype == ("bfloat16" if here else "float32")


@pytest.mark.turns(6)
@pytest.mark.parametrize(("first", "second"), [("cpu:avx512_bf16", "cpu:avx2"), ("cpu:avx2", "cpu:avx512_bf16")])
def test_a_run_keeps_its_dtype_on_a_machine_with_other_units(tmp_path, monkeypatch, capsys, first, second):
    dtype = resolved(TrainConfig(), Target.parse(first)).model.compute_dtype
    model = {"config": LLAMA | {"num_hidden_layers": 1}}
    values = small_values(
        tmp_path, steps=2, checkpoint={"every": 1}, sample={"prompt": "the", "tokens": 2}, model=model
    )
    del values["model"]["compute_dtype"]
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    command = ["train", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run")]
    monkeypatch.setattr("vishwamai.training.compute_dtype.ambient_target", lambda: Target.parse(first))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert 0 <= out.find(f"computes in {dtype}") < out.find("step 1/2")
    monkeypatch.setattr("vishwamai.training.compute_dtype.ambient_target", lambda: Target.parse(second))
    assert main([*command, "--resume", "steps=3"]) == 0
    out = capsys.readouterr().out
    assert 0 <= out.find(f"computes in {dtype}") < out.find("step 3/3")
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [(r.step, r.compute_dtype) for r in records] == [(1, dtype), (2, dtype), (3, dtype)]
    assert f"<b>{dtype}</b><span>activations and products" in (tmp_path / "run" / "report.html").read_text()
    assert read_config(tmp_path / "run" / "config.yaml").model.compute_dtype == dtype
    changed = "float32" if dtype == "bfloat16" else "bfloat16"
    assert main([*command, "--resume", "steps=4", f"model.compute_dtype={changed}"]) == 2
    assert "resume: model differs from the run" in capsys.readouterr().err


@pytest.mark.turns(6)
def test_the_losses_of_both_dtypes_are_close_and_not_equal(tmp_path):
    """What a record says is what is computed."""
    from vishwamai.training.run import train

    model = {"config": LLAMA | {"num_hidden_layers": 1}}
    losses = {}
    for dtype in ("float32", "bfloat16"):
        values = small_values(tmp_path, steps=3, model=model | {"compute_dtype": dtype})
        losses[dtype] = [record.loss for record in train(from_dict(values), tmp_path / dtype)]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=1e-2)
    assert losses["bfloat16"] != losses["float32"]


def test_a_plan_is_of_bfloat16():
    keys = {"data": {"sequence_length": 128}, "batch_size": 8, "mesh": {"fsdp": 4}}
    config, explicit = (
        from_dict({"model": {"config": PLANNED, **dtype}, **keys}) for dtype in ({}, {"compute_dtype": "bfloat16"})
    )
    target = "v5e:2x2"
    assert training_memory(config, target) == training_memory(explicit, target)
    assert throughput_bound(config, target) == throughput_bound(explicit, target)
    step = training_time(config, target)
    assert step == training_time(explicit, target)
    assert training_speed(config, target, step).dtype == "bfloat16"
    parts = program_on(target, config).shapes.parts
    assert parts.merge(parts.params).dtype == "bfloat16"


def test_what_is_checked_is_what_is_computed(monkeypatch):
    model = {"reduce_dtype": "bfloat16", "config": LLAMA}
    config = from_dict({"model": model, "data": {"sources": [{"paths": ["x"]}]}})
    monkeypatch.setattr("vishwamai.training.compute_dtype.ambient_target", lambda: Target.parse("cpu:amx"))
    check(config)
    monkeypatch.setattr("vishwamai.training.compute_dtype.ambient_target", lambda: Target.parse("cpu:avx2"))
    with pytest.raises(ConfigError, match=r"compute_dtype=float32 multiplies them unrounded; set model\.compute_dtype"):
        check(config)
