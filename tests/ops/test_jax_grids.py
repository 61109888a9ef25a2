"""The parameter grids of JAX's own Pallas tests of attention on GPUs (`mha`) and of megablox's grouped product (`gmm`),
on our kernels.

A seed draws combinations of each grid; what runs on the machine serves them. Results and gradients are compared with
the formula in float64.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import rotation
import vishwamai

pytestmark = pytest.mark.skipif(contract.INTERPRETED, reason="the kernels of the CPU")
MHA = list(
    itertools.product(
        (1, 2),  # batch
        (128, 384),  # queries
        (128, 384),  # keys
        (1, 2, 8),  # heads
        (32, 64, 72, 128),  # features
        (False, True),  # causal
        (False, True),  # segments
    )
)
GMM = list(
    itertools.product(
        ("float32", "bfloat16"),
        (128, 256, 1024),  # rows
        (128, 384),  # features
        (128, 200),  # columns
        (1, 5, 16),  # groups
        (None, "empty", "rest"),  # no group is empty but by chance; most are; rows after the last group
        (0, 1),  # the first group that has a matrix
    )
)
SHARE, COUNT = 8, 32


def close(got, want, tolerance):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max(initial=1e-6)


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "heads", "dim", "causal", "segments"), rotation.drawn(MHA, SHARE, COUNT)
)
def test_mha(batch, q_len, kv_len, heads, dim, causal, segments):
    rng = np.random.default_rng(0)
    shapes = [(batch, n, heads, dim) for n in (q_len, kv_len, kv_len, q_len)]
    query, key, value, cotangent = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    ids = None
    seen = np.ones((batch, q_len, kv_len), bool)
    if causal:
        seen &= np.tri(q_len, kv_len, dtype=bool)
    if segments:
        ids = np.arange(q_len)[None] // (q_len // 2) + np.zeros((batch, 1), np.int32)
        ids = ids.astype(np.int32), (np.arange(kv_len)[None] // (kv_len // 2) + np.zeros((batch, 1))).astype(np.int32)
        seen &= ids[0][:, :, None] == ids[1][:, None, :]

    def formula(query, key, value):
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(dim)
        weights = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e300), axis=-1)
        weights = jnp.where(seen[:, None], weights, 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    def ours(query, key, value):
        return vishwamai.flash_attention(query, key, value, causal=causal, segment_ids=ids, layout="bshd")

    out, pull = jax.vjp(ours, query, key, value)
    with jax.enable_x64(True):
        true, back = jax.vjp(formula, *(np.float64(x) for x in (query, key, value)))
        wanted = back(np.float64(cotangent))
    for got, want in zip((out, *pull(jnp.asarray(cotangent))), (true, *wanted), strict=True):
        close(got, want, 1e-5)


@pytest.mark.parametrize(("dtype", "rows", "k", "n", "groups", "odd", "first"), rotation.drawn(GMM, SHARE, COUNT))
def test_gmm(dtype, rows, k, n, groups, odd, first):
    rng = np.random.default_rng(0)
    if first >= groups:
        first = 0
    ends = np.sort(rng.integers(0, rows + 1, groups - 1))
    sizes = np.diff(np.concatenate([[0], ends, [rows]])).astype(np.int32)
    if odd == "empty":  # one group has all rows
        sizes = np.where(np.arange(groups) == groups // 2, rows, 0).astype(np.int32)
    elif odd == "rest":
        sizes[-1] //= 2
    lhs, rhs, cotangent = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in ((rows, k), (groups - first, k, n), (rows, n))
    )
    of = np.repeat(np.arange(groups + 1), [*sizes, rows - sizes.sum()])
    held = [np.flatnonzero(of == g) for g in range(first, groups)]
    a, b, c = (np.asarray(x, np.float64) for x in (lhs, rhs, cotangent))
    out, da, db = np.zeros((rows, n)), np.zeros((rows, k)), np.zeros(b.shape)
    for g, at in enumerate(held):
        out[at], da[at], db[g] = a[at] @ b[g], c[at] @ b[g].T, a[at].T @ c[at]

    def ours(lhs, rhs):
        return vishwamai.grouped_gemm(lhs, rhs, jnp.asarray(sizes), group_offset=first or None)

    got, pull = jax.vjp(ours, lhs, rhs)
    for found, want in zip((got, *pull(cotangent)), (out, da, db), strict=True):
        assert found.dtype == lhs.dtype
        close(found, want, 1e-5 if dtype == "float32" else 2**-8)
