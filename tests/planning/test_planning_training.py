"""Memory of training steps and of serving by formulas, and the command."""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import GIB, LLAMA, training
from vishwamai import aot, planning
from vishwamai.cli import main
from vishwamai.core.errors import ConfigError, ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.core.target import devices_of
from vishwamai.models import ModelConfig
from vishwamai.planning.exchange import exchange_seconds
from vishwamai.planning.memory import analytic
from vishwamai.planning.memory.allocation import llama_like, training_config
from vishwamai.planning.memory.analytic import (
    CLASSES,
    described,
    exchanged_embedding,
    frozen_parameters,
    serving_memory,
    split_parameters,
    training_memory,
)
from vishwamai.planning.memory.residuals import residual_bytes
from vishwamai.planning.search.candidates import candidates
from vishwamai.planning.search.controller import REMAT, TARGET, optimize_memory_usage
from vishwamai.planning.search.plan import plan_training
from vishwamai.planning.serving import Serving, kv_bytes_per_token
from vishwamai.planning.time.speed import training_speed, training_time
from vishwamai.training.config import MeshSection
from vishwamai.training.config_file import from_dict, read_config
from vishwamai.training.program import training_step

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))


def test_residual_bytes_counts_what_the_gradient_needs_once():
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    assert residual_bytes(lambda x: jnp.sum(2 * x), x) == 0
    labels = jax.ShapeDtypeStruct((2**40,), jnp.int32)  # by its shape alone
    assert residual_bytes(lambda x, labels: jnp.sum(jnp.exp(x)) + labels[0], x, labels) == 128
    assert residual_bytes(lambda x: jnp.sum(x * x), x) == 0  # the argument is the caller's
    assert residual_bytes(lambda x: jnp.sum(jnp.exp(x)), x) == 128
    assert residual_bytes(lambda x: jnp.sum(jnp.exp(x) * jnp.exp(x).T.reshape(4, 8)), x) <= 3 * 128

    def loop(x):
        return jnp.sum(jax.lax.scan(lambda h, _: (jnp.sin(h), None), x, None, length=5)[0])

    assert residual_bytes(loop, x) == 5 * 128  # the cosine of every turn
    remat = jax.checkpoint(jnp.sin)
    scanned = lambda x: jnp.sum(jax.lax.scan(lambda h, _: (remat(h), None), x, None, length=5)[0])  # noqa: E731
    assert residual_bytes(scanned, x) == 640


def test_what_is_kept_within_a_layer_that_is_computed_again():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def unit(x):
        gate = x @ x
        return jnp.sum((jax.nn.silu(gate) * gate) @ x)

    # Gate, parts of its silu, and the product of both, which the second product takes. The compiler makes the parts
    # again from the gate.
    assert residual_bytes(unit, x) >= 4 * 256
    assert residual_bytes(unit, x, fused=True) == 2 * 256
    # Sine and cosine; the product takes the sine, moved.
    assert residual_bytes(lambda x: jnp.sum(jnp.sin(x).T @ x), x) == 2 * 256
    assert residual_bytes(lambda x: jnp.sum(jnp.sin(x).T @ x), x, fused=True) == 256


def test_residual_bytes_of_one_device():
    mesh, spec = jax.sharding.AbstractMesh((4,), ("x",)), jax.sharding.PartitionSpec("x")
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def fn(x):
        return jnp.sum(jnp.sin(jax.lax.all_gather(x, "x")))

    assert residual_bytes(fn, x, over=(mesh, (spec,))) == 4 * 8 * 4  # the cosine of all rows
    assert residual_bytes(lambda x: jnp.sum(jnp.sin(x)), x, over=(mesh, (spec,))) == 4 * 2 * 4


def benchmark(name):
    path = Path(__file__).parents[2] / "benchmarks" / "subjects" / "plans" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_steps_per_second_has_eight_devices_of_every_chip():
    module = benchmark("rates")
    assert {target.partition(":")[0] for target in module.SLICES} == set(TPUS)
    assert {devices_of(target) for target in module.SLICES} == {8} and module.ROWS == (8, 16, 32)
    row = module.result_row(16, planning.Measurement(0.25, "a CPU", "s"), "a CPU", 256)
    assert row == "| 16 | a CPU | 4 (measured) | 1.64e+04 | - |"


