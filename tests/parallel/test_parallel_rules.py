"""Logical rules: arrays laid out by the names of their axes, errors with the path, the table of what devices hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vishwamai import aot
from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.parallel import LogicalRules, explain_sharding, make_mesh, shard, shardings, validate_sharding

RULES = LogicalRules({"embed": "fsdp", "heads": "tensor", "vocab": None, "both": ("fsdp", "tensor")})
AXES = {"query": ("embed", "heads"), "norm": (None,), "odd/query": (None, "both")}


@pytest.fixture
def mesh():
    return make_mesh("fsdp=2,tensor=4")


def tree():
    layers = [{"query": np.arange(64.0).reshape(8, 8) + i, "norm": np.ones(8)} for i in range(2)]
    return {"layers": layers, "odd": {"query": np.ones((3, 16))}, "stack": {"query": np.ones((5, 8, 8))}, "step": 3}


def test_leaves_lie_as_their_names_say(mesh):
    placed = shard(tree(), mesh, RULES, AXES)
    jax.tree.map(np.testing.assert_array_equal, placed, tree())
    validate_sharding(placed["layers"][1]["query"], mesh, PartitionSpec("fsdp", "tensor"))
    validate_sharding(placed["stack"]["query"], mesh, PartitionSpec(None, "fsdp", "tensor"))
    validate_sharding(placed["odd"]["query"], mesh, PartitionSpec(None, ("fsdp", "tensor")))
    assert placed["layers"][0]["query"].addressable_shards[0].data.shape == (4, 2)
    assert placed["step"].sharding.is_fully_replicated
    out = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), out_shardings=shardings(tree(), mesh, RULES, AXES))(
        tree()
    )
    assert out["layers"][0]["query"].sharding == placed["layers"][0]["query"].sharding


def test_a_decoder_knows_its_axes(mesh):
    nnx = pytest.importorskip("flax.nnx")
    from vishwamai.models import Decoder, ModelConfig

    values = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = ModelConfig.from_dict({**values, **sizes, "max_position_embeddings": 32})
    rules = LogicalRules({"vocab": "tensor", "embed": "fsdp", "heads": "tensor", "kv_heads": None, "mlp": "tensor"})

    def made(stacked):
        return Decoder(config, rngs=nnx.Rngs(0), stacked=stacked)

    for stacked in (False, True):
        model = nnx.eval_shape(functools.partial(made, stacked))
        placed = shard(model, mesh, rules)
        assert type(placed) is Decoder
        layer = placed.layers[0].arrays()
        assert tuple(layer["query"].sharding.spec)[-2:] == ("fsdp", "tensor")
        assert tuple(layer["output"].sharding.spec)[-2:] == ("tensor", "fsdp")
        assert layer["key"].sharding.shard_shape(layer["key"].shape)[-1] == layer["key"].shape[-1]
    with pytest.raises(ShapeError, match=r"layers/0/key has an axis named 'kv_heads'.*add \"kv_heads\": None"):
        shard(model, mesh, LogicalRules({k: v for k, v in rules.items() if k != "kv_heads"}))


@pytest.mark.parametrize(
    ("names", "shape", "text"),
    [
        (("embed", "head"), (8, 8), "a/w has an axis named 'head', but the rules have embed, .*add \"head\": None"),
        (
            ("embed", "embed"),
            (8, 8),
            "a/w has axes named 'embed' and 'embed', .*by the mesh axis 'fsdp'; map one",
        ),
        (("embed", "both"), (8, 8), "a/w has axes named 'embed' and 'both', .*split by the mesh axis 'fsdp'; map one"),
        (("embed", "heads"), (8, 6), r"a/w has 6 along axis 1 \('heads'\), which tensor=4 does not divide; .* 3 or 2"),
        (("both",), (3, 12), r"a/w has 12 along axis 1 \('both'\), which fsdp=2 x tensor=4 does not divide"),
        (("embed",) * 3, (8, 8), r"a/w has 2 axes \(shape \(8, 8\)\), but 3 names"),
        ("embed", (8,), "the names of a/w are 'embed', of type str; pass a tuple"),
    ],
)
def test_what_does_not_fit_is_named(names, shape, text, mesh):
    with pytest.raises(ShapeError, match=text):
        shard({"a": {"w": np.ones(shape)}}, mesh, RULES, {"w": names})


def test_other_errors_name_the_fix(mesh):
    with pytest.raises(ShapeError, match=r'a/w of shape \(8, 8\) has no names; pass `axes={"w": \(name, name\)}`'):
        shard({"a": {"w": np.ones((8, 8))}}, mesh, RULES, {"v": ("embed",)})
    with pytest.raises(ShapeError, match=r"map 'embed' .axis 0 of w. to 'data', but the mesh's axes are fsdp"):
        shard({"w": np.ones(8)}, mesh, LogicalRules({"embed": "data"}), {"w": ("embed",)})
    for rules, text in [
        ({"embed": ("fsdp", "fsdp")}, "name every mesh axis once"),
        ({"embed": 3}, "map 'embed' to 3"),
        ({3: "fsdp"}, "map 3 to 'fsdp'"),
        ("embed", "`rules` is 'embed', of type str; pass a dict"),
    ]:
        with pytest.raises(ShapeError, match=text):
            LogicalRules(rules)
    with pytest.raises(KernelError, match="splits by 'model'"):
        validate_sharding(
            jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec())), mesh, PartitionSpec("model")
        )
    assert LogicalRules({"a": "b"}) == LogicalRules({"a": ("b",)}) != RULES
    assert len({LogicalRules({"a": "b"}), LogicalRules({"a": ("b",)}), RULES}) == 2


def test_the_table_counts_what_devices_hold(mesh):
    table = explain_sharding(shard(tree(), mesh, RULES, AXES))
    rows = {row.path: row for row in table.rows}
    query = rows["layers/*/query"]
    assert (query.count, query.bytes_per_device, query.copies, query.padding) == (2, 2 * 4 * 2 * 4, 1, 0)
    norm = rows["layers/*/norm"]
    assert (norm.copies, norm.bytes_per_device, norm.split) == (8, 2 * 8 * 4, "-")
    assert rows["odd/query"].split == "-, fsdp+tensor"
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(shard(tree(), mesh, RULES, AXES)))
    assert table.bytes_per_device == held
    assert table.replicated == norm.bytes_per_device + rows["step"].bytes_per_device
    long = shard({"a name " * 20: np.ones((8, 8))}, mesh, RULES, {"a name " * 20: ("embed", None)})
    for text in (str(table), str(explain_sharding(long))):
        assert max(map(len, text.splitlines())) <= 80
    assert "layers/*/query x2" in str(table) and "on each of 8 devices" in str(table)
    with pytest.raises(ShapeError, match="w is an array of NumPy|w is .*without a sharding"):
        explain_sharding({"w": np.ones(3)})


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_padding_is_that_of_the_compiler():
    """The table of arrays for a slice that is not there, against the bytes of the compiled program's arguments."""
    mesh = make_mesh("fsdp=2,tensor=2", topology="v5e:2x2")
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [((100, 100), "float32"), ((3, 128), "float32"), ((100, 64), "bfloat16"), ((1000,), "float32")]
    for shape, dtype in [*shapes, ((5, 3, 7), "int8"), ((2048, 16), "bfloat16")]:
        array = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        memory = jax.jit(lambda x: x + 1).lower(array).compile().memory_analysis()
        assert memory is not None
        assert explain_sharding(array).bytes_per_device == memory.argument_size_in_bytes, shape
    shapes = {"query": jax.ShapeDtypeStruct((256, 100), jnp.bfloat16)}
    table = explain_sharding(shard(shapes, mesh, RULES, AXES))
    assert (table.padding, table.bytes_per_device) == (128 * (64 - 50) * 2, 128 * 64 * 2)
