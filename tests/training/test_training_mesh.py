"""Training over the mesh axes "tensor" and "sequence": the run on one device, whatever they split."""

import gc
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
from test_training import LLAMA, LOSSES, MIXTRAL, small, tensors
from vishwamai.core.errors import ConfigError
from vishwamai.training.gather import to_bfloat16
from vishwamai.training.job import make_job
from vishwamai.training.run import train

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
MODELS = {
    "llama": LLAMA,
    "one_layer": LLAMA | {"num_hidden_layers": 1},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8},
    "olmo2": LLAMA | {"model_type": "olmo2"},
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "gpt_oss": MIXTRAL | {"model_type": "gpt_oss", "head_dim": 8, "sliding_window": 8},
}


@pytest.fixture(autouse=True)
def narrow_lanes(monkeypatch):
    """The tables of these small models are used in parts, as those of large ones are."""
    monkeypatch.setattr("vishwamai.training.sharding.LANES", 8)


def settings(folder, model, /, **changes):
    """A run of 4 steps on packed documents: two of them in most rows."""
    words = "the quick brown fox jumps over the lazy dog while five dozen liquor jugs were packed".split()
    order = np.random.default_rng(0)
    for number in range(120):
        chosen = order.choice(words, order.integers(5, 30))
        (folder / f"document-{number}.txt").write_text(" ".join(chosen))
    sources = [{"paths": [str(folder / "document-*.txt")]}]
    common = {
        "model": {"config": MODELS[model]},
        "data": {"sources": sources, "sequence_length": 32, "packing": "best_fit", "holdout": 0.4},
        "evaluation": {"every": 2},
        # A large eps, so that Adam does not make rounding errors of gradients near 0 as large as other updates.
        "optimizer": {"learning_rate": 0.01, "eps": 1e-4},
        "steps": 4,
        "batch_size": 8,
    }
    return small(folder, **common | changes)


def assert_equal_runs(folder, one, other, records, spread):
    np.testing.assert_allclose([r.loss for r in spread], [r.loss for r in records], atol=2e-5)
    np.testing.assert_allclose([r.gradient_norm for r in spread], [r.gradient_norm for r in records], rtol=1e-4)
    if records[1].evaluation_loss is not None:
        assert spread[1].evaluation_loss == pytest.approx(records[1].evaluation_loss, abs=2e-5)
    left, right = tensors(folder / one), tensors(folder / other)
    for name in left:
        np.testing.assert_allclose(right[name], left[name], atol=2e-4, err_msg=name)


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        ("one_layer", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"steps": 2, "evaluation": {}}),
        *(
            pytest.param(model, mesh, changes, marks=pytest.mark.long)
            for model, mesh, changes in [
                ("llama", {"fsdp": 4, "tensor": 2}, {"remat": "full", "microbatches": 2}),
                ("llama", {"data": 2, "sequence": 4}, {"optimizer": {"name": "muon", "eps": 1e-4}}),
                ("gemma2", {"fsdp": 4, "tensor": 2}, {"optimizer": {"eps": 1e-4, "ema_decay": 0.5}}),
                ("gemma2", {"fsdp": 2, "sequence": 4}, {"loss": {"z_loss": 0.001}}),
                ("olmo2", {"fsdp": 4, "tensor": 2}, {}),
                ("mixtral", {"data": 2, "expert": 2, "tensor": 2}, {"loss": LOSSES}),
                ("mixtral", {"fsdp": 4, "sequence": 2}, {"loss": LOSSES}),
                ("deepseek", {"expert": 2, "sequence": 2, "tensor": 2}, {"loss": {"bias_rate": 0.01}}),
                ("gpt_oss", {"expert": 2, "sequence": 2, "tensor": 2}, {}),
            ]
        ),
    ],
)
def test_split_heads_and_rows_change_no_run(tmp_path, model, mesh, changes):
    alone = list(train(settings(tmp_path, model, **changes), tmp_path / "one"))
    spread = list(train(settings(tmp_path, model, **changes, mesh=mesh), tmp_path / "all"))
    assert_equal_runs(tmp_path, "one", "all", alone, spread)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("model", "tables"), [("one_layer", {"embed", "head"}), ("gemma2", {"embed"})])