def test_the_table_of_tokens_per_second_has_every_chip():
    module = benchmark("rates")
    assert set(module.CHIPS) == set(TPUS) and module.LENGTHS == (512, 1024, 2048)
    config = module.model_of(module.EXAMPLE)
    assert (config.vocab_size, config.max_positions) == (4096, 2048)


FOREIGN = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies

devices = np.array(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)[::-1]
place = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("fsdp",)), jax.P("fsdp"))
rows, weight = (jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=place) for _ in range(2))
jax.jit(lambda x, w: x @ w, out_shardings=place).lower(rows, weight).compile()
"""


@pytest.mark.long
@needs_libtpu
def test_a_step_that_another_process_compiled_takes_the_time_of_the_same_step(tmp_path, monkeypatch):
    """A program in the place of MaxText's, and `step_time` of the same function."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = benchmark("maxtext")
    folder = tmp_path / "maxtext" / "trainers" / "pre_train"
    folder.mkdir(parents=True)
    for inside in (folder, *folder.parents[:2]):
        (inside / "__init__.py").touch()
    (folder / "train_compile.py").write_text(FOREIGN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(module.TOPOLOGIES, "v5e:2x2", "v5e-4")
    found, seconds = module.maxtext(sys.executable, "v5e:2x2", 2, {})
    place = jax.NamedSharding(aot.mesh_for("v5e:2x2", {"fsdp": 4}), jax.P("fsdp"))
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=place)
    here = planning.step_time(jax.jit(lambda x, w: x @ w, out_shardings=place), x, x, target="v5e:2x2")
    kept = ("arguments", "outputs", "temporaries")
    assert seconds > 0 and [found.memory.parts[n].value for n in kept] == [here.memory.parts[n].value for n in kept]
    assert found.step.value > 2 * 512 * 2048**2 / TPUS["v5e"].peak_per_device("bfloat16")
    assert found.step.value <= here.step.value * 1.001  # the shorter of two estimates


def test_published_steps_are_of_models_with_the_parameters_that_name_them():
    module = benchmark("published")
    for billions in (16, 32, 64):
        config = training_config(module.maxtext(billions), {}, "v5e", 1, 2048)
        size = sum(leaf.size for leaf in jax.tree.leaves(training_step(config).parts.params))
        assert size == pytest.approx(billions * 1e9, rel=0.05)
    row = next(row for row in module.ROWS if row.name == "MaxText 32B" and row.target == "v5p:4x4x4")
    # 328 TFLOP/s are 71.47 % of a v5p's 459.
    speed = training_speed(
        training_config(row.model, row.keys, row.target, row.rows * 64, row.length),
        row.target,
        planning.Estimate(row.seconds, "analytic", "s"),
    )
    assert speed.mfu.value == pytest.approx(0.7147, rel=1e-3)


def test_the_programs_of_the_accuracy_table():
    module = benchmark("memory")
    cases = module.CASES
    assert len(cases) == len({case.label for case in cases}) == 30
    assert {case.target.partition(":")[0] for case in cases} == set(TPUS)
    assert {*REMAT, "offload"} <= {case.keys.get("remat") for case in cases}
    for kind in ("dense", "MoE", "fp8", "served"):
        assert sum(case.name.startswith(kind) for case in cases) >= 3
    assert all(case.subject() is not None for case in cases)  # every configuration is one
    known = {
        "name": "v5e x",
        "probe": 90.0,
        "verified": 100.0,
        "analytic": 120.0,
        "errors": {"probe": -0.1, "analytic": 0.2},
    }
    probe, analytic = module.summary([known])
    assert (
        probe.startswith("probe: 1 of 1 within 10%") and "0 of 1 within 15%" in analytic and "v5e x +20.0%" in analytic
    )


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_the_plans_of_known_models_have_their_parameters(name, parameters):
    config = read_config(Path(__file__).parents[2] / "examples" / "plans" / f"{name}.yaml")
    assert sum(leaf.size for leaf in jax.tree.leaves(training_step(config).parts.params)) == parameters


