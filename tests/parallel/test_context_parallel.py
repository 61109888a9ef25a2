"""Attention over a sequence that is split over eight devices is the attention of one device, with its gradients."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rotation
from vishwamai import aot, explain, flash_attention, flash_attention_varlen, kernel_config
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.signature import array_specs
from vishwamai.ops.attention import ATTENTION
from vishwamai.ops.attention.checks import Options, make_spec
from vishwamai.ops.attention.spec import Operands, Outputs
from vishwamai.ops.attention.split.ring import PLACEMENTS
from vishwamai.ops.attention.split.ring_plan import Ring
from vishwamai.parallel import from_zigzag, make_mesh, ring_attention, to_zigzag, ulysses_attention

SPLIT, SPLIT_A = P(None, None, "sequence"), P(None, None, "a")
KEYS_A = (P(), SPLIT_A, SPLIT_A)


def mesh_of(devices, batch=1):
    return jax.make_mesh(
        (batch, devices),
        ("data", "sequence"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: batch * devices],
    )


def inputs(length, heads=4, kv_heads=2, batch=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(length), 4)
    q = jax.random.normal(keys[0], (batch, heads, length, 16), dtype)
    k = jax.random.normal(keys[1], (batch, kv_heads, length, 16), dtype)
    v = jax.random.normal(keys[2], (batch, kv_heads, length, 8), dtype)
    return (q, k, v), jax.random.normal(keys[3], (batch, heads, length, 8), dtype)


def split(function, devices, specs=(SPLIT,) * 3, out: Any = SPLIT, **options):
    return jax.shard_map(
        functools.partial(function, axis="sequence", **options), mesh=mesh_of(devices), in_specs=specs, out_specs=out
    )


def compare(attend, reference, arrays, weight, tolerance=2e-5):
    """Values and gradients of two functions; `weight` gives every output a gradient of its own."""
    assert_close(gradients(attend, arrays, weight), gradients(reference, arrays, weight), tolerance)


def gradients(function, arrays, weight):
    def total(*arrays):
        results = function(*arrays)
        results = results if isinstance(results, tuple) else (results,)
        pairs = zip(results, (weight, jnp.cos(weight[..., 0].astype(jnp.float32))))
        return sum(jnp.sum(y.astype(jnp.float32) * w.astype(jnp.float32)) for y, w in pairs), results

    (_, results), of = jax.jit(jax.value_and_grad(total, argnums=tuple(range(len(arrays))), has_aux=True))(*arrays)
    return *results, *of


def assert_close(ours, theirs, tolerance=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max()))


DROPOUT: Any = dict(dropout_rate=0.3, dropout_key=jax.random.key(1))
RINGS = [
    dict(devices=4, causal=True, placement="zigzag", **DROPOUT),
    dict(devices=2, window=(5, 2), placement="contiguous", **DROPOUT),
    dict(devices=4, causal=True, placement="zigzag"),
    dict(devices=4, causal=True, placement="contiguous"),
    dict(devices=8),
    dict(devices=8, causal=True, placement="zigzag", softcap=5.0, scale=0.3),
    dict(devices=2, causal=True, placement="zigzag"),
    dict(devices=1, causal=True, placement="zigzag"),
    dict(devices=4, window=(7, 0)),  # two hops of four
    dict(devices=4, window=(1, 9), placement="contiguous"),
    dict(devices=4, window=(3, 2), causal=True, placement="contiguous"),
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=rotation.one_in(8, i) if i else ()) for i, case in enumerate(RINGS)], ids=str
)
def test_a_ring_is_one_device(case):
    devices, placement = case["devices"], case.get("placement")
    options = {name: value for name, value in case.items() if name not in ("devices", "placement")}
    arrays, weight = inputs(6 * devices)

    def attend(*arrays):
        if placement is None:
            return split(ring_attention, devices, return_lse=True, out=(SPLIT, SPLIT), **options)(*arrays)
        if placement == "zigzag":
            arrays = (to_zigzag(x, devices) for x in arrays)
        results = split(ring_attention, devices, placement=placement, return_lse=True, out=(SPLIT, SPLIT), **options)(
            *arrays
        )
        return tuple(from_zigzag(y, devices) for y in results) if placement == "zigzag" else results

    compare(attend, functools.partial(flash_attention, return_lse=True, layout="bhsd", **options), arrays, weight)


def options_of_every_kind(length, batch=2, heads=4) -> dict[str, Any]:
    """Options that a hop needs more than its own part for."""
    keys = jax.random.split(jax.random.key(length), 2)
    return dict(
        bias=jax.random.normal(keys[0], (1, heads, length, length)),
        mask=(jnp.arange(length) < length - 3)[None, None, None],
        segment_ids=(jnp.arange(length)[None].repeat(batch, 0) // 7,) * 2,
        sinks=jax.random.normal(keys[1], (heads,)),
    )


@pytest.mark.parametrize("placement", [pytest.param(n, marks=rotation.one_in(2, i)) for i, n in enumerate(PLACEMENTS)])
def test_bias_mask_segments_and_sinks_around_a_ring(placement):
    """Bias and mask have the keys of all devices; gradients of bias and sinks, too."""
    devices = 2
    arrays, weight = inputs(8 * devices)
    given = options_of_every_kind(8 * devices)
    put = functools.partial(to_zigzag, devices=devices) if placement == "zigzag" else lambda x, axis=2: x
    back = functools.partial(from_zigzag, devices=devices) if placement == "zigzag" else lambda x: x

    def ring(q, k, v, bias, mask, ids, sinks):
        options: Any = dict(segment_ids=(ids, ids), sinks=sinks, causal=True, placement=placement, softcap=3.0)
        return ring_attention(q, k, v, bias, mask, axis="sequence", **options)

    mapped = jax.shard_map(
        ring,
        mesh=mesh_of(devices),
        in_specs=(*(SPLIT,) * 4, P(), P(None, "sequence"), P()),
        out_specs=SPLIT,
    )

    def attend(q, k, v, bias, sinks):
        bias, mask = put(put(bias), axis=3), put(given["mask"], axis=3)
        return back(mapped(put(q), put(k), put(v), bias, mask, put(given["segment_ids"][0], axis=1), sinks))

    def reference(q, k, v, bias, sinks):
        rest = {name: given[name] for name in ("mask", "segment_ids")}
        return flash_attention(q, k, v, bias, sinks=sinks, causal=True, softcap=3.0, layout="bhsd", **rest)

    compare(attend, reference, (*arrays, given["bias"], given["sinks"]), weight)


LENGTHS = jnp.array([20, 31])
EXPLICIT = {
    "causal": dict(way="ring", causal=True),
    "bshd, window": dict(way="ring", window=(5, 2), layout="bshd", axes=("b", "a")),
    "all kinds": dict(way="ring", softcap=3.0, every=True),
    "kv_lens": dict(way="ring", kv_lens=LENGTHS, causal=True),
    "q_offset": dict(way="ring", q_offset=jnp.array([3, -2]), causal=True),
    "static q_offset": dict(way="ulysses", q_offset=2, causal=True, every=True),
    "dropout": dict(way="ring", causal=True, every=True, **DROPOUT),
    "zigzag": dict(way="ring", causal=True, split_sequence="zigzag", every=True),
    "zigzag, dropout": dict(way="ring", causal=True, split_sequence="zigzag", **DROPOUT),
    "zigzag, bshd": dict(way="ring", split_sequence="zigzag", layout="bshd", **DROPOUT),
    "hybrid": dict(way="hybrid", causal=True, split_sequence="hybrid", every=True, **DROPOUT),
    "hybrid, window": dict(way="hybrid", window=(9, 3), split_sequence="hybrid", axes=("b", "a")),
    "asked for": dict(way="ulysses", causal=True, window=(9, 0), split_sequence="ulysses"),
    "heads, too": dict(way="ring", causal=True, heads="a", axes=("b",)),
    "too few heads": dict(way="gathered", heads="a", axes=("b",), devices=(4, 2), q_offset=1, causal=True),
    "gather": dict(way="gathered", causal=True, split_sequence="gather"),
    "xla": dict(way="gathered", causal=True, implementation="xla"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=rotation.one_in(12, i)) for i, n in enumerate(EXPLICIT)])
def test_explicit_axes_are_followed_along_the_sequence(name):
    """`flash_attention` is the same call, forward and backward, and `explain` says how it is spread."""
    options: Any = dict(EXPLICIT[name])
    way, every, heads = options.pop("way"), options.pop("every", False), options.pop("heads", None)
    axes, wanted = options.pop("axes", ("a", "b")), options.pop("split_sequence", None)
    sizes = options.pop("devices", (2, 2))
    arrays, weight = inputs(32, kv_heads=sizes[0])
    given = options_of_every_kind(32) if every else {}
    arrays = (*arrays, *(given.pop(n) for n in ("bias", "sinks") if every))
    flip = (lambda x: x.swapaxes(1, 2)) if options.get("layout") == "bshd" else lambda x: x

    def attend(q, k, v, *more, placed=False):
        rest = {**given, **options, **dict(zip(("bias", "sinks"), more))}
        if placed and given:
            rest["bias"] = zigzag(zigzag(rest["bias"], axis=2), axis=3)
            rest["mask"] = zigzag(rest["mask"], axis=3)
            rest["segment_ids"] = tuple(zigzag(ids, axis=1) for ids in rest["segment_ids"])
        return flip(flash_attention(flip(q), flip(k), flip(v), **rest))

    mesh = jax.make_mesh(sizes, ("a", "b"), devices=jax.devices()[: math.prod(sizes)])
    spec = P(None, heads, axes)
    zigzag = functools.partial(to_zigzag if wanted == "zigzag" else lambda x, devices, axis=2: x, devices=4)
    with jax.set_mesh(mesh), kernel_config(split_sequence=wanted):
        put = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays[:3]] + list(arrays[3:])
        found = explain(attend, *put)
        (note,) = (note for note in found.notes if note.startswith("attention"))
        assert {
            "ring": "around a ring",
            "hybrid": "Ulysses and ring",
            "ulysses": "(Ulysses)",
            "gathered": "it is gathered",
        }[way] in note
        out = jax.eval_shape(attend, *put)
        assert (jax.typeof(out).sharding.spec[2] is not None) == (way != "gathered")

    def mapped(*arrays):
        laid = [jax.sharding.reshard(zigzag(x), jax.NamedSharding(mesh, spec)) for x in arrays[:3]]
        y = attend(*laid, *arrays[3:], placed=True)
        y = jax.sharding.reshard(y, jax.NamedSharding(mesh, P()))
        return from_zigzag(y, 4) if wanted == "zigzag" else y

    def on_mesh(*arrays):
        with kernel_config(split_sequence=wanted):
            return mapped(*arrays)

    with jax.set_mesh(mesh):
        ours = gradients(on_mesh, arrays, weight)
    assert_close(ours, gradients(attend, arrays, weight))


@pytest.mark.parametrize("causal", [pytest.param(c, marks=rotation.one_in(2, i)) for i, c in enumerate((True, False))])
def test_packed_sequences_in_zigzag_order(causal):
    """The starts are those of the sequences in order; rows after the last one see nothing."""
    (q, k, v), weight = inputs(32, batch=1)
    arrays, weight = [x[0].swapaxes(0, 1) for x in (q, k, v)], weight[0].swapaxes(0, 1)
    starts = jnp.array([0, 5, 5, 29])
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])

    def attend(q, k, v):
        return flash_attention_varlen(q, k, v, starts, starts, causal=causal)

    def on_mesh(*arrays):
        split, whole = (jax.NamedSharding(mesh, spec) for spec in (P(("a", "b")), P()))
        laid = [jax.sharding.reshard(to_zigzag(x, 4, axis=0), split) for x in arrays]
        with kernel_config(split_sequence="zigzag"):
            return from_zigzag(jax.sharding.reshard(attend(*laid), whole), 4, axis=0)

    with jax.set_mesh(mesh):
        ours = gradients(on_mesh, arrays, weight)
    assert_close(ours, gradients(attend, arrays, weight))


@pytest.mark.long
@pytest.mark.parametrize("way", ["ring", "gather"])
def test_vmap_over_another_explicit_axis(way):
    arrays = [jnp.stack([x, 2 * x]) for x in inputs(16)[0]]
    attend = jax.vmap(functools.partial(flash_attention, causal=True))
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), kernel_config(split_sequence=way):
        out = jax.jit(attend)(*(jax.device_put(x, jax.NamedSharding(mesh, P("a", None, None, "b"))) for x in arrays))
    np.testing.assert_allclose(out, attend(*arrays), atol=2e-5)


@pytest.mark.turns(3)
def test_hops_that_a_window_leaves_empty_are_not_made():
    arrays, _ = inputs(32)

    def transfers(**options):
        return str(jax.make_jaxpr(split(ring_attention, 8, **options))(*arrays)).count("ppermute[")

    assert transfers(window=(4, 0)) == 2  # keys and values, one hop
    assert transfers(window=(5, 0)) == 4
    assert transfers(window=(5, 4), causal=True) == 4
    assert transfers(window=(4, 4)) == 4  # a hop either way
    assert transfers(window=(40, 40)) == 14


PACKED = {
    "own": ([6, 6, 6, 6], 1),  # of each device; the keys of the next hop were asked for
    "neighbours": ([12, 12], 2),
    "ragged": ([3, 5, 14, 2], 3),
    "one": ([24], 3),
}


def packed(lengths):
    """Segment ids of two rows: documents of these lengths, and each token alone."""
    documents = jnp.repeat(jnp.arange(len(lengths)), jnp.array(lengths), total_repeat_length=sum(lengths))
    return jnp.stack([documents, jnp.arange(sum(lengths))])


@pytest.mark.parametrize("name", [pytest.param(n, marks=rotation.one_in(2, i)) for i, n in enumerate(PACKED)])
def test_hops_that_segments_leave_empty_are_not_made(name, monkeypatch):
    """The transfers of keys that run, forward; each group of devices makes those that any group needs."""
    lengths, hops = PACKED[name]
    made, shift = [], Ring.shift

    def counted(self, arrays, way, holders=None):
        jax.debug.callback(made.append, way)
        return shift(self, arrays, way, holders)

    monkeypatch.setattr(Ring, "shift", counted)
    by_row = P("data", None, "sequence")
    mapped = jax.shard_map(
        lambda q, k, v, ids: ring_attention(q, k, v, axis="sequence", causal=True, segment_ids=(ids, ids)),
        mesh=mesh_of(4, 2),
        in_specs=(*(by_row,) * 3, P("data", "sequence")),
        out_specs=by_row,
    )
    arrays, _ = inputs(24, heads=2 + list(PACKED).index(name), kv_heads=1)  # a program of its own
    jax.block_until_ready(jax.jit(mapped)(*arrays, packed(lengths)))
    jax.effects_barrier()
    assert len(made) == 8 * hops


@pytest.mark.parametrize(
    ("name", "placement", "check_vma"),
    rotation.in_turn(4, [(n, p, c) for n in PACKED for p in PLACEMENTS for c in (True, False)]),
)
def test_packed_rows_around_a_ring(name, placement, check_vma):
    """Values and gradients, where the rows of each group of devices have documents of their own."""
    ids = packed(PACKED[name][0])
    put = functools.partial(to_zigzag, devices=4) if placement == "zigzag" else lambda x, axis=2: x
    back = functools.partial(from_zigzag, devices=4) if placement == "zigzag" else lambda x: x
    by_row = P("data", None, "sequence")
    mapped = jax.shard_map(
        lambda q, k, v, ids: ring_attention(
            q, k, v, axis="sequence", causal=True, placement=placement, segment_ids=(ids, ids)
        ),
        mesh=mesh_of(4, 2),
        in_specs=(*(by_row,) * 3, P("data", "sequence")),
        out_specs=by_row,
        check_vma=check_vma,
    )
    arrays, weight = inputs(24)
    attend = lambda q, k, v: back(mapped(put(q), put(k), put(v), put(ids, axis=1)))  # noqa: E731
    compare(attend, functools.partial(flash_attention, segment_ids=(ids, ids), causal=True), arrays, weight)


def test_a_zigzag_order_that_cannot_be_kept():
    """A causal mask of a sequence in zig-zag order is never taken for one in order."""
    arrays, _ = inputs(16)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])

    def attend(spec, **options):
        return flash_attention(*(jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays), **options)

    def attend_keys(query, **options):
        put = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((query, *arrays[1:]), KEYS_A)]
        return flash_attention(*put, causal_align="bottom_right", **options)

    with kernel_config(split_sequence="zigzag"):
        assert flash_attention(*arrays).shape == (2, 4, 16, 8)  # no order is asked for
        for call, message in (
            (lambda: flash_attention(*arrays, causal=True), "not on explicit mesh axes"),
            (lambda: attend(P("a"), causal=True), "not split along it in the same way"),
            (lambda: attend_keys(arrays[0][:, :, :1], causal=True), "the queries are whole, and the keys are not in"),
            (lambda: attend(SPLIT_A, window=(3, 0)), "`window` needs the sequence in order"),
            (lambda: attend(SPLIT_A, causal=True, q_offset=jnp.array(3)), "`q_offset` is an array"),
            (lambda: attend(SPLIT_A, causal=True, implementation="xla"), "'xla' is the definition"),
        ):
            with pytest.raises(UnsupportedError, match=f"'zigzag'.*{message}"):
                call()
    with kernel_config(split_sequence="hybrid"), pytest.raises(UnsupportedError, match="needs two mesh axes"):
        attend(SPLIT_A)


@pytest.mark.turns(3)
def test_a_split_sequence_is_differentiable_once():
    arrays, _ = inputs(8)
    attend = split(ring_attention, 2)

    def slope(q):
        return jnp.sum(jax.grad(lambda q: jnp.sum(attend(q, *arrays[1:]) ** 2))(q) ** 2)

    with pytest.raises(UnsupportedError, match="differentiable once.*gather the sequence"):
        jax.eval_shape(jax.grad(slope), arrays[0])
    mesh = jax.make_mesh((2,), ("s",), devices=jax.devices()[:2])
    put = [jax.device_put(x, jax.NamedSharding(mesh, P(None, None, "s"))) for x in arrays]
    with pytest.raises(UnsupportedError, match="forward mode.*implementation='xla'"):
        jax.jvp(flash_attention, put, put)


@pytest.mark.long
def test_a_ring_of_bfloat16():
    arrays, weight = inputs(32, dtype=jnp.bfloat16)
    attend = split(ring_attention, 4)
    compare(attend, functools.partial(flash_attention, layout="bhsd"), arrays, weight, tolerance=2e-2)


@pytest.mark.parametrize(
    "devices,kv_heads,options",
    [
        pytest.param(4, 4, dict(causal=True)),
        pytest.param(4, 2, dict(window=(5, 2)), marks=rotation.one_in(3, 0)),
        pytest.param(8, 1, dict(causal=True, softcap=4.0), marks=rotation.one_in(3, 1)),
        pytest.param(2, 2, dict(scale=0.2), marks=rotation.one_in(3, 2)),
    ],
)
def test_ulysses_is_one_device(devices, kv_heads, options):
    arrays, weight = inputs(6 * devices, heads=8, kv_heads=kv_heads)
    attend = split(ulysses_attention, devices, **options)
    compare(attend, functools.partial(flash_attention, layout="bhsd", **options), arrays, weight)


@pytest.mark.turns(3)
def test_ulysses_with_sinks():
    arrays, weight = inputs(16, heads=8, kv_heads=2)
    arrays = (*arrays, jnp.linspace(-1.0, 2.0, 8))
    attend = jax.shard_map(
        lambda q, k, v, sinks: ulysses_attention(q, k, v, axis="sequence", sinks=sinks, causal=True),
        mesh=mesh_of(4),
        in_specs=(SPLIT, SPLIT, SPLIT, P()),
        out_specs=SPLIT,
    )
    compare(attend, lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks, causal=True), arrays, weight)


@pytest.mark.long
def test_ulysses_with_segments():
    arrays, weight = inputs(24, heads=4)
    ids = jnp.repeat(jnp.arange(3), 8)[None].repeat(2, 0)

    mapped = jax.shard_map(
        lambda q, k, v, ids: ulysses_attention(q, k, v, axis="sequence", segment_ids=(ids, ids), causal=True),
        mesh=mesh_of(4),
        in_specs=(SPLIT, SPLIT, SPLIT, P(None, "sequence")),
        out_specs=SPLIT,
    )

    def attend(q, k, v):
        return mapped(q, k, v, ids)

    compare(attend, functools.partial(flash_attention, segment_ids=(ids, ids), causal=True), arrays, weight)


@pytest.mark.long
def test_with_the_batch_split_too():
    arrays, weight = inputs(24)
    both = P("data", None, "sequence")
    attend = jax.shard_map(
        functools.partial(ring_attention, axis="sequence", causal=True),
        mesh=mesh_of(4, 2),
        in_specs=both,
        out_specs=both,
    )
    compare(attend, functools.partial(flash_attention, causal=True), arrays, weight)


@pytest.mark.parametrize("causal,transfers", [(False, 6), (True, 6)])
def test_what_travels(causal, transfers):
    """Three hops of keys and values; a causal sequence in order sends no keys to a device that cannot see them."""
    arrays, _ = inputs(16)
    jaxpr = str(jax.make_jaxpr(split(ring_attention, 4, causal=causal))(*arrays))
    assert jaxpr.count("ppermute[") == transfers
    assert ("perm=((2, 3),)" in jaxpr) == causal
    zigzag = str(jax.make_jaxpr(split(ring_attention, 4, causal=True, placement="zigzag"))(*arrays))
    # Whole hops of half the products: 2 rows of the 4 times 4 keys, or 4 rows times the first 2 keys.
    assert "2,4,2,16" in zigzag and "2,2,2,16" in zigzag


@pytest.mark.turns(3)
def test_memory_is_linear_in_the_own_part():
    """The compiled program of eight devices needs no array of the whole sequence."""
    arrays, _ = inputs(2048, heads=2, kv_heads=1, batch=1)

    def loss(q, k, v):
        return jnp.sum(split(ring_attention, 8, causal=True, placement="zigzag")(q, k, v))

    places = (jax.NamedSharding(mesh_of(8), SPLIT),) * 3
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), in_shardings=places).lower(*arrays).compile().as_text()
    assert text is not None and "collective-permute" in text and "all-gather" not in text
    assert ",2048," not in text


def test_the_gradient_of_long_sequences_on_tpu_is_traced():
    """Sums of the queries' gradients that begin as zeros vary over the mesh axes, as the queries do."""
    shapes = [jax.ShapeDtypeStruct((2, heads, 1 << 16, 128), jnp.bfloat16) for heads in (2, 1, 1)]

    def total(*arrays):
        return jnp.sum(flash_attention(*arrays, causal=True, implementation="pallas_tpu").astype(jnp.float32))

    def local(*arrays):
        return jax.grad(total, argnums=(0, 1, 2))(*arrays)

    mapped = jax.shard_map(local, mesh=mesh_of(1, 2), in_specs=P("data"), out_specs=P("data"))
    assert [x.shape for x in jax.eval_shape(mapped, *shapes)] == [x.shape for x in shapes]


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_a_million_tokens_on_a_slice():
    """The program of sixteen chips, with its gradients: a device holds a few times its own part, and keys travel while
    our kernel runs.
    """
    mesh = make_mesh("sequence=16", topology="v5e:4x4")
    placed = jax.NamedSharding(mesh, SPLIT)
    attend = functools.partial(ring_attention, axis="sequence", causal=True, placement="zigzag")

    def total(q, k, v):
        out = jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)(q, k, v)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    tokens = 1 << 20
    shapes = [jax.ShapeDtypeStruct((1, heads, tokens, 128), jnp.bfloat16, sharding=placed) for heads in (2, 1, 1)]
    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes).compile()
    own = tokens // 16 * 128 * 4  # bytes of one head of a device's part in float32
    assert program.memory_analysis().temp_size_in_bytes < 32 * own  # the scores of one hop would be 512 of them
    text = program.as_text() or ""
    # A hop is a choice between the kernels of devices before and behind the end of the ring.
    steps = re.findall(r" (collective-permute-start|collective-permute-done|conditional)\(", text.partition("ENTRY")[2])
    under_way, hidden = 0, 0
    for step in steps:
        under_way += {"collective-permute-start": 1, "collective-permute-done": -1}.get(step, 0)
        hidden += step == "conditional" and under_way > 0
    assert "all-gather" not in text and hidden >= 15


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_hops_that_segments_may_end_hide_their_transfers_on_tpu():
    """Each hop is a branch of its own, in which keys travel while our kernel runs."""
    mesh = make_mesh("sequence=4", topology="v5e:2x2")

    def total(q, k, v, ids):
        out = jax.shard_map(
            lambda q, k, v, ids: ring_attention(q, k, v, axis="sequence", causal=True, segment_ids=(ids, ids)),
            mesh=mesh,
            in_specs=(*(SPLIT,) * 3, P(None, "sequence")),
            out_specs=SPLIT,
        )(q, k, v, ids)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    place = functools.partial(jax.NamedSharding, mesh)
    shapes = [jax.ShapeDtypeStruct((1, n, 1 << 15, 128), jnp.bfloat16, sharding=place(SPLIT)) for n in (2, 1, 1)]
    ids = jax.ShapeDtypeStruct((1, 1 << 15), jnp.int32, sharding=place(P(None, "sequence")))
    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shapes, ids).compile().as_text() or ""
    branches = text.partition("ENTRY")[0].split("\n\n")
    kinds = " (collective-permute-start|collective-permute-done|conditional)\\("
    steps = [[kind for kind, _ in itertools.groupby(re.findall(kinds, branch))] for branch in branches]
    # Two hops that ask for the next keys, forward and backward, and the last one that brings back gradients.
    assert steps.count(["collective-permute-start", "conditional", "collective-permute-done"]) == 5


