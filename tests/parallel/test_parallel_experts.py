"""Grouped products with their all-to-all, in pieces and plain, are those of one device, forward and backward."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rotation
from test_parallel_products import compare
from vishwamai import aot, explain, moe_layer, quantize
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.parallel import (
    AxisLinks,
    all_to_all_grouped_gemm,
    estimate_collective,
    estimate_exchange,
    grouped_gemm_all_to_all,
    make_mesh,
)

SPLIT = P("expert")
LOCAL, ROOM, FEATURES, COLUMNS = 3, 9, 12, 10


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def loads(devices, seed=0):
    """`[from, to, experts]`: uneven rows; the second device gets none, the last has none, one buffer is full of one
    expert's.
    """
    found = np.random.default_rng(seed).integers(0, ROOM // LOCAL + 1, (devices, devices, LOCAL))
    found[:, 1 % devices] = found[-1] = 0
    found[0, 0] = (0, ROOM, 0)
    return jnp.asarray(found, jnp.int32)


def operands(devices, dtype=jnp.float32, bias=True):
    """(rows, experts, bias) of all devices. What is behind the rows of a buffer is not a number."""
    used = np.arange(ROOM) < np.asarray(loads(devices)).sum(2)[..., None]
    rows = jnp.where(used[..., None], normal(0, devices, devices, ROOM, FEATURES, dtype=dtype), jnp.nan)
    experts = normal(1, devices * LOCAL, FEATURES, COLUMNS, dtype=dtype)
    return rows, experts, *[normal(2, devices * LOCAL, COLUMNS, dtype=dtype)][:bias]


def mapped(function, devices, arrays):
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def local(rows, sizes, *weights):
        return function(rows[0], sizes[0], *weights)[None]

    return jax.shard_map(local, mesh=mesh, in_specs=(SPLIT,) * len(arrays), out_specs=SPLIT)(*arrays)


def there(devices, **options):
    """The products `[to, from, room, columns]` of rows `[from, to, room, features]`."""

    def run(rows, sizes, experts, bias=None):
        return all_to_all_grouped_gemm(rows, experts, sizes, bias=bias, axis="expert", **options)[0]

    return lambda rows, *weights: mapped(run, devices, (rows, loads(devices), *weights))


def back(devices, **options):
    """The same products `[from, to, room, columns]`, of the rows where their experts are."""

    def run(rows, sizes, experts, bias=None):
        return grouped_gemm_all_to_all(rows, experts, sizes, bias=bias, axis="expert", **options)

    sizes = loads(devices).swapaxes(0, 1)
    return lambda rows, *weights: mapped(run, devices, (rows.swapaxes(0, 1), sizes, *weights))


def one_device(devices, swapped):
    """Each row by the matrix of its expert."""
    sizes = loads(devices)
    expert = jnp.sum(jnp.cumsum(sizes, 2)[:, :, None] <= jnp.arange(ROOM)[:, None], axis=3)  # [from, to, room]
    to = jnp.arange(devices)[:, None]
    at, used = jnp.minimum(to * LOCAL + expert, devices * LOCAL - 1), (expert < LOCAL)[..., None]

    def run(rows, experts, bias=None):
        out = jnp.einsum("ijrk,ijrkn->ijrn", jnp.where(used, rows, 0), experts[at], precision="highest")
        out = jnp.where(used, out if bias is None else out + bias[at], 0)
        return out.swapaxes(0, 1) if swapped else out

    return run


CASES = [(way, devices, bias) for devices, bias in ((8, True), (5, False), (2, True)) for way in ("there", "back")]
WAYS = {"there": there, "back": back}


@pytest.mark.parametrize("case", [pytest.param(c, marks=rotation.one_in(6, i)) for i, c in enumerate(CASES)], ids=str)
def test_pieces_are_one_device(case):
    """Of even and odd numbers of devices, with groups and devices that have no rows."""
    way, devices, bias = case
    compare(WAYS[way](devices, overlap=True), one_device(devices, way == "there"), operands(devices, bias=bias))


@pytest.mark.parametrize("way", [pytest.param(w, marks=rotation.one_in(2, i)) for i, w in enumerate(WAYS)])
def test_the_plain_form_is_one_device(way):
    compare(WAYS[way](4, overlap=False), one_device(4, way == "there"), operands(4))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_bfloat16_and_other_results(way, implementation):
    """The gradient of the weights is one sum of the rows of all pieces, as in the plain form."""
    run, arrays = functools.partial(WAYS[way], 4, implementation=implementation), operands(4, jnp.bfloat16)
    compare(run(overlap=True), run(overlap=False), arrays, tolerance=1e-2)
    compare(run(overlap=True, out_dtype="float32"), run(overlap=False, out_dtype="float32"), arrays, tolerance=1e-2)


def test_what_travels():
    """A piece for each other device goes straight there, and no all-to-all but that of the sizes."""
    arrays = operands(8)
    text = str(jax.make_jaxpr(there(8, overlap=True))(*arrays))
    assert text.count("ppermute[") == 7 and text.count("all_to_all[") == 1
    text = str(jax.make_jaxpr(back(8, overlap=True))(*arrays))
    assert text.count("ppermute[") == 7 and "all_to_all[" not in text
    assert "ppermute[" not in str(jax.make_jaxpr(there(8))(*arrays))  # not TPUs


@pytest.mark.long
def test_a_second_derivative():
    rows, experts = operands(2, bias=False)

    def slope(overlap):
        def total(rows):
            return jnp.sum(there(2, overlap=overlap)(rows, experts) ** 3)

        return jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(total)(x) ** 2)), rows)

    assert slope(False).shape == rows.shape
    with pytest.raises(UnsupportedError, match="differentiable once.*overlap=False"):
        slope(True)


def layer(devices, experts_of=lambda x: x, **options):
    """`moe_layer` of 6 features over so many devices, two experts on each."""
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def local(tokens, router, *weights):
        gate, up, down = map(experts_of, weights)
        return moe_layer(tokens, router, gate, up, down, expert_axis="expert", **options).out

    return jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, P(), SPLIT, SPLIT, SPLIT), out_specs=SPLIT)


def layer_over_two(outer, inner, **options):
    """The same over the axes (slice, expert)."""
    axes, split = ("slice", "expert"), P(("slice", "expert"))
    mesh = jax.make_mesh((outer, inner), axes, (AxisType.Auto,) * 2, devices=jax.devices()[: outer * inner])

    def local(*arrays):
        return moe_layer(*arrays, expert_axis=axes, **options).out

    return jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split, split, split), out_specs=split)


def shapes_of_layer(devices):
    return (16 * devices, 8), (8, 2 * devices), *[(2 * devices, 8, 16)] * 2, (2 * devices, 16, 8)


def of_layer(devices):
    return [normal(i, *shape) for i, shape in enumerate(shapes_of_layer(devices))]


@pytest.mark.long
@pytest.mark.parametrize("options", [{"exchange_factor": 0.6}, {"capacity_factor": 0.8}], ids=str)
def test_a_layer_that_drops(options):
    """The same choices are dropped, and what is kept is the same."""
    compare(layer(4, overlap=True, **options), layer(4, overlap=False, **options), of_layer(4))
    compare(layer_over_two(2, 2, overlap=True, **options), layer_over_two(2, 2, overlap=False, **options), of_layer(4))


def test_pieces_between_slices():
    """Within a slice, rows are exchanged as they are; over the outer axis, pieces go there and back."""
    text = str(jax.make_jaxpr(layer_over_two(4, 2, overlap=True))(*of_layer(8)))
    assert text.count("ppermute[") == 2 * 3
    exchanged = [line for line in text.splitlines() if "all_to_all[" in line]
    assert len(exchanged) == 5 and sum("i32[" in line.split("=")[0] for line in exchanged) == 3  # rows twice
    assert "ppermute[" not in str(jax.make_jaxpr(layer_over_two(4, 2, overlap=False))(*of_layer(8)))


@pytest.mark.long
def test_quantized_experts():
    """They have no gradient; the tokens' is that of the plain form."""
    arrays = of_layer(4)

    def of_tokens(overlap):
        run = layer(4, functools.partial(quantize, axis=-2), overlap=overlap)
        return lambda tokens: run(tokens, *map(jax.lax.stop_gradient, arrays[1:]))

    compare(of_tokens(True), of_tokens(False), arrays[:1])


