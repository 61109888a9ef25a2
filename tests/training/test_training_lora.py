"""Adapters over several devices and on kept weights: the run on one device, on the plain weights."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rotation
import vishwamai
import world
from published import write
from test_training import LLAMA, MIXTRAL, small, tensors
from test_training_mesh import assert_equal_runs, settings
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.core.qtensor import QTensor
from vishwamai.models import Decoder, ModelConfig, from_pretrained, read_config, save_pretrained
from vishwamai.models.adapters import read_adapter
from vishwamai.models.checkpoint import quantized
from vishwamai.models.gguf import model_directory
from vishwamai.training.config import LoraSection, MeshSection
from vishwamai.training.job import make_job
from vishwamai.training.lora import initial_adapters
from vishwamai.training.model import split
from vishwamai.training.remat import activation_names
from vishwamai.training.run import train
from vishwamai.training.sharding import make_layout
from vishwamai.training.tokens import make_tokenizer

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 32}
EXPERTS = MIXTRAL | {k: v for k, v in WIDE.items() if k not in LLAMA or k in ("hidden_size", "intermediate_size")}

DEEP = WIDE | {"num_hidden_layers": 4}


def start(folder, model):
    save_pretrained(Decoder(ModelConfig.from_dict(model), rngs=nnx.Rngs(0)), folder / "start")
    make_tokenizer(small(folder)).save(str(folder / "start" / "tokenizer.json"))
    return str(folder / "start")


def adapting(folder, begin, /, mesh=None, **changes):
    """A run of adapters on the model in `begin`."""
    lora = {"rank": 4} | changes.pop("lora", {})
    optimizer = {"learning_rate": 0.02, "eps": 1e-4}
    common = {"model": {"start_from": begin}, "lora": lora, "optimizer": optimizer, "mesh": mesh or {}}
    return settings(folder, "llama", **common | changes)


@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        *rotation.in_turn(
            2,
            [
                (WIDE | {"num_hidden_layers": 1}, {"fsdp": 2, "tensor": 2}, {"lora": {"quantize": "int4"}, "steps": 2}),
                (WIDE, {"pipeline": 2, "fsdp": 2}, {"lora": {"quantize": "int8"}, "microbatches": 2, "steps": 2}),
            ],
        ),
        *(
            pytest.param(model, mesh, changes, marks=pytest.mark.long)
            for model, mesh, changes in [
                (WIDE, {"data": 2, "fsdp": 4}, {}),
                (WIDE, {"data": 2, "fsdp": 4}, {"lora": {"quantize": "int4"}, "remat": "full"}),
                (WIDE, {"fsdp": 2, "sequence": 2, "tensor": 2}, {"lora": {"quantize": "fp8"}, "microbatches": 2}),
                (WIDE, {"fsdp": 4, "tensor": 2}, {"lora": {"quantize": "int8", "targets": "query|down$"}}),
                (
                    WIDE,
                    {"tensor": 2},
                    {"optimizer": {"name": "muon", "learning_rate": 0.02, "eps": 1e-4, "ema_decay": 0.5}},
                ),
                (
                    EXPERTS,
                    {"expert": 2, "fsdp": 2, "tensor": 2},
                    {"lora": {"quantize": "int4", "targets": "query$|expert_"}, "loss": {"load_balance": 0.05}},
                ),
                (DEEP, {"pipeline": 4}, {"microbatches": 8, "pipeline": {"schedule": "zb_h1"}}),
                (
                    DEEP,
                    {"pipeline": 2, "tensor": 2},
                    {
                        "lora": {"quantize": "int4"},
                        "remat": "full",
                        "microbatches": 4,
                        "pipeline": {"schedule": "zb_v"},
                    },
                ),
                (
                    DEEP | {"tie_word_embeddings": True},
                    {"pipeline": 2, "fsdp": 2},
                    {
                        "lora": {"quantize": "fp8", "targets": "query|down$"},
                        "optimizer": {"learning_rate": 0.02, "eps": 1e-4, "ema_decay": 0.5},
                        "microbatches": 4,
                        "pipeline": {"schedule": "interleaved_1f1b"},
                    },
                ),
                (WIDE, {"pipeline": 2, "sequence": 2}, {"lora": {"quantize": "int8"}, "microbatches": 2}),
                (
                    EXPERTS,
                    {"pipeline": 2},
                    {"lora": {"targets": "query$|expert_"}, "loss": {"router_z_loss": 0.01}, "microbatches": 2},
                ),
            ]
        ),
    ],
)
def test_devices_change_no_adapters(tmp_path, model, mesh, changes):
    begin = start(tmp_path, model)
    alone = list(train(adapting(tmp_path, begin, **changes), tmp_path / "one"))
    spread = list(train(adapting(tmp_path, begin, mesh, **changes), tmp_path / "all"))
    assert alone[-1].loss < alone[0].loss
    assert_equal_runs(tmp_path, "one", "all", alone, spread)


@pytest.mark.long
def test_adapters_go_to_another_mesh(tmp_path):
    begin, rate = start(tmp_path, WIDE), {"learning_rate": 0.02, "eps": 1e-4, "schedule": "constant"}
    common = {"optimizer": rate, "evaluation": {}, "lora": {"quantize": "int8"}, "microbatches": 2}
    alone = list(train(adapting(tmp_path, begin, **common, steps=6), tmp_path / "one"))
    records = []
    for steps, mesh in ((2, {"fsdp": 2, "tensor": 2}), (4, {"pipeline": 2}), (6, {})):
        records += train(adapting(tmp_path, begin, mesh, **common, steps=steps), tmp_path / "run", resume=True)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert_equal_runs(tmp_path, "one", "run", alone, records)


def test_adapters_lie_where_their_weights_do(tmp_path):
    model = from_pretrained(start(tmp_path, WIDE), dtype="float32", stacked=True, quantize="int4")
    parts = split(model)
    mesh = MeshSection(fsdp=2, tensor=2)
    layout = make_layout(mesh, parts.params, parts.axes, 8, 1, model=parts.config)
    adapters = initial_adapters(LoraSection(rank=4), parts.params, jax.random.key(0), parts.ranks)
    found = {name: {part: tuple(spec) for part, spec in one.items()} for name, one in layout.specs(adapters).items()}
    # Stacked layers come first. Query has its heads in the columns, output and down have what is split in the rows.
    assert found["layers/0/query"] == {"down": (None, "fsdp", None), "up": (None, None, "tensor")}
    assert found["layers/0/output"] == {"down": (None, "tensor", None), "up": (None, None, "fsdp")}
    assert found["layers/0/down"] == {"down": (None, "tensor", None), "up": (None, None, "fsdp")}
    of_weights = layout.specs(parts.params)["layers"][0]
    assert tuple(of_weights["query"].values) == tuple(of_weights["query"].scales) == (None, "fsdp", "tensor")
    placed = layout.put(parts.params)["layers"][0]["down"]
    assert isinstance(placed, QTensor)
    assert placed.values.addressable_shards[0].data.shape == (2, 64, 32)  # of 128 rows and 64 columns
    assert placed.scales.addressable_shards[0].data.shape == (2, 2, 32)  # of 4 blocks of 32 rows


@pytest.mark.turns(4)
def test_stages_hold_their_layers_frozen_with_their_adapters(tmp_path):
    """On one device of two stages and two shards: half of the layers, and of each the half that "fsdp" leaves."""
    begin = start(tmp_path, DEEP)
    config = adapting(tmp_path, begin, {"pipeline": 2, "fsdp": 2}, lora={"quantize": "int8"}, microbatches=2)
    job, state = make_job(config, tmp_path / "run")
    frozen = job.frozen["layers"][0]["query"]
    assert isinstance(frozen, QTensor) and frozen.values.dtype == "int8"
    assert frozen.values.addressable_shards[0].data.shape == (2, 32, 64)  # of 4 layers of 64 x 64
    assert frozen.scales.addressable_shards[0].data.shape == (2, 1, 64)  # one for each column
    down, up = (state.params["layers/0/query"][part].addressable_shards[0].data for part in ("down", "up"))
    assert down.shape == (2, 32, 4) and up.shape == (2, 4, 64)
    of_optimizer = [x.shape for x in jax.tree.leaves(state.optimizer) if x.ndim]
    adapters = [x.shape for x in jax.tree.leaves(state.params)]
    assert sorted(of_optimizer) == sorted(2 * adapters)  # two moments, and none of a frozen weight


def test_the_names_of_activations_are_found_without_a_report_of_kernels():
    """The products of the trace do not run: in training the weights are dequantized."""
    config = ModelConfig.from_dict(WIDE)
    model = quantized(Decoder(config, rngs=nnx.Rngs(0)), "int4")
    with vishwamai.kernel_config(strict=True):
        with pytest.raises(UnsupportedError, match=r"(gemm|norm): 'native_cpu' declined"):
            jax.eval_shape(model, jax.ShapeDtypeStruct((1, 8), jnp.int32))
        found = activation_names(model)
    assert found == activation_names(Decoder(config, rngs=nnx.Rngs(0))) and "mixed" in found


@pytest.mark.long
@pytest.mark.parametrize("name", ["gptq-symmetric", "fp8", "compressed-tensors", "gptq"])
def test_kept_weights_train_as_the_plain_ones(tmp_path, name):
    """Next to the same adapters on the plain weights that the published numbers stand for."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 32}
    published, plain = write(name, tmp_path, **sizes)
    for folder in (published, plain):
        make_tokenizer(small(tmp_path)).save(str(folder / "tokenizer.json"))
    common = {"evaluation": {}, "steps": 2, "remat": "full"}
    alone = list(train(adapting(tmp_path, str(plain), **common), tmp_path / "plain-run"))
    keep = {"lora": {"quantize": "keep"}}
    mesh = {"fsdp": 2, "tensor": 2} if name != "fp8" else {"fsdp": 4}
    for run, devices in (("one", {}), ("all", mesh)):
        records = list(train(adapting(tmp_path, str(published), devices, **common, **keep), tmp_path / run))
        assert_equal_runs(tmp_path, "plain-run", run, alone, records)
    merged = from_pretrained(tmp_path / "one" / "model", dtype="float32")
    assert not any(isinstance(x, QTensor) for x in jax.tree.leaves(merged, is_leaf=lambda x: isinstance(x, QTensor)))
    before, after = tensors(tmp_path / "plain-run"), tensors(tmp_path / "one")
    assert before.keys() == after.keys()