@pytest.mark.long
def test_the_reference_by_name():
    """ "xla" has no backward pass of a part, and the ring takes that of "xla_chunked"."""
    arrays, weight = inputs(16)
    with kernel_config(use_flash=False):
        compare(split(ring_attention, 4), functools.partial(flash_attention, implementation="xla"), arrays, weight)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_placement_and_back(devices):
    x = jnp.arange(12 * devices).reshape(1, 2, 6 * devices)
    placed = to_zigzag(x, devices)
    np.testing.assert_array_equal(from_zigzag(placed, devices), x)
    first = placed[0, 0, :6]
    np.testing.assert_array_equal(first, [*range(3), *range(6 * devices - 3, 6 * devices)])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a: ring_attention(*a, axis="sequence"), r"ring_attention: `axis` is \('sequence',\), which this call"),
        (lambda a: split(ring_attention, 2, placement="striped")(*a), "'striped'; pass 'contiguous' or 'zigzag'"),
        (lambda a: split(ring_attention, 2, causal=True)(a[0][:, :, :6], *a[1:]), "there are 3 and 6"),
        (lambda a: split(ring_attention, 4, causal=True, placement="zigzag")(*a), "cuts the 3 rows .* multiple of 8"),
        (lambda a: split(ring_attention, 2, window=(3, 0), placement="zigzag")(*a), "`window` is .* pass placement"),
        (lambda a: split(ring_attention, 2, mask=jnp.ones((1, 1, 1, 5), bool))(*a), "`mask` .* keys of all 2 devices"),
        (lambda a: split(ring_attention, 2, softcap=-1.0)(*a), "`softcap` is -1.0"),
        (lambda a: split(ring_attention, 2)(a[0], a[1][:, :, :, :3], a[2]), "qk_dim"),
        (lambda a: split(ulysses_attention, 6)(*a), "4 query heads do not divide over the 6 devices of 'sequence'"),
        (lambda a: to_zigzag(a[0], 5), "has no axis 2 that divides into 2 . 5 pieces"),
        (lambda a: from_zigzag(a[0], 2, axis=7), "has no axis 7"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, message):
    with pytest.raises(ShapeError, match=message):
        call(inputs(12)[0])


def test_a_reference_reads_no_residuals():
    arrays = Operands(*inputs(8)[0])
    out, logsumexp = flash_attention(*arrays[:3], return_lse=True, layout="bhsd")
    spec = make_spec(array_specs(arrays), "default", *Options(return_lse=True))
    given = (Outputs(out, logsumexp), logsumexp, Outputs(out, logsumexp))
    with pytest.raises(UnsupportedError, match="'xla' reads no residuals"):
        ATTENTION.gradients(spec, arrays, *given, implementation="xla")