RING, LINE = AxisLinks(TPUS["v5p"], (8,), (True,)), AxisLinks(TPUS["v5e"], (4,), (False,))


def test_the_model_by_hand():
    """Eight devices: two pieces arrive after each of three steps, and one after the last."""
    found = estimate_exchange(1024, 8192, 4096, 2, "bfloat16", RING)
    copied = 2 * 1024 * 8192 * 2 / TPUS["v5p"].hbm_bandwidth
    piece = 2 * 1024 * 8192 * 4096 / 459e12 + copied
    assert found.piece == pytest.approx(piece) and found.product == pytest.approx(8 * piece)
    whole = estimate_collective("all_to_all", 64 * 1024 * 8192 * 2, RING)
    assert found.exchange == pytest.approx(whole) and found.pieces == 8
    assert found.transfers == pytest.approx([whole / 8, whole / 4, whole * 3 / 8, whole / 4])
    done = max(piece, whole / 8) + 2 * piece
    done = max(done, whole * 3 / 8) + 2 * piece
    done = max(done, whole * 3 / 4) + 2 * piece
    assert found.overlapped == pytest.approx(max(done, whole) + piece)
    assert found.pays and found.exposed == pytest.approx(found.overlapped - 8 * piece)
    back = estimate_exchange(1024, 8192, 4096, 2, "bfloat16", RING, results=True)
    assert back.exchange == pytest.approx(whole / 2)  # half as many columns