def test_sums_of_microbatches_are_alive_when_they_are():
    one = training_memory(training(batch_size=64), "v5e")
    many = training_memory(training(batch_size=128, microbatches=2), "v5e")
    gradients = one.parts["gradients"].value
    # While a layer's gradient is computed, only the sum of the microbatches before takes more.
    assert many.total.value - one.total.value == pytest.approx(gradients)


@pytest.mark.turns(4)
def test_gradients_that_are_split_are_added_up_in_place():
    def found(microbatches):
        section = {"config": LLAMA | {"vocab_size": 65536}, "compute_dtype": "bfloat16"}  # its gradient is the peak
        keys = {"model": section, "batch_size": 4 * microbatches, "microbatches": microbatches}
        return training_memory(training(**keys, remat="full", mesh={"fsdp": 4}), "v5e:2x2")

    one, two = found(1), found(2)
    assert two.total.value - one.total.value == pytest.approx(one.parts["gradients"].value)


@pytest.mark.turns(3)
@needs_libtpu
def test_sums_of_microbatches_are_split_as_their_parameters_are():
    vocab, hidden, devices = 65536, 512, 16

    def probed(microbatches):
        section = {"config": LLAMA | {"vocab_size": vocab, "hidden_size": hidden}, "compute_dtype": "bfloat16"}
        keys = {"mesh": {"fsdp": devices}, "remat": "full", "microbatches": microbatches}
        config = training(**keys, model=section, batch_size=devices * microbatches)
        return plan_training(config, "v5e:4x4", verify=False).candidates[0].probe.value

    share = 2 * 4 * vocab * hidden // devices  # the float32 gradients of the embedding and the head
    # The compiler moved the sums over devices behind the loop, and every device kept both gradients whole: 65 MiB more.
    assert probed(2) - probed(1) < 3 * share


def test_what_is_offloaded_is_not_on_the_device_and_takes_time():
    def found(remat, target="v5e"):
        config = training(remat=remat)
        memory = training_memory(config, target)
        return memory.parts["activations"].value, training_time(config, target, memory).value

    kept, seconds = found("full")
    less, slower = found("offload")
    stream = 4 * 8 * 128 * 128 * 2  # layers, rows, tokens, features, bytes
    assert kept - less == stream
    moved = seconds + 2 * stream / 1.5e10 - 2 * stream / 819e9  # each way over PCIe, and not through HBM
    assert slower == pytest.approx(moved)
    assert found("offload", "tpu7x")[1] <= found("full", "tpu7x")[1]  # no source states its bandwidth


def test_exact_parts_of_a_training_step():
    config = training()
    step = training_step(config)
    count = sum(leaf.size for leaf in jax.tree.leaves(step.parts.params))
    found = training_memory(config, "v5e").parts
    assert tuple(found) == CLASSES and {part.level for part in found.values()} == {"analytic"}
    assert found["parameters"].value == found["gradients"].value == 4 * count
    assert 8 * count <= found["optimizer"].value < 8 * count + 64  # two moments and counters
    half = training_memory(training(mesh={"fsdp": 4}), "v5e:2x2").parts
    norms = 4 * 128 * (2 * 4 + 1)
    assert half["parameters"].value == (4 * count - norms) / 4 + norms


