"""Training over the mesh axis "pipeline": the run on one device, whatever the schedule and the other axes."""

import dataclasses
import gc
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rotation
from test_training import LLAMA, LOSSES, MIXTRAL, tensors
from test_training_mesh import DEEPSEEK, MODELS, settings
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.models import ModelConfig
from vishwamai.parallel.pipeline.generators import GENERATORS
from vishwamai.training.config import MeshSection, PipelineSection, TrainConfig
from vishwamai.training.fp8 import FP8Optimizer
from vishwamai.training.fp8_products import TENSORS
from vishwamai.training.pipeline.stages import Stages, make_stages
from vishwamai.training.records import read_records
from vishwamai.training.run import train
from vishwamai.training.sharding import make_layout
from vishwamai.training.step import initial_state

DEEP = LLAMA | {"num_hidden_layers": 4}
TIED = LLAMA | {"tie_word_embeddings": True}
CORRECTED = DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 0}
GPT_OSS = MODELS["gpt_oss"] | {"num_hidden_layers": 4}
GEMMA2 = DEEP | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8}


def described(model):
    return ModelConfig.from_dict(model | {"vocab_size": 300, "max_position_embeddings": 32}, "test")


def stages_of(model, stacked, *, stages=2, microbatches=4, params=None, config=None, **section) -> Stages:
    config = TrainConfig(microbatches=microbatches, batch_size=8) if config is None else config
    mesh, section = MeshSection(pipeline=stages), PipelineSection(**section)
    config = dataclasses.replace(config, mesh=mesh, pipeline=section)
    made = make_stages(config, described(model), {} if params is None else params, {"query": 2, "embed": 2}, stacked)
    assert made is not None
    return made


def assert_same_runs(folder, records, spread):
    """Tighter than what the other axes are held to: stages add up in the order of one device."""
    np.testing.assert_allclose([r.loss for r in spread], [r.loss for r in records], atol=5e-6)
    np.testing.assert_allclose([r.gradient_norm for r in spread], [r.gradient_norm for r in records], rtol=2e-5)
    if records[1].evaluation_loss is not None:
        assert spread[1].evaluation_loss == pytest.approx(records[1].evaluation_loss, abs=5e-6)
    one, other = tensors(folder / "one"), tensors(folder / "all")
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=5e-6, err_msg=name)