def test_where_pieces_do_not_pay():
    """Few rows read the weights of every expert for each piece; one chip has nothing to hide."""
    few = estimate_exchange(8, 8192, 4096, 8, "bfloat16", RING)
    assert not few.pays and few.overlapped > 4 * few.plain
    half = estimate_exchange(1024, 8192, 4096, 2, "bfloat16", LINE, rows=512)
    assert half.exchange == estimate_exchange(1024, 8192, 4096, 2, "bfloat16", LINE).exchange  # the buffer travels
    assert half.piece < 0.6 * estimate_exchange(1024, 8192, 4096, 2, "bfloat16", LINE).piece
    chip = estimate_exchange(1024, 512, 512, 2, "bfloat16", AxisLinks(TPUS["tpu7x"], (), ()))
    assert chip.pieces == 2 and chip.exposed == chip.exchange == 0.0


@pytest.mark.turns(3)
def test_the_model_decides_and_explain_says_so():
    def products(room):
        rows = jax.ShapeDtypeStruct((8, 8, room, 4096), jnp.bfloat16)
        experts = jax.ShapeDtypeStruct((8 * LOCAL, 4096, 8192), jnp.bfloat16)
        found = explain(there(8, links=RING), rows, experts).notes
        return [text for text in found if text.startswith("all_to_all_grouped_gemm over expert (8): ")]

    (note,) = products(4096)
    assert "(8): pieces: all-to-all and products one after the other take" in note and "8 pieces take" in note
    (note,) = products(8)
    assert "(8): plain: all-to-all" in note
    run, arrays = layer(8), [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes_of_layer(8)]
    (note,) = (text for text in explain(run, *arrays).notes if text.startswith("moe_layer"))
    assert "moe_layer over expert (8): plain: the links of 'expert' are not known" in note
    (note,) = (text for text in explain(run, *arrays, target="v5p").notes if text.startswith("moe_layer"))
    assert "moe_layer over expert (8): plain: all-to-all and products" in note  # 16 tokens hide nothing
    many = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1 << 19, 4096), (4096, 8), *[(8, 4096, 4096)] * 3)]
    run = layer(8, capacity_factor=1.0)
    (note,) = (text for text in explain(run, *many, target="v5p").notes if text.startswith("moe_layer"))
    assert "moe_layer over expert (8): pieces: all-to-all and products" in note
    run = layer_over_two(4, 2, capacity_factor=1.0)
    (note,) = (text for text in explain(run, *many, target="v5p").notes if text.startswith("moe_layer"))
    assert "moe_layer over slice (4), after the exchange over expert (2): pieces: all-to-all and products" in note
    run = layer(8, exchange="ragged")
    (note,) = (text for text in explain(run, *many, target="v5p").notes if text.startswith("moe_layer"))
    assert note == "moe_layer over expert (8): plain: exchange='ragged' has no pieces."


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_the_compiler_puts_products_between_transfers():
    """The program of a v5e slice, with its gradients: transfers are under way while our kernel runs."""
    mesh = make_mesh("expert=4", topology="v5e:2x2")
    place = jax.NamedSharding(mesh, SPLIT)
    shapes = ((4, 4, 1024, 2048), (4, 4, 2), (8, 2048, 1024), (8, 1024, 2048))
    dtypes = (jnp.bfloat16, jnp.int32, jnp.bfloat16, jnp.bfloat16)
    arrays = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in zip(shapes, dtypes)]

    def local(rows, sizes, up, down):
        h, arriving = all_to_all_grouped_gemm(rows[0], up, sizes[0], axis="expert", overlap=True)
        return grouped_gemm_all_to_all(jax.nn.silu(h), down, arriving, axis="expert", overlap=True)[None]

    def total(rows, sizes, up, down):
        out = jax.shard_map(local, mesh=mesh, in_specs=(SPLIT,) * 4, out_specs=SPLIT)(rows, sizes, up, down)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(total, argnums=(0, 2, 3))).lower(*arrays).compile().as_text() or ""
    assert not re.search(r"= bf16\S* all-to-all", text)  # the sizes alone
    steps = re.findall(r" (collective-permute-start|collective-permute-done|custom-call)\(", text)
    under_way, hidden = 0, 0
    for step in steps:
        under_way += {"collective-permute-start": 1, "collective-permute-done": -1}.get(step, 0)
        hidden += step == "custom-call" and under_way > 0
    assert steps.count("collective-permute-start") >= 12 and hidden >= 8


