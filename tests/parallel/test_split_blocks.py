"""Attention under a block mask whose sequence goes around a ring: values, gradients, hops that are not made, and what a
ring declines.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rotation
from vishwamai import BlockMask, block_sparse_attention, explain, kernel_config
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.signature import array_specs
from vishwamai.ops.attention.checks import Options, make_spec
from vishwamai.ops.attention.spec import Operands
from vishwamai.ops.attention.split.ring_plan import Ring, why_not_ring

SPLIT = P(None, None, "sequence")
DEVICES, LENGTH, BLOCK = 4, 64, 8


def blocks_of(rule, heads=1):
    """bool `[heads, 8, 8]` of the block numbers."""
    i, j = np.indices((LENGTH // BLOCK,) * 2)
    return np.stack([rule(i, j, head) for head in range(heads)])


SLIDING = blocks_of(lambda i, j, head: abs(i - j) <= 1)
FIRST_AND_OWN = blocks_of(lambda i, j, head: (j == 0) | (i == j))
NOT_OWN = blocks_of(lambda i, j, head: i // 2 != j // 2)  # no query sees a key of its own device
RANDOM = np.random.default_rng(0).random((4, LENGTH // BLOCK, LENGTH // BLOCK)) < 0.4
EVERY_FOURTH = BlockMask.from_function(lambda i, j: (i - j) % 4 == 0, LENGTH, LENGTH, (BLOCK, BLOCK))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "random heads, all kinds": (RANDOM, dict(every=True, causal=True)),
    "sliding": (SLIDING, {}),
    "not own, sinks": (NOT_OWN, dict(every=True)),
    "first and own, dropout": (FIRST_AND_OWN, dict(causal=True, dropout_rate=0.3, dropout_key=jax.random.key(1))),
    "every fourth, window": (EVERY_FOURTH, dict(window=(20, 3))),
    "rows that see nothing": (blocks_of(lambda i, j, head: (i != 3) & (j == i - 2)), {}),
    "positions": (SLIDING, dict(causal=True, q_offset=jnp.array([2, -9]))),
    "hybrid": (SLIDING, dict(hybrid=True)),
}


def inputs():
    keys = jax.random.split(jax.random.key(0), 6)
    q = jax.random.normal(keys[0], (2, 4, LENGTH, 16))
    k, v = (jax.random.normal(keys[i], (2, 2, LENGTH, 8 * i)) for i in (2, 1))
    bias = jax.random.normal(keys[3], (1, 4, LENGTH, LENGTH))
    return (q, k, v, bias, jax.random.normal(keys[4], (4,))), jax.random.normal(keys[5], (2, 4, LENGTH, 8))


@pytest.mark.turns(5)
@pytest.mark.filterwarnings("ignore::vishwamai.FallbackWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=rotation.one_in(4, i) if i else ()) for i, n in enumerate(CASES)]
)
def test_a_block_mask_around_a_ring_is_one_device(name):
    mask, options = CASES[name]
    every, hybrid = (options.get(word, False) for word in ("every", "hybrid"))
    options = {word: value for word, value in options.items() if word not in ("every", "hybrid")}
    arrays, weight = inputs()
    arrays = arrays if every else arrays[:3]
    if every:
        options["segment_ids"] = (jnp.arange(LENGTH)[None].repeat(2, 0) // 23,) * 2
    sizes, axes = ((2, 2), ("a", "b")) if hybrid else ((DEVICES,), ("sequence",))
    mesh = jax.make_mesh(sizes, axes, devices=jax.devices()[:DEVICES])
    place = jax.NamedSharding(mesh, P(None, None, axes))
    size = {} if isinstance(mask, BlockMask) else {"block_size": BLOCK}

    def attend(q, k, v, bias=None, sinks=None):
        out, lse = block_sparse_attention(
            q, k, v, mask, **size, bias=bias, sinks=sinks, return_lse=True, layout="bhsd", **options
        )
        return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

    def split(*arrays):
        laid = [jax.sharding.reshard(x, place) for x in arrays[:3]]
        with kernel_config(split_sequence="hybrid" if hybrid else None):
            found = attend(*laid, *arrays[3:])
        return [jax.sharding.reshard(x, jax.NamedSharding(mesh, P())) for x in found]

    def all_of(function):
        def total(*arrays):
            out, lse = function(*arrays)
            return jnp.sum(out * weight) + jnp.sum(lse * jnp.cos(weight[..., 0])), (out, lse)

        return jax.jit(jax.value_and_grad(total, range(len(arrays)), has_aux=True))(*arrays)

    with jax.set_mesh(mesh):
        (note,) = (text for text in explain(split, *arrays).notes if text.startswith("attention"))
        assert ("Ulysses and ring" if hybrid else "around a ring") in note
        ours = all_of(split)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(all_of(attend)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5, rtol=3e-5)


def program(mask, block_size: Any = BLOCK, **options):
    """The program, on a mesh of four; and the note on it."""
    mesh = jax.make_mesh((DEVICES,), ("sequence",), devices=jax.devices()[:DEVICES])
    laid = [jax.device_put(x, jax.NamedSharding(mesh, SPLIT)) for x in inputs()[0][:3]]

    def attend(*arrays):
        return block_sparse_attention(*arrays, block_mask=mask, block_size=block_size, layout="bhsd", **options)

    with jax.set_mesh(mesh):
        (note,) = (text for text in explain(attend, *laid).notes if text.startswith("attention"))
        return str(jax.make_jaxpr(attend)(*laid)), note


@pytest.mark.parametrize(
    ("mask", "hops"),
    [
        (blocks_of(lambda i, j, head: i // 2 == j // 2), []),
        (blocks_of(lambda i, j, head: i // 2 == (j // 2 + 2) % 4), [2]),
        (SLIDING, [1, 2]),  # the next device's keys come around the end, three devices on: in hop 3
        (FIRST_AND_OWN, [1, 1, 1]),
    ],
)
def test_hops_that_a_block_mask_leaves_empty_are_not_made(mask, hops):
    jaxpr, _ = program(mask)
    found = [
        [tuple(map(int, pair)) for pair in re.findall(r"\((\d), (\d)\)", text)]
        for text in re.findall(r"perm=\((.*?\),?)\)", jaxpr)
    ]
    assert [(to - origin) % DEVICES for ((origin, to), *_) in found] == [hop for hop in hops for _ in "kv"]
    if mask is FIRST_AND_OWN:  # the keys of the first device alone go on
        assert all(len(pairs) == 1 for pairs in found)


def test_what_a_ring_declines():
    _, note = program(np.tri(3, dtype=bool), 24, causal=True)
    assert "(Ulysses), because a ring declines: blocks of 24 x 24 do not divide the 16 queries and 16 keys" in note
    with kernel_config(split_sequence="zigzag"), pytest.raises(UnsupportedError, match="block mask .* in order"):
        program(SLIDING, causal=True)


def spec_of(blocks):
    """Of the part of one of 16 devices with 64 rows each."""
    one = jax.ShapeDtypeStruct((1, 1, 64, 8), jnp.float32)
    return dataclasses.replace(make_spec(array_specs(Operands(one, one, one)), "default", *Options()), blocks=blocks)


def test_parts_that_are_alike_are_one_program():
    """A dilated mask is the same everywhere; one without order would be a program of 256 kernels."""
    dilated = BlockMask.from_function(lambda i, j: (i - j) % 4 == 0, 1024, 1024, (8, 8))
    assert why_not_ring(spec_of(dilated), 16) is None
    ring = Ring((), 16, spec_of(dilated), False, None, None)
    assert len({part for step in range(16) for part in ring.parts(step)}) == 1
    without_order = BlockMask.from_blocks(np.random.default_rng(1).random((128, 128)) < 0.5, (8, 8))
    reason = why_not_ring(spec_of(without_order), 16)
    assert reason == "the block mask has 256 different parts on 16 devices, and may have 64."
