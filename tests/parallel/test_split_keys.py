"""Attention over keys that are split over devices is that over all keys, forward and backward: values of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rotation
from test_context_parallel import DROPOUT, assert_close, compare, gradients, inputs
from vishwamai import explain, flash_attention, kernel_config, ragged_paged_attention
from vishwamai.core.errors import ShapeError
from vishwamai.parallel import decode_attention, merge_shards

KEYS = P(None, None, "keys")
LENGTHS = jnp.array([5, 29])


def mesh_of(devices, kind=AxisType.Auto):
    return jax.make_mesh((devices,), ("keys",), axis_types=(kind,), devices=jax.devices()[:devices])


def mapped(devices, names=(), **options):
    """`decode_attention` of (query, key, value, *those of `names`), which lie as their names say."""
    split = {"bias": P(None, None, None, "keys"), "mask": P(None, None, None, "keys"), "kv_ids": P(None, "keys")}

    def attend(q, k, v, *more):
        given = dict(zip(names, more))
        ids = {"segment_ids": (given.pop("q_ids"), given.pop("kv_ids"))} if "q_ids" in given else {}
        return decode_attention(q, k, v, axis="keys", **ids, **given, **options)

    specs = (P(), KEYS, KEYS, *(split.get(name, P()) for name in names))
    return jax.shard_map(attend, mesh=mesh_of(devices), in_specs=specs, out_specs=P())


CASES: list[dict[str, Any]] = [
    dict(devices=2),
    dict(devices=8, causal=True, kv_lens=LENGTHS),  # some devices have no key that exists
    dict(devices=4, causal=True, window=(6, 0), softcap=5.0),
    dict(devices=4, window=(3, 2), q_offset=jnp.array([3, 20]), causal=True),
    dict(devices=4, causal=True, q_offset=10, scale=0.3),
]


@pytest.mark.parametrize("case", [pytest.param(c, marks=rotation.one_in(5, i)) for i, c in enumerate(CASES)], ids=str)
def test_keys_of_several_devices_are_those_of_one(case):
    """By default the last query stands at the last key that exists."""
    options = dict(case)
    devices = options.pop("devices")
    (q, k, v), weight = inputs(32)
    arrays, weight = (q[:, :, :3], k, v), weight[:, :, :3]
    offset = options.get("q_offset", options.get("kv_lens", jnp.array(32)) - 3)
    one = functools.partial(flash_attention, return_lse=True, layout="bhsd", **{**options, "q_offset": offset})
    compare(mapped(devices, return_lse=True, **options), one, arrays, weight)


@pytest.mark.long
def test_all_that_has_keys():
    """Bias, mask and segments come with a device's own keys; sinks count once."""
    (q, k, v), weight = inputs(32)
    q, weight = q[:, :, :4], weight[:, :, :4]
    bias, sinks = jax.random.normal(jax.random.key(7), (1, 4, 4, 32)), jnp.arange(4.0)
    mask, kv_ids = (jnp.arange(32) % 5 != 0)[None, None, None], jnp.arange(32)[None].repeat(2, 0) // 9
    q_ids = jnp.array([[0, 1, 2, 9], [3, 3, 1, 0]])  # one that sees no key
    names = ("bias", "sinks", "mask", "q_ids", "kv_ids")

    def ours(q, k, v, bias, sinks):
        return mapped(4, names, return_lse=True)(q, k, v, bias, sinks, mask, q_ids, kv_ids)

    def one(q, k, v, bias, sinks):
        return flash_attention(q, k, v, bias, mask, sinks=sinks, segment_ids=(q_ids, kv_ids), return_lse=True)

    compare(ours, one, (q, k, v, bias, sinks), jnp.where(jnp.arange(4)[:, None] == 3, 0.0, weight))


EXPLICIT: dict[str, dict[str, Any]] = {
    "decode": dict(causal=True, causal_align="bottom_right"),
    "lengths": dict(kv_lens=LENGTHS, q_offset=LENGTHS - 4, causal=True),
    "bshd": dict(window=(9, 0), layout="bshd", return_lse=True),
    "dropout": dict(**DROPOUT),
    "sinks, heads too": dict(sinks=jnp.arange(4.0), heads="heads"),
    "gather": dict(split_sequence="gather", causal=True),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=rotation.one_in(6, i)) for i, n in enumerate(EXPLICIT)])