def test_a_run_leaves_its_adapter_in_the_form_of_peft(tmp_path):
    begin = start(tmp_path, WIDE)
    list(train(adapting(tmp_path, begin, steps=1, evaluation={}), tmp_path / "run"))
    config = read_config(tmp_path / "run" / "model")
    base, merged = (from_pretrained(folder, dtype="float32") for folder in (begin, tmp_path / "run" / "model"))
    adapter = read_adapter(tmp_path / "run" / "adapter", config)
    assert len(adapter) == 7 * config.num_layers
    for (layer, name), (down, up) in adapter.items():
        before, after = (getattr(model.layers[layer], name).get_value() for model in (base, merged))
        assert jnp.abs(down @ up).max() > 0
        assert jnp.allclose(before + down @ up, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"lora": {"quantize": "keep"}},
            ConfigError,
            r"quantize=keep, but .* is not published quantized; .* int8, int4",
        ),
        (
            {"mesh": {"pipeline": 2}, "microbatches": 2, "lora": {"targets": "layers/0/.*|query$"}},
            UnsupportedError,
            r"lora\.targets=.* names query, key, value, output, gate, up, down in layer 0, and query in layer 1; write",
        ),
        (
            {"mesh": {"tensor": 2}, "lora": {"quantize": "int4"}},
            ConfigError,
            r"holds the 32 rows of output as int4 in blocks of 32 .* mesh\.tensor=2 cuts them into parts of 16; .*int8",
        ),
    ],
)
def test_what_adapters_do_not_do_is_named_before_the_data(tmp_path, changes, error, text):
    begin = start(tmp_path, WIDE | {"hidden_size": 32})
    with pytest.raises(error, match=text):
        next(train(adapting(tmp_path, begin, **changes), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_be_kept_are_named_before_the_data(tmp_path):
    sizes = {"vocab_size": 300, "max_position_embeddings": 32, "num_hidden_layers": 2}
    published, _ = write("gptq-desc-act", tmp_path / "a", **sizes)
    keep = {"lora": {"quantize": "keep"}, "evaluation": {}}
    with pytest.raises(UnsupportedError, match=r"rows of a weight .* are not neighbours"):
        next(train(adapting(tmp_path, str(published), **keep), tmp_path / "run"))
    from safetensors.numpy import load_file, save_file

    published, plain = write("compressed-tensors", tmp_path / "b", **sizes)
    name = "model.layers.1.mlp.up_proj.weight"
    ours = load_file(published / "model.safetensors") | {name: load_file(plain / "model.safetensors")[name]}
    del ours[f"{name}_scale"]
    save_file(ours, published / "model.safetensors")
    with pytest.raises(ConfigError, match=r"would stack up of layers that differ \(int8 in layer 0, a plain array in"):
        next(train(adapting(tmp_path, str(published), **keep, remat="full"), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_shifts_of_a_gguf_file_are_declined_before_the_data(tmp_path):
    start_from = str(model_directory(world.gguf(world.SMOLLM2_GGUF), weights=True))
    config = adapting(tmp_path, start_from, lora={"quantize": "keep"}, evaluation={})
    with pytest.raises(
        ConfigError, match=r"quantize=keep holds \w+ as int4 in blocks of 32 with shifts, which serving"
    ):
        next(train(config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