@pytest.mark.turns(3)
def test_adapters_scales_and_pairs_are_counted():
    plain = training_memory(training(), "v5e").parts
    found = training_memory(training(lora={"rank": 4, "targets": "/(gate|up)$"}), "v5e").parts
    adapters = 4 * 2 * 4 * (128 + 256)  # layers, weights, rank, rows and columns
    assert found["parameters"].value == plain["parameters"].value + 4 * adapters
    assert found["gradients"].value == 4 * adapters and 8 * adapters <= found["optimizer"].value < 8 * adapters + 64
    quantized = training_memory(training(lora={"rank": 4, "targets": "/(gate|up)$", "quantize": "int8"}), "v5e").parts
    weights, columns = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256), 4 * (128 + 64 + 64 + 128 + 256 + 256 + 128)
    assert found["parameters"].value - quantized["parameters"].value == 4 * weights - weights - 4 * columns

    scaled = training_memory(training(precision="fp8", fp8={"history": 16}), "v5e").parts
    products = 4 * 7
    assert scaled["optimizer"].value == plain["optimizer"].value + 4 * products * 3 * (16 + 1)
    assert scaled["gradients"].value == plain["gradients"].value

    step = training_step(training(objective="dpo"))
    assert step.batch(8)["reference"].shape == (8, 2) and "reference" not in training_step(training()).batch(8)
    assert training_memory(training(objective="dpo"), "v5e").parts["optimizer"] == plain["optimizer"]


def test_activations_follow_the_policy_and_the_rows():
    sizes = [training_memory(training(remat=remat), "v5e").parts["activations"].value for remat in REMAT]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0
    # `full` keeps the input of each layer, an array in bfloat16, and little else
    one = training_memory(training(layers=2, remat="full"), "v5e").parts["activations"].value
    assert sizes[-1] - one == 2 * (8 * 128 * 128 * 2)
    parts = training_memory(training(remat="full", microbatches=4), "v5e").parts
    assert parts["activations"].value == pytest.approx(sizes[-1] / 4)


def test_frozen_weights_are_split_and_gathered():
    """Below adapters, as without: a device has its part, and each microbatch gathers it."""
    adapting = {"lora": {"rank": 4, "targets": "query$"}, "batch_size": 8}
    one, four = (
        training_memory(training(mesh=mesh, **adapting), target).parts["parameters"].value
        for mesh, target in (({}, "v5e"), ({"fsdp": 4}, "v5e:2x2"))
    )
    assert one / 4 < four < one / 3  # norms are whole
    config = training(mesh={"fsdp": 4}, **adapting)
    trained, frozen = split_parameters(config), frozen_parameters(config)
    assert sum(trained.values()) < sum(frozen.values()) / 20
    times = [exchange_seconds(config, "v5e:2x2", described(config), trained, 0.0, below) for below in ({}, frozen)]
    assert times[1]["fsdp"] > 2 * times[0]["fsdp"] and times[1]["data"] == times[0]["data"]


@pytest.mark.parametrize(
    "keys, target, error, words",
    [
        ({"mesh": {"fsdp": 2}}, "v5e:2x2", ConfigError, "is 2 devices, but v5e:2x2 has 4"),
        ({"batch_size": 6, "mesh": {"fsdp": 4}}, "v5e:2x2", ConfigError, "batch_size=6 is not a multiple of 4 devices"),
        ({"microbatches": 3}, "v5e", ConfigError, "microbatches=3"),
        ({"lora": {"rank": 4}, "precision": "fp8"}, "v5e", UnsupportedError, "precision=fp8 trains all parameters"),
        ({"model": {}}, "v5e", ConfigError, "set either model.config"),
        ({"tokenizer": {"path": "nowhere"}}, "v5e", ConfigError, "tokenizer.path='nowhere'"),
    ],
)
def test_what_cannot_be_planned(keys, target, error, words):
    config = training(**keys)
    if "tokenizer" in keys:
        own = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, config=own))
    with pytest.raises(error, match=words):
        training_memory(config, target)


