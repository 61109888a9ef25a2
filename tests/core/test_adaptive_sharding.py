"""`shard(..., adaptive=True)`: whole, rows or columns for each weight, by planned and measured times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vishwamai import aot
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.parallel import AxisLinks, LogicalRules, adaptive_sharding, make_mesh, shard
from vishwamai.parallel.adaptive import choose, planned

AXES = {"up": ("embed", "mlp"), "gate": ("embed", "mlp"), "down": ("mlp", "embed"), "head": ("embed", "vocab")}
V5E = AxisLinks(TPUS["v5e"], (4,), (False,))
NO_RULES = LogicalRules({})


def _layer(embed, mlp, vocab=1000, odd=None):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layer = {"up": of(embed, mlp), "gate": of(embed, mlp), "down": of(mlp, embed), "head": of(embed, vocab)}
    return layer | {"norm": of(embed)} | ({} if odd is None else {"odd": of(*odd)})


def _mesh(sizes="data=2,tensor=4"):
    return make_mesh(sizes, devices=jax.devices()[:8])


def _planned(layer, rows, axes=AXES):
    return choose(layer, _mesh(), NO_RULES, axes, "tensor", planned(V5E, rows), "planned")


def test_large_weights_are_split_in_pairs_and_small_ones_stay_whole():
    """Megatron's split where it pays: one all-reduce for the pair. Small products are not worth a collective."""
    large = _planned(_layer(4096, 14336), 1024)
    assert [(c.path, c.kind) for c in large.choices] == [
        *(("down", "rows"), ("gate", "columns"), ("head", "whole"), ("up", "columns"))
    ]
    assert large.rules["mlp"] == ("tensor",) and large.rules["embed"] == () == large.rules["vocab"]
    assert large.shardings["down"].spec == P("tensor", None) and large.shardings["norm"].spec == P(None)
    assert "its parts go to down as they are" in str(large) and "takes the parts of gate, up" in str(large)
    small = _planned(_layer(64, 128), 1024)
    assert {c.kind for c in small.choices} == {"whole"}


def test_the_choice_is_the_cheapest_of_all():
    """Next to every choice of names, each summed by hand."""
    cost = planned(V5E, 256)
    layer = _layer(2048, 8192, 32000)
    plan = _planned(layer, 256)
    bf16, sums = jnp.dtype(jnp.bfloat16), {}
    for mlp in (False, True):
        for vocab in (False, True):
            up = cost((2048, 8192), bf16, "columns" if mlp else "whole", "")
            down = cost((8192, 2048), bf16, "rows" if mlp else "whole", "all_reduce" if mlp else "")
            head = cost((2048, 32000), bf16, "columns" if vocab else "whole", "all_gather" if vocab else "")
            sums[mlp, vocab] = 2 * up + down + head
    kinds = {c.path: c.kind for c in plan.choices}
    assert (kinds["up"] == "columns", kinds["head"] == "columns") == min(sums, key=sums.__getitem__)
    embed = cost((2048, 8192), bf16, "rows", "all_reduce")  # and the alternatives that each line names
    np.testing.assert_allclose(next(c for c in plan.choices if c.path == "up").seconds["rows"], embed)


def test_sides_that_the_axis_does_not_divide_and_arrays_without_names():
    plan = _planned(_layer(4096, 14336, odd=(8192, 30001)), 8)
    odd = next(c for c in plan.choices if c.path == "odd")
    assert odd.kind == "rows" and set(odd.seconds) == {"whole", "rows"}
    assert plan.shardings["odd"].spec == P("tensor", None)


def test_measured_times_choose_and_the_arrays_lie_so():
    """On this machine's own devices, whose times are real; the values stay."""
    rng = np.random.default_rng(0)
    weights = {"up": rng.standard_normal((64, 256)), "down": rng.standard_normal((256, 64)), "norm": np.ones(64)}
    weights = jax.tree.map(lambda x: x.astype(np.float32), weights)
    plan = adaptive_sharding(weights, _mesh(), axes=AXES, axis="tensor", rows=16)
    assert plan.cost == "measured" and all(min(c.seconds.values()) > 0 for c in plan.choices)
    placed = shard(weights, _mesh(), axes=AXES, adaptive=True, axis="tensor", rows=16)
    for name, array in placed.items():
        np.testing.assert_array_equal(array, weights[name])


def test_a_cost_of_ones_own_decides():
    def columns_are_free(shape, dtype, kind, collective):
        return 0.0 if kind == "columns" else 1.0

    plan = choose({"w": jnp.ones((8, 8))}, _mesh(), NO_RULES, {"w": ("a", "b")}, "tensor", columns_are_free, "planned")
    assert plan.shardings["w"].spec == P(None, "tensor")


def test_names_with_mesh_axes_keep_them():
    rules = LogicalRules({"embed": "data"})
    plan = choose(_layer(4096, 14336), _mesh(), rules, AXES, "tensor", planned(V5E, 1024), "planned")
    assert plan.shardings["up"].spec == P("data", "tensor") and plan.shardings["down"].spec == P("tensor", "data")


@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_a_described_slice_is_planned():
    plan = adaptive_sharding(_layer(4096, 14336), make_mesh("tensor=4", topology="v5e:2x2"), axes=AXES)
    assert plan.cost == "planned" and {c.kind for c in plan.choices} >= {"rows", "columns"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"axis": "model"}, "`axis` is 'model'; pass one of data, tensor"),
        ({"rows": 0}, "`rows` is 0"),
        ({"cost": "guessed"}, "`cost` is 'guessed'"),
        ({"rules": LogicalRules({"a": "data", "b": "tensor"})}, "use every axis"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ShapeError, match=words):
        adaptive_sharding({"w": jnp.ones((8, 8))}, _mesh(), **options)
    with pytest.raises(ShapeError, match="`rules` are missing"):
        shard({"w": jnp.ones((8, 8))}, _mesh())
    with pytest.raises(UnsupportedError, match="'planned', but"):
        adaptive_sharding({"w": jnp.ones((8, 8))}, _mesh(), cost="planned")
