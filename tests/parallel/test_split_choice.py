"""Which way attention over a split sequence takes where the chip is known: that of the estimate; elsewhere a ring."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vishwamai import aot, explain, flash_attention, kernel_config
from vishwamai.core.hardware import TPUS
from vishwamai.core.links import links_known
from vishwamai.parallel import AxisLinks, estimate_split_attention, make_mesh

SPLIT = P(None, None, "sequence")


def shapes(length, heads, kv_heads, mesh=None, spec=SPLIT, batch=1) -> Any:
    place = None if mesh is None else jax.NamedSharding(mesh, spec)
    return [
        jax.ShapeDtypeStruct((batch, n, length, 128), jnp.bfloat16, sharding=place) for n in (heads, kv_heads, kv_heads)
    ]


def note(*args, target=None, **options):
    mesh = args[0].sharding.mesh
    with jax.set_mesh(mesh):
        notes = explain(functools.partial(flash_attention, **options), *args, target=target).notes
    (found,) = (text for text in notes if text.startswith("attention"))
    return found


WAYS = {"ring": "around a ring", "ulysses": "(Ulysses)", "gather": "keeps its own rows"}


@pytest.mark.parametrize(
    ("way", "length", "heads", "kv_heads", "options"),
    [
        ("ring", 1 << 18, 8, 8, {}),  # long: products hide every transfer
        ("ulysses", 1 << 18, 8, 8, dict(causal=True)),  # in order, a ring waits for its last device
        ("ring", 1 << 18, 4, 1, dict(causal=True)),  # too few heads to exchange
        ("ulysses", 4096, 8, 8, {}),  # no product is long enough to hide a transfer of eight heads
        ("ring", 4096, 8, 1, {}),  # few kv heads: a ring moves an eighth
        ("ring", 4096, 8, 8, dict(window=(100, 0))),  # one hop
        ("gather", 256, 8, 1, {}),  # short: each of seven hops would take the way back along the line
        ("ulysses", 256, 8, 8, {}),
    ],
)
def test_the_choice_is_the_estimates(way, length, heads, kv_heads, options):
    """On a line of eight v5p, `explain` has the estimate of each way."""
    mesh = jax.make_mesh((8,), ("sequence",))
    text = note(*shapes(length, heads, kv_heads, mesh), target="v5p", **options)
    assert WAYS[way] in text
    line = AxisLinks(TPUS["v5p"], (8,), (False,))
    found = estimate_split_attention(*shapes(length, heads, kv_heads), links=line, **options)
    assert min(found.seconds.keys() - {"zigzag"}, key=lambda name: found.seconds[name]) == way
    assert f"by the links (v5p, a line of 8 chips): {found}".rstrip(".") in text


def test_other_axes_share_batch_and_heads():
    """The estimate is of one device's batch elements and heads."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "sequence"))
    spec = P("data", "tensor", "sequence")
    text = note(*shapes(4096, 8, 4, mesh, spec, batch=2), target="v5e", causal=True)
    line = AxisLinks(TPUS["v5e"], (2,), (False,))
    assert str(estimate_split_attention(*shapes(4096, 4, 2), links=line, causal=True)) in text


def test_two_axes_are_a_hybrid_too():
    """The note has the estimate of a hybrid; with too few heads to exchange over all devices, it takes least time."""
    mesh = jax.make_mesh((4, 2), ("a", "sequence"))
    spec = P(None, None, ("a", "sequence"))
    text = note(*shapes(1 << 18, 2, 2, mesh, spec), target="v5p", causal=True)
    lines = [AxisLinks(TPUS["v5p"], sides, (False,) * len(sides)) for sides in ((4, 2), (4,), (2,))]
    found = estimate_split_attention(*shapes(1 << 18, 2, 2), links=lines[0], causal=True, hybrid=(lines[1], lines[2]))
    assert found.seconds["hybrid"] < min(found.seconds["ring"], found.seconds["gather"])
    assert "(Ulysses and ring attention), which takes least time" in text and str(found).rstrip(".") in text
    assert "hybrid" in note(*shapes(4096, 16, 16, mesh, spec), target="tpu7x")


@pytest.mark.parametrize("target", [None, "h100", "cpu:avx2"])
def test_where_no_links_are_known_a_ring_stays_the_choice(target):
    mesh = jax.make_mesh((8,), ("sequence",))
    text = note(*shapes(256, 8, 1, mesh), target=target)
    assert WAYS["ring"] in text and "links" not in text
    with jax.set_mesh(mesh), kernel_config(target="v5e"):
        found = links_known(mesh.abstract_mesh, ("sequence",))
    assert found == AxisLinks(TPUS["v5e"], (8,), (False,))
    with kernel_config(target="tpu7x"):  # two devices on each chip
        assert links_known(mesh.abstract_mesh, ("sequence",)) == AxisLinks(TPUS["tpu7x"], (4,), (False,), 2)


def test_a_way_that_is_asked_for_is_taken():
    mesh = jax.make_mesh((8,), ("sequence",))
    with kernel_config(split_sequence="ulysses"):
        assert "as `split_sequence` says" in note(*shapes(1 << 18, 8, 8, mesh), target="v5p")


@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_links_of_the_mesh_in_force():
    """Sixteen chips of a v5e pod's side are a ring, and two axes of a slice a box."""
    ring = make_mesh("data=8,sequence=16", topology="v5e:8x16")
    args = shapes(4096, 16, 16, ring)
    assert "(v5e, a ring of 16 chips)" in note(*args)
    assert "(v6e, a line of 16 chips)" in note(*args, target="v6e")  # a chip that the mesh is not of
    box = make_mesh("a=4,sequence=4", topology="v5e:4x4")
    assert "(v5e, a box of 4x4 chips)" in note(*shapes(4096, 16, 16, box, P(None, None, ("a", "sequence"))))


@pytest.mark.turns(3)
def test_a_gathered_choice_is_one_device():
    """Short sequences are gathered, forward and backward, and the result stays split."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v = (jax.random.normal(keys[i], (2, heads, 16, 8)) for i, heads in enumerate((3, 1, 1)))
    bias, sinks, w = (jax.random.normal(keys[3 + i], s) for i, s in enumerate([(1, 3, 16, 16), (3,), q.shape]))
    ids = (jnp.arange(16)[None].repeat(2, 0) // 5,) * 2
    mesh = jax.make_mesh((4,), ("sequence",), devices=jax.devices()[:4])

    def attend(q, k, v, bias, sinks):
        options: Any = dict(
            segment_ids=ids, sinks=sinks, dropout_rate=0.2, dropout_key=jax.random.key(1), window=(9, 4)
        )
        return flash_attention(q, k, v, bias, q_offset=jnp.array([1, -2]), implementation="xla_chunked", **options)

    def total(function):
        return jax.value_and_grad(lambda *arrays: jnp.sum(function(*arrays) * w), argnums=range(5))

    def split(q, k, v, bias, sinks):
        laid = [jax.sharding.reshard(x, jax.NamedSharding(mesh, SPLIT)) for x in (q, k, v)]
        with kernel_config(target="v5e"):
            out = attend(laid[0], laid[1], laid[2], bias, sinks)
        assert jax.typeof(out).sharding.spec[2] == "sequence"
        return jax.sharding.reshard(out, jax.NamedSharding(mesh, P()))

    with jax.set_mesh(mesh):
        (text,) = (text for text in explain(split, q, k, v, bias, sinks).notes if text.startswith("attention"))
        assert WAYS["gather"] in text
        ours = jax.jit(total(split))(q, k, v, bias, sinks)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(total(attend)(q, k, v, bias, sinks)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