def test_no_device_gathers_a_table(tmp_path, monkeypatch, model, tables):
    monkeypatch.setattr("vishwamai.ops.loss.gathered.PIECE_BYTES", 300 * 32 * 4 // 3)
    (tmp_path / "run").mkdir()
    job, state = make_job(settings(tmp_path, model, mesh={"fsdp": 4}), tmp_path / "run")
    assert job.layout.in_parts == tables
    batch = {name: jnp.zeros((8, 32), jnp.int32) for name in ("tokens", "labels", "positions", "segment_ids")}
    shapes = set(re.findall(r"f32\[([\d,]+)\]", str(jax.make_jaxpr(job.step)(state, batch))))
    vocab, features = state.params["embed"].shape
    assert {f"{vocab},{features // 4}", f"1,{vocab // 3},{features}"} <= shapes
    # The state has the whole shape outside of the `shard_map`, where each device holds its part.
    local = str(next(equations(jax.make_jaxpr(job.step)(state, batch).jaxpr, "shard_map")).params["jaxpr"])
    assert f"[{vocab},{features}]" not in local and f"[1,{vocab},{features}]" not in local


@pytest.mark.turns(6)
def test_gradients_are_added_up_in_the_dtype_that_is_set(tmp_path):
    """Those of the layers' matrices, but for the router's; the run is the same to the rounding of bfloat16."""
    found, records = {}, {}
    for dtype in ("float32", "bfloat16"):
        model = {"config": MODELS["mixtral"], "compute_dtype": "bfloat16", "reduce_dtype": dtype}
        config = settings(tmp_path, "mixtral", model=model, mesh={"fsdp": 4}, steps=2, evaluation={})
        (tmp_path / dtype).mkdir()
        job, state = make_job(config, tmp_path / dtype)
        batch = {name: jnp.zeros((8, 32), jnp.int32) for name in ("tokens", "labels", "positions", "segment_ids")}
        sums = equations(jax.make_jaxpr(job.step)(state, batch).jaxpr, "reduce_scatter")
        added = [one.invars[0].aval for one in sums]
        found[dtype] = {(math.prod(x.shape), x.dtype.name) for x in added}
        records[dtype] = list(train(config, tmp_path / f"{dtype} run"))
    layers = job.layout.specs(state.params)["layers"][0]
    router = math.prod(state.params["layers"][0]["router"].shape[-2:])
    assert "fsdp" in tuple(layers["router"]) and {dtype for _, dtype in found["float32"]} == {"float32"}
    assert {size for size, dtype in found["bfloat16"] if dtype == "float32"} <= {router, state.params["embed"].size}
    assert {size for size, _ in found["bfloat16"]} == {size for size, _ in found["float32"]}
    one, other = records.values()
    assert [r.loss for r in one] != [r.loss for r in other]
    np.testing.assert_allclose([r.loss for r in other], [r.loss for r in one], rtol=2e-3)
    np.testing.assert_allclose([r.gradient_norm for r in other], [r.gradient_norm for r in one], rtol=1e-2)


def test_rounding_by_bits_is_a_conversion():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    special = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 0.0, -0.0, 1e-40], np.float32)
    x = jnp.asarray(
        np.concatenate([bits.view(np.float32), np.array([0x7F800001], np.uint32).view(np.float32), special])
    )
    found, expected = jax.jit(to_bfloat16)(x), x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.turns(3)