@pytest.mark.turns(5)
def test_experts_and_heads_of_a_mixture_take_their_share():
    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 8}
    config = training(mesh={"data": 8})
    described = dataclasses.replace(config.model, config=LLAMA | mixture | {"num_key_value_heads": 8})
    config = dataclasses.replace(config, model=described)

    def parts(**sizes):
        return training_memory(dataclasses.replace(config, mesh=MeshSection(**sizes)), "v5e:2x4").parts

    whole, split = parts(data=8), parts(data=2, expert=4)
    experts = 4 * 8 * 3 * 128 * 256 * 4  # layers, experts, weights, rows and columns, bytes
    assert whole["parameters"].value - split["parameters"].value == experts * 3 / 4
    found = split_parameters(dataclasses.replace(config, mesh=MeshSection(data=2, expert=4)))
    assert set(found) == {(), ("expert",)} and found["expert",] == experts / 4
    assert sum(found.values()) == split["parameters"].value
    norms = 4 * 128 * (2 * 4 + 1)
    assert split_parameters(dataclasses.replace(config, mesh=MeshSection(fsdp=8)))[()] == norms
    # Each device has room for what three others may send.
    assert split["activations"].value > 1.5 * whole["activations"].value
    # Few rows travel at once. Those of many travel in pieces, which are joined for the weights' gradient.
    wide = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, config=described.config | {"intermediate_size": 4096}),
        mesh=MeshSection(data=2, expert=4),
        batch_size=512,
    )
    rows = 512 // 8 * 128 * 2 * 4
    assert analytic._joined(config, "v5e:2x4", analytic.described(config)) == 0  # mesh.expert=1
    assert analytic._joined(wide, "v5e:2x4", analytic.described(wide)) == rows * (128 + 2 * 4096) * 2
    # What two sizes of mesh.expert, or of mesh.tensor, tell of a third is what its own trace says.
    traced = analytic._residuals_per_device(analytic._key(config), 1, 8, False)
    third = dataclasses.replace(config, mesh=MeshSection(expert=8))
    assert analytic._residuals(third) == pytest.approx(traced, rel=1e-4)
    key = analytic._key(config, remat="dots")
    fixed, row = analytic._residuals_per_device(key, 4, 1, False)
    config = dataclasses.replace(config, mesh=MeshSection(data=2, tensor=4), remat="dots")
    assert analytic._residuals(config) == (pytest.approx(fixed), pytest.approx(row))


def test_split_heads_and_rows_take_their_share():
    def parts(**mesh):
        return training_memory(training(layers=1, mesh=mesh), "v5e:2x2").parts

    whole, split, ring = parts(data=4), parts(data=2, tensor=2), parts(sequence=4)
    norms = 4 * 128 * 3
    assert split["parameters"].value == (whole["parameters"].value - norms) / 2 + norms
    rows = whole["activations"].value
    assert ring["activations"].value == rows
    # The residual stream is whole on each device, with the tokens of two.
    assert rows < split["activations"].value < 2 * rows
    found = list(candidates(training(batch_size=16, mesh={"tensor": 2}), "v5e:2x4"))
    assert all(c.mesh.tensor == 2 and c.mesh.data * c.mesh.fsdp == 4 for c in found)
    assert {c.microbatches for c in found} == {1, 2, 4}
    with pytest.raises(ConfigError, match=r"mesh\.tensor=3 does not divide the 8 devices"):
        list(candidates(training(mesh={"tensor": 3}), "v5e:2x4"))
    with pytest.raises(ConfigError, match=r"mesh\.tensor=8 does not divide the model's 4 query heads"):
        training_memory(training(mesh={"tensor": 8}), "v5e:2x4")


def test_serving_counts_pages_and_weights():
    config = ModelConfig.from_dict(LLAMA)
    serving = Serving(config, batch_size=3, length=100)
    each = kv_bytes_per_token(serving)
    assert each == 4 * 2 * 2 * 32 * 2  # layers, keys and values, heads, features, bytes
    found = serving_memory(serving, "v5e").parts
    assert found["kv"].value == 3 * 112 * each  # whole pages of 16 tokens
    assert found["gradients"].value == found["optimizer"].value == 0
    with pytest.raises(ShapeError, match="length is 257, but the model has 256 positions"):
        Serving(config, 1, 257)
    with pytest.raises(ShapeError, match="batch_size is 0"):
        Serving(config, 0, 8)


sizes = st.integers(1, 2**40)