def test_explicit_axes_are_followed_along_the_keys(name):
    options = dict(EXPLICIT[name])
    heads, wanted = options.pop("heads", None), options.pop("split_sequence", None)
    (q, k, v), weight = inputs(32)
    arrays, weight = (q[:, :, :4], k, v), weight[:, :, :4]
    flip = (lambda x: x.swapaxes(1, 2)) if options.get("layout") == "bshd" else lambda x: x

    def attend(q, k, v):
        found = flash_attention(flip(q), flip(k), flip(v), **options)
        return (flip(found[0]), found[1]) if options.get("return_lse") else flip(found)

    mesh = jax.make_mesh((2, 4), ("heads", "keys"), devices=jax.devices())

    def on_mesh(*arrays):
        specs = (P(None, heads), P(None, heads, "keys"), P(None, heads, "keys"))
        laid = [jax.sharding.reshard(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
        with kernel_config(split_sequence=wanted):
            return jax.tree.map(lambda y: jax.sharding.reshard(y, jax.NamedSharding(mesh, P())), attend(*laid))

    with jax.set_mesh(mesh):
        (note,) = (note for note in explain(on_mesh, *arrays).notes if note.startswith("attention"))
        assert ("they are gathered" if wanted else "attends to its own keys") in note
        ours = gradients(on_mesh, arrays, weight)
        text = jax.jit(on_mesh).lower(*arrays).compile().as_text()
    assert_close(ours, gradients(attend, arrays, weight))
    assert heads or ("all-gather" in (text or "")) == (wanted is not None)


@pytest.mark.turns(3)
def test_pages_of_several_devices():
    """A cache whose pages lie on four devices, each with its own tables: the parts are merged."""
    devices, size, heads, dim = 4, 4, 2, 16
    lengths = np.array([11, 37])
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, heads, dim))
    k, v = (jax.random.normal(key, (2, 48, heads, dim)) for key in keys[1:])
    cut = 48 // devices
    own = np.clip(lengths[None] - np.arange(devices)[:, None] * cut, 0, cut)  # how many keys each device has
    pools = [
        x.reshape(2, devices, cut // size, size, heads, dim).swapaxes(0, 1).reshape(-1, size, heads, dim)
        for x in (k, v)
    ]
    tables = jnp.arange(2 * cut // size, dtype=jnp.int32).reshape(2, -1)

    def part(q, k, v, lens):
        starts = jnp.arange(3, dtype=jnp.int32)
        out, lse = ragged_paged_attention(q, (k, v), lens[0], tables, starts, return_lse=True)
        return merge_shards(out, lse, axis="keys")[0]

    run = jax.shard_map(part, mesh=mesh_of(devices), in_specs=(P(), P("keys"), P("keys"), P("keys")), out_specs=P())
    out = jax.jit(run)(q, *pools, jnp.asarray(own, jnp.int32))
    one = flash_attention(q[:, :, None], *(x.swapaxes(1, 2) for x in (k, v)), kv_lens=jnp.asarray(lengths))[:, :, 0]
    np.testing.assert_allclose(out, one, atol=2e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: decode_attention(q, k, v, axis="keys"), r"`axis` is \('keys',\), which this call"),
        (
            lambda q, k, v: mapped(2, kv_lens=jnp.array([1, 13]))(q, k, v),
            "`kv_lens` holds 13; pass values from 0 to 12",
        ),
        (lambda q, k, v: mapped(2, softcap=-1.0)(q, k, v), "`softcap` is -1.0"),
        (lambda q, k, v: mapped(2)(q[..., :3], k, v), "qk_dim"),
        (
            lambda q, k, v: jax.shard_map(
                functools.partial(merge_shards, axis="keys"), mesh=mesh_of(2), in_specs=P(), out_specs=P()
            )(q, v[..., 0]),
            "merge_shards: `lse` has shape",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ShapeError, match=message):
        call(*inputs(12)[0])
