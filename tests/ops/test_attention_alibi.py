"""ALiBi beyond the contract: its meaning by an explicit bias, slopes split over devices, what has no gradient or
declines.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vishwamai import ShapeError, UnsupportedError, flash_attention
from vishwamai.core.config import kernel_config

SLOPES: Any = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


def draw(batch=2, heads=4, length=24, dim=8):
    return jax.random.normal(jax.random.key(0), (3, batch, heads, length, dim))


@pytest.mark.turns(3)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_bias_of_the_distance_and_leaves_the_logsumexp_right(causal):
    q, k, v = draw()
    distance = np.abs(np.subtract.outer(np.arange(24), np.arange(24)))
    bias = -SLOPES[None, :, None, None] * distance

    def loss(q, k, v, **how):
        out, logsumexp = flash_attention(q, k, v, causal=causal, return_lse=True, **how)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(logsumexp)), (out, logsumexp)

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    got, wanted = run(q, k, v, alibi_slopes=SLOPES), run(q, k, v, bias=bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)


def test_no_matrix_of_distances_is_held():
    q = jax.ShapeDtypeStruct((1, 4, 2048, 32), jnp.float32)
    program = jax.jit(lambda q: flash_attention(q, q, q, causal=True, alibi_slopes=SLOPES)).lower(q).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 2048 * 2048 * 4 / 8


@pytest.mark.turns(3)
def test_vmap_and_split_heads():
    q, k, v = draw()
    wanted = flash_attention(q, k, v, alibi_slopes=SLOPES, implementation="xla")
    each = jax.vmap(lambda q, k, v: flash_attention(q[None], k[None], v[None], alibi_slopes=SLOPES)[0])(q, k, v)
    np.testing.assert_allclose(each, wanted, atol=2e-6)
    own = jax.vmap(lambda s: flash_attention(q, k, v, alibi_slopes=s), 0)(np.stack([SLOPES, 0 * SLOPES]))
    np.testing.assert_allclose(own[0], wanted, atol=2e-6)
    np.testing.assert_allclose(own[1], flash_attention(q, k, v), atol=2e-6)
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for spec in (P("b", "h"), P(None, "b", "h")):  # heads, or the sequence, which is gathered
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
            got = jax.jit(lambda *x: flash_attention(*x, causal=True, alibi_slopes=SLOPES))(*placed)
            wanted = flash_attention(q, k, v, causal=True, alibi_slopes=SLOPES, implementation="xla")
            np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_what_it_declines():
    q, k, v = draw()
    with pytest.raises(UnsupportedError, match="`alibi_slopes` has no gradient"):
        jax.grad(lambda s: flash_attention(q, k, v, alibi_slopes=s).sum())(jnp.asarray(SLOPES))
    with pytest.raises(ShapeError, match="`alibi_slopes` has dtype int32"):
        flash_attention(q, k, v, alibi_slopes=jnp.arange(4))
    with pytest.raises(ShapeError, match=re.escape("`alibi_slopes` has shape (3,)")):
        flash_attention(q, k, v, alibi_slopes=SLOPES[:3])
    with kernel_config(split_sequence="ring"), jax.set_mesh(jax.make_mesh((8,), ("s",), (AxisType.Explicit,))):
        placed = [jax.device_put(x, P(None, None, "s")) for x in (q, k, v)]
        with pytest.raises(UnsupportedError, match="a hop does not know how far its keys are"):
            flash_attention(*placed, alibi_slopes=SLOPES)