@given(sizes, sizes, st.integers(1, 64), st.floats(0, 1))
def test_the_controller_keeps_the_batch_and_never_exceeds_its_target(current, peak, batch, share):
    fixed = int(peak * share)
    rows, found = optimize_memory_usage(current, peak, batch, fixed_memory=fixed)
    assert rows * found.microbatches == batch
    assert found.fits == (found.predicted <= TARGET * current)
    assert (rows, found) == optimize_memory_usage(current, peak, batch, fixed_memory=fixed)
    if not found.fits:
        assert (rows, found.remat) == (1, "full")
    if peak <= TARGET * current:
        assert (found.microbatches, found.remat) == (1, "none")


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_the_controller_is_monotone(a, b, peak, batch):
    less, more = sorted((a, b))
    (_, tight), (_, wide) = (optimize_memory_usage(m, peak, batch) for m in (less, more))
    assert (wide.microbatches, REMAT.index(wide.remat)) <= (tight.microbatches, REMAT.index(tight.remat))
    (_, small), (_, large) = (optimize_memory_usage(peak, m, batch) for m in (less, more))
    assert (small.microbatches, REMAT.index(small.remat)) <= (large.microbatches, REMAT.index(large.remat))


def test_the_controller_takes_and_gives_bytes_by_class():
    plan = {"parameters": 2 * GIB, "optimizer": 4 * GIB, "activations": 9 * GIB, "temporaries": 3 * GIB}
    plan |= {"total": 18 * GIB, "free": -2 * GIB}
    rows, found = optimize_memory_usage(plan, 18 * GIB, 8)
    _, same = optimize_memory_usage(16 * GIB, 18 * GIB, 8, fixed_memory=6 * GIB)
    assert (rows, found.remat, found.predicted) == (8, same.remat, same.predicted)
    assert found.fits and list(found) == list(plan) and found["total"] + found["free"] == 16 * GIB
    assert found["optimizer"] == 4 * GIB and found["activations"] == pytest.approx(3 * found["temporaries"], abs=2)
    assert found["total"] == pytest.approx(found.predicted, abs=4)
    with pytest.raises(ShapeError, match="has no 'free'"):
        optimize_memory_usage({"total": 1}, 1, 1)


def test_the_controller_goes_on_from_settings():
    _, first = optimize_memory_usage(10 * GIB, 40 * GIB, 8, fixed_memory=4 * GIB)
    rows, again = optimize_memory_usage(10 * GIB, int(first.predicted), 8, fixed_memory=4 * GIB, settings=first)
    assert (again.microbatches, again.remat) == (first.microbatches, first.remat) and rows == 8 // first.microbatches