def call(change, function=all_to_all_grouped_gemm):
    """The function of four devices, with changed arguments."""
    given = {"rows": normal(0, 4, ROOM, 12), "rhs": normal(1, LOCAL, 12, 10), "group_sizes": jnp.zeros((4, LOCAL), int)}
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    return jax.shard_map(
        lambda: function(**given | {"axis": "expert"} | change), mesh=mesh, in_specs=(), out_specs=P()
    )()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: call({"axis": "data"}), r"`axis` is \('data',\), which this call"),
        (lambda: call({"rows": normal(0, 3, ROOM, 12)}), "`rows` has shape .3, 9, 12., but 'expert' has 4 devices"),
        (lambda: call({"rhs": normal(1, 3, 5, 10)}, grouped_gemm_all_to_all), r"pass \(experts, 12, columns\)"),
        (lambda: call({"rhs": normal(1, 3, 12, 10).astype(jnp.bfloat16)}), "`rhs` is bfloat16, but `rows` is float32"),
        (lambda: call({"group_sizes": jnp.zeros((4, 2), int)}), r"`group_sizes` has shape \(4, 2\); pass \(4, 3\)"),
        (lambda: call({"bias": normal(0, 3, 4)}), r"`bias` has shape \(3, 4\); pass \(3, 10\)"),
        (lambda: call({"links": RING}), "`links` are those of 8 devices .*, but 'expert' has 4"),
        (lambda: estimate_exchange(0, 8, 8, 1, "bfloat16", RING), "sizes of at least 1"),
        (lambda: estimate_exchange(8, 8, 8, 1, "bfloat16", RING, rows=9), "`rows` 9; pass"),
        (
            lambda: moe_layer(*map(jnp.zeros, shapes_of_layer(1)), overlap=True),
            "`overlap` is given, but `expert_axis` is None",
        ),
        (
            lambda: layer(2, exchange="ragged", overlap=True)(*map(jnp.zeros, shapes_of_layer(2))),
            "`overlap` is True, and exchange='ragged' has no pieces",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments(wrong, message):
    with pytest.raises(ShapeError, match=message):
        wrong()


@pytest.mark.turns(4)
def test_a_checkpointed_layer_next_to_an_explicit_axis():
    """Experts over a manual axis, a second axis explicit: with `check_vma=False`, gradients are those of one device."""
    mesh = jax.make_mesh((2, 2), ("expert", "data"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    arrays = (normal(0, 8, 16), normal(1, 16, 4), *(normal(i, 4, 16, 16) / 4 for i in (2, 3, 4)))
    specs = (SPLIT, P(), SPLIT, SPLIT, SPLIT)

    def of(options):
        return jax.checkpoint(lambda *arrays: moe_layer(*arrays, top_k=2, **options).out)

    def gradients(run, arrays):
        return jax.jit(jax.grad(lambda *arrays: jnp.sum(jnp.sin(run(*arrays))), argnums=range(5)))(*arrays)

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            of({"expert_axis": "expert"}), in_specs=specs, out_specs=SPLIT, axis_names={"expert"}, check_vma=False
        )
        placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        found = gradients(run, placed)
    for a, b in zip(found, gradients(of({}), arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
