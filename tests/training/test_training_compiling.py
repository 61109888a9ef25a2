"""Options with which a step is compiled for TPUs: defaults by chip, their check, and what a plan makes of them."""

from __future__ import annotations

import dataclasses

import pytest

from vishwamai import aot, planning
from vishwamai.core.errors import ConfigError, FallbackWarning
from vishwamai.core.hardware import TPUS
from vishwamai.planning.memory.allocation import training_config
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.training import trace_training
from vishwamai.training import compiling
from vishwamai.training.compiling import compiler_options
from vishwamai.training.config import TrainConfig

pytestmark = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")


@pytest.mark.turns(3)
@pytest.mark.parametrize(("chip", "sparse"), [("v4", False), ("v5e", False), ("v6e", True), ("tpu7x", True)])
def test_collectives_go_to_the_sparse_cores_of_chips_that_take_them(chip, sparse):
    found = compiler_options(TrainConfig(), TPUS[chip], 8)
    assert found.keys() == (compiling.ON_SPARSE_CORES.keys() if sparse else set())
    assert set(found.values()) <= {"true"}
    assert compiler_options(TrainConfig(), TPUS[chip], 1) == {}  # no collectives
    assert compiler_options(TrainConfig(), None, 8) == {}  # no TPU
    assert compiler_options(TrainConfig(compiler_options={}), TPUS[chip], 8) == {}


@pytest.mark.turns(4)
def test_options_of_a_run_are_checked():
    given = TrainConfig(compiler_options={"xla_tpu_scoped_vmem_limit_kib": 32768})
    assert compiler_options(given, TPUS["v6e"], 8) == {"xla_tpu_scoped_vmem_limit_kib": "32768"}
    with pytest.raises(ConfigError, match=r"compiler_options \(xla_tpu_scoped_vmem_limit_kib\) are for .* a TPU"):
        compiler_options(given, None, 8)
    with pytest.raises(ConfigError, match=r"no option 'xla_tpu_scoped_vmem_limit_kb'; near: xla_tpu_scoped_vmem_limit"):
        compiler_options(TrainConfig(compiler_options={"xla_tpu_scoped_vmem_limit_kb": 1}), TPUS["v6e"], 1)


@pytest.mark.turns(3)
def test_a_libtpu_without_the_options_compiles_without_them_and_says_so(monkeypatch):
    monkeypatch.setattr(compiling, "ON_SPARSE_CORES", {"xla_tpu_enable_sparse_core_collectives": True})
    with pytest.warns(FallbackWarning, match=r"without collectives on the SparseCores.* no option 'xla_tpu"):
        assert compiler_options(TrainConfig(), TPUS["v6e"], 8) == {}


@pytest.mark.long
def test_a_plan_compiles_with_them_and_counts_what_goes_on_behind_other_work():
    model = {"model_type": "llama", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4}
    keys = {"remat": "full", "mesh": {"fsdp": 4}}
    config = training_config(model | heads, keys, "v6e:2x2", 16, 1024)
    times = []
    for options in (None, {}):
        program = trace_training(dataclasses.replace(config, compiler_options=options), "v6e:2x2")
        with planning.Compiler() as compiler:
            _, found = time_program(compiler, program)
        assert found is not None
        times.append((program.fingerprint, found))
    (first, sparse), (second, plain) = times
    assert first != second
    assert plain.hidden.get("collectives", 0.0) == 0.0
    assert sparse.hidden["collectives"].value > 0.2 * plain.parts["collectives"].value
    assert sparse.parts["collectives"].value < 0.8 * plain.parts["collectives"].value