@pytest.mark.parametrize(
    "arguments, keys, words",
    [
        ((0, 1, 1), {}, "`current_memory` is 0"),
        ((1, 0, 1), {}, "`peak_memory` is 0"),
        ((1, 1, 0), {}, "`batch_size` is 0"),
        ((1, 1, 1), {"fixed_memory": 2}, "`fixed_memory` is 2, but the peak is 1"),
        ((1, 1, 3), {"settings": planning.MemorySettings(2, "none", 1, True)}, "2 microbatches do not divide"),
        ((1, 1, 3), {"settings": planning.MemorySettings(1, "most", 1, True)}, "remat is 'most'"),
    ],
)
def test_what_the_controller_cannot_use(arguments, keys, words):
    with pytest.raises(ShapeError, match=words):
        optimize_memory_usage(*arguments, **keys)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["examples/train_stdlib.yaml"], "plan needs a target"),
        (["jax.numpy:sin", "--target", "v5e", "--report", "plan.html"], "--report is for training"),
        (["jax.numpy:sin", "--target", "v5e", "--price", "-1"], "--price is -1.0"),
        (["examples/train_stdlib.yaml", "--target", "h100"], "is a GPU"),
        (["examples/train_stdlib.yaml", "--target", "v5e:3x3"], "no slice of 3x3"),
        (["nothing", "--target", "v5e"], "'nothing' is not a CONFIG"),
        (["nothing.yaml", "--target", "v5e"], "cannot be read"),
        (["jax.numpy:sin", "--target", "v5e", "--search"], "--search is for training"),
        (["jax.numpy:sin", "steps=3", "--target", "v5e"], "'steps=3' changes a training configuration"),
        (["examples/train_stdlib.yaml", "--target", "v5e", "--args", "f32[8]"], "--args is for functions"),
        (["examples/train_stdlib.yaml", "--target", "v5e:2x2"], "is 1 device, but v5e:2x2 has 4"),
    ],
)
def test_the_command_says_what_is_wrong(capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@needs_libtpu
@pytest.mark.long
def test_the_command_plans_a_served_model_and_a_function(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["plan", str(tmp_path), "--target", "v5e", "--batch", "2", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["fits"] and plan["kv_capacity_tokens"] > 1e6 and 0 < plan["step_seconds"] < 0.01
    assert main(["plan", str(tmp_path), "--target", "v5e", "--batch", "2", "--no-verify", "--price", "1.2"]) == 0
    out = capsys.readouterr().out
    assert "USD per million tokens" in out and "ms a token" in out and max(map(len, out.splitlines())) <= 80
    assert main(["plan", "jax.numpy:sin", "--target", "v6e", "--args", "f32[1024,1024]"]) == 0
    assert "verified" in capsys.readouterr().out
    assert main(["plan", "jax.numpy:sin", "--target", "v5e", "--args", "f32[100000,100000]"]) == 1


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("remat", ["full", "none"])
def test_formulas_are_near_the_probe(remat):
    wide = LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "vocab_size": 32000}
    wide |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    config = from_dict(
        {
            "model": {"config": wide, "compute_dtype": "bfloat16"},
            "data": {"sequence_length": 2048},
            "mesh": {"fsdp": 4},
            "batch_size": 16,
            "remat": remat,
        }
    )
    plan = plan_training(config, "v5e:2x2", verify=False)
    (one,) = plan.candidates
    assert one.probe is not None and one.analytic.value == pytest.approx(one.probe.value, rel=0.25)


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    "keys, target",
    [
        ({"precision": "fp8", "remat": "full"}, "v5e"),
        ({"precision": "fp8", "remat": "none", "batch_size": 4}, "v5e"),
        ({"lora": {"rank": 16, "quantize": "int8"}, "remat": "full"}, "v5e"),
        ({"lora": {"rank": 16}, "mesh": {"fsdp": 4}}, "v5e:2x2"),
        ({"lora": {"rank": 16, "quantize": "int8"}, "mesh": {"fsdp": 2, "tensor": 2}}, "v5e:2x2"),
        ({"objective": "dpo", "remat": "full"}, "v5e"),
    ],
    ids=["fp8-full", "fp8-none", "qlora", "lora-fsdp", "qlora-tensor", "dpo"],
)
def test_formulas_of_scales_adapters_and_pairs_are_near_the_probe(keys, target, tmp_path):
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 32000}
    wide |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    start = {"start_from": str(tmp_path)} if keys.keys() & {"lora", "objective"} else {"config": wide}
    model = start | {"compute_dtype": "bfloat16"}
    config = from_dict({"model": model, "data": {"sequence_length": 2048}, "batch_size": 8, **keys})
    (one,) = plan_training(config, target, verify=False).candidates
    assert one.probe is not None and one.analytic.value == pytest.approx(one.probe.value, rel=0.25)


@pytest.mark.turns(3)
def test_an_embedding_whose_rows_are_exchanged_is_the_trained_one():
    config = training_config(llama_like(512, 512), {"mesh": {"fsdp": 4}}, "v5e:2x2", 8, 512)
    assert exchanged_embedding(config) == 32000 * 512 * 4 / 4
    adapters = training_config(llama_like(512, 512), {"mesh": {"fsdp": 4}, "lora": {"rank": 4}}, "v5e:2x2", 8, 512)
    assert exchanged_embedding(adapters) == 0.0 < training_time(adapters, "v5e:2x2").value
