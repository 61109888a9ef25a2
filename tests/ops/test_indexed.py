"""Attention over chosen tokens: random calls against the oracle, the index from its definition, and both as one."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import draws
import rotation
from vishwamai import ShapeError, flash_attention, indexed_attention, lightning_index


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.turns(3)
@pytest.mark.parametrize("seeds", rotation.spans(4, 1000))
def test_random_calls(seeds):
    """Values and gradients of any legal call are the oracle's."""
    for seed in seeds:
        case = draws.draw_case("indexed_attention", random.Random(seed).choice, 130)
        contract.check_all(contract.by_reference(case), contract.truth(case), None)


def scores(query, key, weights):
    """The scores of the definition, in float64, `[batch, q_len, kv_len]`."""
    query, key, weights = (np.asarray(x, np.float64) for x in (query, key, weights))
    return np.einsum("bqh,bhqk->bqk", weights, np.maximum(np.einsum("bhqd,bkd->bhqk", query, key), 0))


def test_the_index_is_its_definition(monkeypatch):
    """With segments, positions, and queries in blocks; of fewer keys than `top_k`, -1 fills up."""
    monkeypatch.setattr("vishwamai.ops.indexed.indexer._BLOCK_BYTES", 4 * 2 * 3 * 13 * 4)
    query, key, weights = normal(0, 2, 3, 13, 8), normal(1, 2, 13, 8), normal(2, 2, 13, 3)
    ids = jnp.asarray([[0] * 5 + [1] * 8, [0] * 13])
    positions = jnp.broadcast_to(jnp.arange(13) // 2 * 2, (2, 13))
    truth = scores(query, key, weights)
    choices: list[dict[str, Any]] = [{}, {"segment_ids": (ids, ids)}, {"positions": positions}]
    for options in choices:
        index = jax.jit(lambda *a, options=options: lightning_index(*a, top_k=4, **options))(query, key, weights)
        assert index.shape == (2, 13, 4) and index.dtype == jnp.int32
        for b, t in np.ndindex(2, 13):
            last = int(options.get("positions", jnp.arange(13)[None])[-1, t])
            legal = [s for s in range(last + 1) if "segment_ids" not in options or ids[b, s] == ids[b, t]]
            best = sorted(legal, key=lambda s: -truth[b, t, s])[:4]
            assert index[b, t].tolist() == best + [-1] * (4 - len(best))


def test_the_index_of_torch_is_that_of_jax():
    torch = pytest.importorskip("torch")
    import vishwamai.torch as vt

    query, key, weights = normal(0, 2, 3, 6, 8), normal(1, 2, 13, 8), normal(2, 2, 6, 3)
    ids = jnp.asarray([[1] * 6, [0] * 6]), jnp.asarray([[0] * 5 + [1] * 8, [0] * 13])
    tensors = [torch.tensor(np.asarray(x)) for x in (query, key, weights)]
    for pair in (None, ids):
        index = lightning_index(query, key, weights, top_k=5, segment_ids=pair)
        pair = pair and tuple(torch.tensor(np.asarray(x)) for x in pair)
        of_torch = vt.lightning_index(*tensors, top_k=5, segment_ids=pair)
        assert of_torch.dtype == torch.int32
        np.testing.assert_array_equal(of_torch.numpy(), index)


def test_all_keys_chosen_is_causal_attention(monkeypatch):
    """Queries in blocks too; values and gradients."""
    monkeypatch.setattr("vishwamai.ops.indexed.reference._BLOCK_BYTES", 4 * 2 * 2 * 9 * 24 * 4)
    query, key, value = normal(0, 2, 4, 9, 8), normal(1, 2, 2, 9, 8), normal(2, 2, 2, 9, 16)
    index = lightning_index(normal(3, 2, 3, 9, 8), normal(4, 2, 9, 8), normal(5, 2, 9, 3), top_k=9)
    sparse = jax.value_and_grad(lambda q, k, v: (indexed_attention(q, k, v, index) ** 2).sum(), (0, 1, 2))
    dense = jax.value_and_grad(lambda q, k, v: (flash_attention(q, k, v, causal=True) ** 2).sum(), (0, 1, 2))
    for a, b in zip(jax.tree.leaves(sparse(query, key, value)), jax.tree.leaves(dense(query, key, value)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_gradients_go_to_what_was_chosen_alone():
    query, key, value = normal(0, 1, 2, 1, 8), normal(1, 1, 1, 6, 8), normal(2, 1, 1, 6, 4)
    index = jnp.array([[[4, -1, 1]]])
    slope = jax.grad(lambda q, k, v: (indexed_attention(q, k, v, index) ** 2).sum(), (0, 1, 2))
    _, dkey, dvalue = slope(query, key, value)
    for gradient in (dkey, dvalue):
        assert np.flatnonzero(np.abs(gradient).sum((0, 1, 3))).tolist() == [1, 4]


def test_errors_name_the_argument():
    query, key, index = jnp.ones((1, 2, 3, 4)), jnp.ones((1, 1, 5, 4)), jnp.zeros((1, 3, 2), jnp.int32)
    calls = {
        "`indices` has dtype float32": lambda: indexed_attention(query, key, key, index.astype(jnp.float32)),
        "`value` and `value_dim` are both absent": lambda: indexed_attention(query, key, None, index),
        "`value` and `value_dim` are both set": lambda: indexed_attention(query, key, key, index, value_dim=2),
        "`value_dim` is 9.*at most 4": lambda: indexed_attention(query, key, None, index, value_dim=9),
        r"`indices` has shape \(1, 2, 2\)": lambda: indexed_attention(query, key, key, index[:, :2]),
        "`key` has dtype bfloat16": lambda: indexed_attention(query, key.astype(jnp.bfloat16), key, index),
        "`top_k` is 0": lambda: lightning_index(query, key[0], jnp.ones((1, 3, 2)), top_k=0),
        r"`weights` has shape \(1, 2, 3\)": lambda: lightning_index(query, key[0], jnp.ones((1, 2, 3)), top_k=1),
    }
    for text, call in calls.items():
        with pytest.raises(ShapeError, match=text):
            call()