@pytest.mark.parametrize(("mesh", "kept"), [({"fsdp": 4}, "bfloat16"), ({"fsdp": 2, "data": 2}, "float32")])
def test_gradients_stay_narrow_until_the_update(tmp_path, mesh, kept):
    """Where "fsdp" alone adds them up; what several axes add up is float32."""
    model = {"config": MODELS["one_layer"], "compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    config = settings(tmp_path, "one_layer", model=model, mesh=mesh)
    (tmp_path / "run").mkdir()
    job, state = make_job(config, tmp_path / "run")
    batch = {name: jnp.zeros((8, 32), jnp.int32) for name in ("tokens", "labels", "positions", "segment_ids")}
    step = next(equations(jax.make_jaxpr(job.step)(state, batch).jaxpr, "shard_map"))
    found = [x.aval.dtype.name for x in step.outvars if x.aval.ndim > 1]
    embedding = ["float32"]
    assert sorted(found) == sorted(embedding + [kept] * (sum(x.ndim > 1 for x in jax.tree.leaves(state.params)) - 1))


def equations(jaxpr, primitive):
    """Those of a primitive, of all programs inside, too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, primitive)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_8_bit_products_of_split_heads(tmp_path, scaling):
    changes = {"precision": "fp8", "fp8": {"scaling": scaling}}
    alone = [r.loss for r in train(settings(tmp_path, "llama", **changes), tmp_path / "one")]
    spread = [r.loss for r in train(settings(tmp_path, "llama", **changes, mesh={"tensor": 2}), tmp_path / "all")]
    # As `test_training_fp8`: sums in another order round to another neighbour of 8 bits here and there.
    assert spread[0] == pytest.approx(alone[0], abs=1e-3)
    np.testing.assert_allclose(spread, alone, atol=0.02)


@pytest.mark.long
def test_a_checkpoint_goes_to_other_axes(tmp_path):
    common = {"optimizer": {"eps": 1e-4, "schedule": "constant"}}  # a schedule would depend on `steps`
    alone = list(train(settings(tmp_path, "llama", **common, steps=6), tmp_path / "one"))
    records = []
    for steps, mesh in ((2, {"fsdp": 2, "sequence": 2, "tensor": 2}), (4, {"fsdp": 4}), (6, {"tensor": 2})):
        records += train(settings(tmp_path, "llama", **common, steps=steps, mesh=mesh), tmp_path / "run", resume=True)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert_equal_runs(tmp_path, "one", "run", alone, records)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"mesh": {"tensor": 3}}, ConfigError, r"mesh\.tensor=3 does not divide the model's 4 query heads; .* 1, 2\.$"),
        ({"mesh": {"tensor": 4}}, ConfigError, r"mesh\.tensor=4 does not divide the model's 2 kv heads"),
        (
            {"mesh": {"tensor": 2}, "model": {"config": LLAMA | {"vocab_size": 301}}},
            ConfigError,
            r"mesh\.tensor=2 does not divide the model's 301 entries in its vocab; .* or model\.config\.vocab_size=302",
        ),
        ({"mesh": {"expert": 2}}, ConfigError, r"mesh\.expert=2, but the model has no experts"),
        (
            {"mesh": {"sequence": 3}},
            ConfigError,
            r"data\.sequence_length=32 is not a multiple of 6, twice mesh\.sequence=3",
        ),
        (
            {"mesh": {"sequence": 4, "tensor": 4}},
            ConfigError,
            r"mesh\.sequence=4 times mesh\.tensor=4 needs 16 devices",
        ),
        ({"mesh": {"data": 3}}, ConfigError, r"batch_size=8 is not a multiple of 3 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_named(tmp_path, changes, error, text):
    with pytest.raises(error, match=text):
        next(train(settings(tmp_path, "llama", **changes), tmp_path / "run"))
    assert not (tmp_path / "run").exists()  # before data are read


def held() -> dict[Any, int]:
    """Bytes of live arrays on each device."""
    gc.collect()
    found = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for device in array.sharding.addressable_devices:
            found[device] += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return found


@pytest.mark.parametrize(
    ("begin", "mesh"),
    rotation.in_turn(
        3,
        [
            *((begin, mesh) for begin in ("new", "read") for mesh in ({"fsdp": 4}, {"pipeline": 2, "fsdp": 2})),
            *((begin, {"tensor": 2, "fsdp": 2}) for begin in ("new", "read, adapters", "read, dpo")),
        ],
    ),
    ids=str,
)
def test_no_device_holds_the_whole_model(tmp_path, begin, mesh):
    """A model need not fit one device: not where it is made or read, and not beside the state of the run."""
    changes: dict[str, Any] = {"batch_size": 4, "steps": 1, "model": {"config": LLAMA | {"vocab_size": 320}}}
    if begin != "new":
        list(train(small(tmp_path, **changes), tmp_path / "start"))
        start = str(tmp_path / "start" / "model")
        changes |= {"model": {"start_from": start}, "tokenizer": {"path": start}}
    if begin == "read, adapters":
        changes["lora"] = {"rank": 2}
    if begin == "read, dpo":
        line = json.dumps({"prompt": "the quick", "chosen": " brown fox", "rejected": " lazy dog."})
        (tmp_path / "pairs.jsonl").write_text(f"{line}\n" * 12)
        source = {"sources": [{"paths": [str(tmp_path / "pairs.jsonl")]}], "sequence_length": 32}
        changes |= {"data": source, "objective": "dpo"}
    config = small(tmp_path, mesh=mesh, **changes)
    (tmp_path / "run").mkdir()
    before = held()
    job, state = make_job(config, tmp_path / "run")
    first, second, third, fourth = (held()[device] - before[device] for device in jax.devices()[:4])
    assert min(first, second, third, fourth) > 0
    assert first <= second + 4096  # the numbers that every step takes, and none of the model's arrays
    del job, state