@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        *rotation.in_turn(
            2,
            [(TIED, {"pipeline": 2, axis: 2}, {"steps": 2, "microbatches": 2}) for axis in ("fsdp", "sequence")],
        ),
        *(
            pytest.param(model, mesh, {"microbatches": 4, "evaluation": {}} | changes, marks=pytest.mark.long)
            for model, mesh, changes in [
                (DEEP, {"pipeline": 2}, {"evaluation": {"every": 2}}),
                (DEEP, {"pipeline": 4}, {"microbatches": 8, "pipeline": {"schedule": "zb_h1"}}),
                (DEEP, {"pipeline": 2, "data": 2}, {"pipeline": {"schedule": "interleaved_1f1b"}}),
                (DEEP, {"pipeline": 2, "tensor": 2}, {"pipeline": {"schedule": "zb_v"}, "remat": "full"}),
                (DEEP, {"pipeline": 2}, {"pipeline": {"schedule": "dualpipe_v"}, "loss": {"z_loss": 0.001}}),
                (TIED, {"pipeline": 2, "tensor": 2}, {"pipeline": {"schedule": "gpipe"}}),
                (GEMMA2, {"pipeline": 2, "fsdp": 2}, {"optimizer": {"eps": 1e-4, "ema_decay": 0.5}}),
                (DEEP, {"pipeline": 2, "fsdp": 2}, {"optimizer": {"name": "muon", "eps": 1e-4}, "remat": "dots"}),
                (GEMMA2, {"pipeline": 2, "sequence": 2}, {"evaluation": {"every": 2}, "remat": "full"}),
                (DEEP, {"pipeline": 2, "sequence": 2, "fsdp": 2}, {"pipeline": {"schedule": "zb_v"}}),
                (DEEP, {"pipeline": 2, "sequence": 2, "tensor": 2}, {"pipeline": {"schedule": "zb_h1"}}),
                (MIXTRAL, {"pipeline": 2, "sequence": 2, "expert": 2}, {"loss": LOSSES}),
                (GPT_OSS, {"pipeline": 2, "sequence": 2}, {"loss": LOSSES}),
                (MIXTRAL, {"pipeline": 2}, {"loss": LOSSES}),
                (MIXTRAL, {"pipeline": 2, "expert": 2}, {"loss": LOSSES}),
                (MIXTRAL, {"pipeline": 2, "fsdp": 2, "tensor": 2}, {"loss": LOSSES, "remat": "full"}),
                (CORRECTED, {"pipeline": 2}, {"loss": {"bias_rate": 0.01}, "pipeline": {"schedule": "zb_v"}}),
            ]
        ),
    ],
)
def test_stages_change_no_run(tmp_path, model, mesh, changes):
    changes = changes | {"model": {"config": model}}
    # The losses of experts are those of a microbatch, whose rows depend on the axes that split the batch.
    others = {axis: size for axis, size in mesh.items() if axis != "pipeline"} if changes.get("loss") == LOSSES else {}
    alone = list(train(settings(tmp_path, "llama", **changes, mesh=others), tmp_path / "one"))
    spread = list(train(settings(tmp_path, "llama", **changes, mesh=mesh), tmp_path / "all"))
    assert_same_runs(tmp_path, alone, spread)
    if changes.get("loss") == LOSSES:
        for name in ("load_balance", "overload"):
            one, other = ([getattr(r, name) for r in records] for records in (alone, spread))
            np.testing.assert_allclose(other, one, rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        (DEEP, {"pipeline": 2, "fsdp": 2}, {}),
        (DEEP, {"pipeline": 2, "tensor": 2}, {"fp8": {"scaling": "current"}, "remat": "full"}),
        (DEEP, {"pipeline": 2}, {"fp8": {"scaling": "block"}, "pipeline": {"schedule": "zb_v"}}),
    ],
)
@pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")
def test_8_bit_products_go_through_stages(tmp_path, model, mesh, changes):
    changes = {"microbatches": 4, "evaluation": {}, "precision": "fp8"} | changes | {"model": {"config": model}}
    alone = [r.loss for r in train(settings(tmp_path, "llama", **changes), tmp_path / "one")]
    spread = [r.loss for r in train(settings(tmp_path, "llama", **changes, mesh=mesh), tmp_path / "all")]
    # As `test_training_fp8`: sums in another order round to another neighbour of 8 bits here and there.
    assert spread[0] == pytest.approx(alone[0], abs=1e-3)
    np.testing.assert_allclose(spread, alone, atol=0.02)
    # Scales of earlier steps are those of one device: resumed on one, the run goes on as it did.
    more = [r.loss for r in train(settings(tmp_path, "llama", **changes, steps=6), tmp_path / "all", resume=True)]
    assert [r.step for r in read_records(tmp_path / "all" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert max(more) < alone[0]


def test_scales_lie_with_the_layers_of_their_stage():
    layers = {i: {"query": jnp.full((2, 3), i, jnp.float32)} for i in range(4)}
    optimizer = FP8Optimizer(inner=optax.sgd(0.1), ranks={"query": 2})
    state = optimizer.init({"layers": layers})
    scales = {f"layers/{i}/query": {t: jnp.float32(i) for t in TENSORS} for i in range(4)}
    stages = stages_of(DEEP, False, schedule="zb_v")
    placed = stages.place(state._replace(scales=scales))
    assert placed.scales["layers/0/query"]["input"].tolist() == [0, 3, 1, 2]
    alone = optimizer.init(stages.place({"layers": layers}))
    assert jax.tree.map(jnp.shape, placed) == jax.tree.map(jnp.shape, alone)
    jax.tree.map(np.testing.assert_array_equal, stages.unplace(placed), state._replace(scales=scales))


def test_each_stage_stores_a_part_of_embedding_and_head():
    """Next to fsdp and tensor, which split their other axes or leave none."""
    from vishwamai.models import Decoder
    from vishwamai.training.model import split

    parts = split(nnx.eval_shape(lambda: Decoder(described(DEEP), rngs=nnx.Rngs(0), stacked=True)))
    for mesh, spec in (
        ({"pipeline": 2}, ("pipeline", None)),
        ({"pipeline": 2, "fsdp": 2}, ("fsdp", "pipeline")),
        ({"pipeline": 2, "tensor": 2}, ("tensor", "pipeline")),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, ("tensor", "fsdp")),
    ):
        layout = make_layout(MeshSection(**mesh), parts.params, parts.axes, 8, 1, model=parts.config)
        state = jax.eval_shape(lambda p: initial_state(p, optax.scale_by_adam()), parts.params)
        found = layout.specs(state)
        for tree in (found.params, found.optimizer.mu, found.optimizer.nu):
            assert tuple(tree["embed"]) == tuple(tree["head"]) == spec
            assert tree["norm"] == jax.P()


@pytest.mark.long
def test_a_checkpoint_goes_to_other_stages(tmp_path):
    common = {
        "model": {"config": DEEP},
        "optimizer": {"eps": 1e-4, "schedule": "constant"},  # a schedule would depend on `steps`
        "microbatches": 4,
        "evaluation": {},
    }
    alone = list(train(settings(tmp_path, "llama", **common, steps=6), tmp_path / "one"))
    records = []
    for steps, mesh, section in (
        (2, {"pipeline": 2}, {"schedule": "zb_v"}),
        (4, {"fsdp": 2}, {}),
        (6, {"pipeline": 4}, {}),
    ):
        config = settings(tmp_path, "llama", **common, steps=steps, mesh=mesh, pipeline=section)
        records += train(config, tmp_path / "all", resume=True)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert_same_runs(tmp_path, alone, records)


@pytest.mark.long
def test_a_resumed_run_holds_its_state_once(tmp_path):
    """The layers as the checkpoint has them are gone when the stages have theirs."""
    options = {"model": {"config": DEEP}, "microbatches": 4, "evaluation": {}, "mesh": {"pipeline": 2}}

    def held(steps, resume):
        gc.collect()
        before = sum(x.nbytes for x in jax.live_arrays())
        run = train(settings(tmp_path, "llama", **options, steps=steps), tmp_path / "run", resume=resume)
        next(run)
        gc.collect()
        found = sum(x.nbytes for x in jax.live_arrays()) - before
        list(run)
        return found

    assert 0 < held(1, False) == pytest.approx(held(3, True), rel=0.01)  # scalars differ


def test_layers_lie_where_the_schedule_has_them():
    """Of 8 layers and the V of 2 stages, stage 0 has the first and the last two."""
    layers = {i: {"query": jnp.full((2, 3), i, jnp.float32), "attention_norm": jnp.full(3, i)} for i in range(8)}
    params = {"embed": jnp.zeros((4, 3)), "layers": layers}
    state = initial_state(params, optax.scale_by_adam())
    stages = stages_of(LLAMA | {"num_hidden_layers": 8}, False, params=None, schedule="zb_v")
    placed = stages.place(state)
    assert placed.params["layers"][0]["query"][:, 0, 0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert placed.optimizer.mu["layers"][0]["attention_norm"].shape == (8, 3)
    back = stages.unplace(placed)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)

    stacked = dataclasses.replace(stages, stacked=True)
    usual = {"layers": {0: {"query": jnp.arange(8)}}}
    assert stacked.place(usual)["layers"][0]["query"].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert stacked.unplace(stacked.place(usual))["layers"][0]["query"].tolist() == list(range(8))
    assert dataclasses.replace(stages_of(DEEP, False), stacked=True).unchanged


def test_layers_of_a_period_stay_together():
    layers = {i: {"query": jnp.full((2, 3), i)} for i in range(4)}
    stages = stages_of(GEMMA2, False, stages=2)
    found = stages.place({"layers": layers})["layers"]
    assert [found[place]["query"][:, 0, 0].tolist() for place in (0, 1)] == [[0, 2], [1, 3]]
    jax.tree.map(np.testing.assert_array_equal, stages.unplace({"layers": found})["layers"], layers)


def test_the_config_has_the_names_of_all_schedules():
    kinds = typing.get_type_hints(PipelineSection)["schedule"]
    assert typing.get_args(kinds) == tuple(GENERATORS)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"mesh": {"sequence": 3}},
            ConfigError,
            r"sequence_length=32 is not a multiple of 3, mesh\.sequence: each dev",
        ),
        ({"mesh": {"sequence": 8}}, ConfigError, r"exchanges heads, .* the 4 of a device; .* to one of 1, 2, 4\.$"),
        ({"remat": "offload"}, UnsupportedError, r"set remat=full or mesh\.pipeline=1"),
        ({"batch_size": 3}, ConfigError, r"batch_size=3 is not a multiple of microbatches=4"),
    ],
)
def test_what_stages_do_not_compute_is_named(tmp_path, changes, error, text):
    changes = {"microbatches": 4} | changes | {"mesh": {"pipeline": 2} | changes.get("mesh", {})}
    with pytest.raises(error, match=text):
        next(train(settings(tmp_path, "llama", **changes), tmp_path / "run"))


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        (DEEPSEEK, {}, UnsupportedError, r"runs of 1 x 1, 1 x 1 layers; set mesh\.pipeline=1"),
        (DEEP, {"stages": 3}, ConfigError, r"3 parts, which do not divide its 4 layers; .* 1, 2, 4\.$"),
        (LLAMA, {"schedule": "zb_v"}, ConfigError, r"4 parts, .* one of 1, or a pipeline\.schedule with one part"),
        (GEMMA2, {"stages": 4}, ConfigError, r"do not divide its 2 periods of 2 layers; .* 1, 2\.$"),
        (DEEP, {"schedule": "dualpipe_v", "microbatches": 2}, ConfigError, r"with microbatches=2: "),
        (GEMMA2 | {"num_hidden_layers": 5}, {}, UnsupportedError, r"runs of 2 x 2, 1 x 1 layers"),
    ],
)
def test_a_model_that_does_not_divide_is_named(model, options, error, text):
    with pytest.raises(error, match=text):
        stages_of(model, True, **options)


def test_an_optimizer_that_tells_layers_apart_is_named():
    params = {"embed": jnp.zeros((4, 3)), "layers": {i: {"query": jnp.zeros((2, 3))} for i in range(4)}}

    def made(**optimizer):
        from vishwamai.training.config_file import from_dict

        config = from_dict({"optimizer": optimizer, "microbatches": 4, "batch_size": 8})
        return stages_of(DEEP, False, params=params, config=config)

    made(groups=[{"pattern": "layers/.*/query", "weight_decay": 0.0}])
    for group in ("layers/0/", "layers/[01]/"):
        with pytest.raises(UnsupportedError, match=r"optimizer\.groups tells layers apart .* at layers/0/query"):
            made(groups=[{"pattern": group, "learning_rate_scale": 0.0}])
    with pytest.raises(UnsupportedError, match=r"optimizer\.name=adafactor goes by the size of arrays"):
        made(name="adafactor")
    with pytest.raises(UnsupportedError, match=r"optimizer\.moment_dtype=int8 goes by the size of arrays"):
        made(moment_dtype="int8")
