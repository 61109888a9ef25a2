"""The block-sparse product: traced and static indices, gradients that are sparse too, lists and plans of the TPU
kernel, patterns, errors.

The numbers of every implementation are the contract suite's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
import oracle_sparse
from vishwamai import block_sparse_matmul
from vishwamai.core import hardware
from vishwamai.core.errors import ShapeError
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target
from vishwamai.ops.sparse import SPARSE, bigbird, block_indices, document, local, strided, tpu

RNG = np.random.default_rng(0)


def values_for(count, block=(8, 16), dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, *block)), dtype)


def spec_of(dense, values, indices, **options):
    (plan,) = record_plans(lambda x, v: block_sparse_matmul(x, v, indices, **options), dense, values)
    return plan.spec


def test_traced_indices_change_without_a_compilation():
    """The indices are data: one program serves every pattern with as many blocks."""
    traces = 0
    values = values_for(6)
    x = jnp.asarray(RNG.standard_normal((5, 32)), jnp.float32)

    @jax.jit
    def run(indices):
        nonlocal traces
        traces += 1
        return block_sparse_matmul(x, values, indices, shape=(32, 48))

    for seed in range(3):
        rng = np.random.default_rng(seed)
        indices = np.stack([rng.integers(0, 4, 6), rng.integers(0, 3, 6)], axis=1)
        expected = oracle_sparse.block_sparse_matmul(x, values, indices=indices, shape=(32, 48))
        contract.close(run(indices), expected.astype(jnp.float32), 1e-5)
    assert traces == 1


@pytest.mark.parametrize("traced", [False, True])
def test_rows_of_blocks(traced):
    """Block CSR means its own block COO, with empty rows at either end."""
    starts, columns = np.array([0, 0, 2, 3, 3]), np.array([2, 0, 1])
    values, x = values_for(3), jnp.asarray(RNG.standard_normal((5, 32)), jnp.float32)
    coordinates = np.array([[1, 2], [1, 0], [2, 1]])
    run = lambda *pair: block_sparse_matmul(x, values, pair, shape=(32, 48))  # noqa: E731
    got = jax.jit(run)(starts, columns) if traced else run(starts, columns)
    np.testing.assert_array_equal(got, block_sparse_matmul(x, values, coordinates, shape=(32, 48)))


def test_the_width_follows_from_static_indices():
    values, x = values_for(2), jnp.ones((3, 24))
    assert block_sparse_matmul(x, values, np.array([[0, 1], [2, 3]])).shape == (3, 64)
    assert block_sparse_matmul(jnp.ones((3, 64)), values, np.array([[0, 1], [2, 3]]), transpose=True).shape == (3, 24)


def test_the_gradient_of_the_values_stays_sparse():
    """Nothing of the size of the dense matrix is in the program of a training step."""
    size, block = 4096, 32
    indices = block_indices(local(size // block, 0))
    values = jax.ShapeDtypeStruct((len(indices), block, block), jnp.float32)
    x = jax.ShapeDtypeStruct((8, size), jnp.float32)

    def loss(values, x):
        return jnp.sum(block_sparse_matmul(x, values, indices, shape=(size, size)) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(values, x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4e6  # the matrix would be 67 MB


@pytest.mark.turns(3)
def test_second_order_goes_through_the_reference():
    values, x = values_for(2), jnp.asarray(RNG.standard_normal((3, 24)), jnp.float32)
    indices = np.array([[0, 1], [2, 0]])

    def loss(product):
        def run(values):
            inner = jax.grad(lambda x: jnp.sum(product(x, values) ** 3))(x)
            return jnp.sum(inner**2)

        return run

    ours = jax.grad(loss(lambda x, v: block_sparse_matmul(x, v, indices, shape=(24, 32))))(values)
    oracle = lambda x, v: oracle_sparse.block_sparse_matmul(x, v, indices=indices, shape=(24, 32))  # noqa: E731
    contract.close(ours, jax.grad(loss(oracle))(values).astype(jnp.float32), 1e-4)


@pytest.mark.parametrize("axis, targets", [(0, 5), (1, 4)])
def test_sorted_blocks(axis, targets):
    rng = np.random.default_rng(2)
    indices = np.stack([rng.integers(0, 5, (2, 12)), rng.integers(0, 3, (2, 12))], axis=-1).astype(np.int32)
    numbers, places, starts = (np.asarray(x) for x in tpu._sorted_blocks(jnp.asarray(indices), axis, targets))
    for n in range(2):
        own, edges = numbers[n * 12 : (n + 1) * 12], starts[n * (targets + 1) : (n + 1) * (targets + 1)]
        assert edges[0] == 0 and edges[-1] == 12
        assert (places[n * 12 : (n + 1) * 12] == indices[n, own, 1 - axis]).all()
        for target in range(targets):
            expected = np.flatnonzero(indices[n, :, axis] == target)
            np.testing.assert_array_equal(own[edges[target] : edges[target + 1]], expected)


@pytest.mark.parametrize("chip", hardware.TPUS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("m", [1, 100, 100_000])
@pytest.mark.parametrize("block", [(128, 128), (256, 512)], ids=str)
def test_plans_fit_the_chip(chip, m, block):
    for features in (4096, 16384):
        indices = block_indices(local(features // block[0], 1, 1, features // block[1]))
        x = jax.ShapeDtypeStruct((m, features), jnp.bfloat16)
        values = jax.ShapeDtypeStruct((len(indices), *block), jnp.bfloat16)
        spec = spec_of(x, values, indices, shape=(features, features))
        config = tpu.heuristic(spec, Target("tpu", chip))
        assert tpu.why_not(spec, Target("tpu", chip)) is None
        assert config.vmem_bytes <= chip.vmem_budget and config.buffers >= 2
        assert config.block_m % 16 == 0 and config.with_block_size(40).block_m <= 48


def test_declined_calls_name_the_reason():
    def reason(block=(128, 128), size=(512, 512), dtype=jnp.bfloat16, count=3):
        x, values = jax.ShapeDtypeStruct((8, size[0]), dtype), jax.ShapeDtypeStruct((count, *block), dtype)
        indices = np.zeros((count, 2), np.int32)
        return tpu.why_not(spec_of(x, values, indices, shape=size), Target("tpu", hardware.TPUS["v5e"]))

    assert reason() is None
    assert "multiples of 128, the lanes of a register" in (reason((64, 128)) or "")
    assert "`dense` is float16" in (reason(dtype=jnp.float16) or "")
    assert "an array is empty" in (reason(count=0) or "")
    assert "words of schedule, and scalar memory has" in (reason(count=90_000) or "")
    assert "more than the" in (reason(size=(1 << 22, 512)) or "")


@pytest.mark.long
@pytest.mark.parametrize("block_m", [16, None])
def test_tpu_kernel_over_several_steps(block_m):
    """Several panels of rows and columns, lists longer than the buffers, groups with lists of their own."""
    indices = block_indices(bigbird(6, 3, 1, 1))
    values = values_for(len(indices), (128, 128))
    x = jnp.asarray(RNG.standard_normal((40, 768)), jnp.float32)
    spec = spec_of(x, values, indices, shape=(768, 768))
    config = dataclasses.replace(tpu.heuristic(spec, Target("tpu")), panel=2, backward_panel=4, buffers=3, values_m=16)
    config = config if block_m is None else dataclasses.replace(config, block_m=block_m)

    def run(implementation, config=None):
        def both(x, values, indices):
            options = {"shape": (768, 768), "implementation": implementation, "config": config}
            out, pull = jax.vjp(lambda *a: block_sparse_matmul(*a, indices=indices, **options), x, values)
            return out, pull(jnp.cos(out))

        single = both(x, values, indices)
        other = jnp.stack([indices, indices[::-1, ::-1]])
        return single, jax.vmap(both, (None, None, 0))(x, values, other)

    expected = run("xla")
    with contract.simulated_tpu():
        got = jax.block_until_ready(run("pallas_tpu", config))
    contract.close(got, expected, 1e-4)


def test_patterns_by_their_definitions():
    i, j = np.arange(12)[:, None], np.arange(12)[None, :]
    np.testing.assert_array_equal(local(12, 2, 1), (j >= i - 2) & (j <= i + 1))
    np.testing.assert_array_equal(local(12, 2, 0, 20)[:, :12], (j >= i - 2) & (j <= i))
    np.testing.assert_array_equal(strided(12, 4), ((i - j < 4) | (j % 4 == 3)) & (j <= i))
    np.testing.assert_array_equal(strided(12, 4, causal=False), (abs(i - j) < 4) | (j % 4 == 3))


def test_bigbird():
    mask = bigbird(20, 3, 2, 4, seed=1, heads=3)
    assert mask[:, :2].all() and mask[:, :, :2].all()
    band = local(20, 1, 1)
    assert mask[:, band].all()
    rest = mask & ~(band | (np.arange(20) < 2) | (np.arange(20) < 2)[:, None])
    assert (rest.sum(2)[:, 2:] == 4).all() and (rest[0] != rest[1]).any()
    np.testing.assert_array_equal(mask, bigbird(20, 3, 2, 4, seed=1, heads=3))


@pytest.mark.parametrize("causal", [False, True])
def test_document(causal):
    lengths, rows, columns = [70, 1, 200, 29], 32, 50
    ids = np.repeat(np.arange(4), lengths)
    seen = ids[:, None] == ids[None, :]
    if causal:
        seen &= np.tri(300, dtype=bool)
    mask = document(lengths, rows, causal, columns)
    for a, b in np.ndindex(*mask.shape):
        block = seen[a * rows : (a + 1) * rows, b * columns : (b + 1) * columns]
        assert mask[a, b] >= block.any()
        if not causal:
            assert mask[a, b] == block.any()


GOOD: dict[str, Any] = {"dense": jnp.ones((3, 24)), "values": values_for(2), "indices": np.array([[0, 1], [2, 0]])}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dense": jnp.ones((3, 25)), "shape": (24, 32)}, r"`dense` has shape \(3, 25\).* pass 24 features"),
        ({"dense": jnp.ones((3, 24), jnp.bfloat16)}, "`values` has dtype float32, but `dense` has bfloat16"),
        ({"dense": jnp.ones((3, 24), jnp.int32)}, "`dense` has dtype int32"),
        ({"values": jnp.ones((2, 8))}, r"`values` has shape \(2, 8\)"),
        ({"indices": np.array([[0, 1]])}, r"`indices` has shape \(1, 2\), but .* 2 blocks.* \(2, 2\)"),
        ({"indices": np.array([[0, 1], [3, 0]])}, "block row 3, but there are 3; pass 0 to 2"),
        ({"indices": (np.array([0, 2, 1, 2]), np.array([0, 1]))}, "row_starts from 0 to 2"),
        ({"indices": (np.array([0, 1]), np.array([0]))}, "block columns, but `values` has 2 blocks"),
        ({"shape": (24, 30)}, "24 x 30, which are not multiples of its blocks, 8 x 16"),
        ({"shape": 24}, "`shape` is 24; pass"),
    ],
    ids=["features", "dtypes", "integers", "rank", "count", "row", "starts", "columns", "multiple", "shape"],
)
def test_errors(change, words):
    with pytest.raises(ShapeError, match=words):
        block_sparse_matmul(**{**GOOD, **change})


def test_traced_indices_need_a_shape():
    with pytest.raises(ShapeError, match="`indices` is traced.* pass `shape`"):
        jax.jit(lambda at: block_sparse_matmul(GOOD["dense"], GOOD["values"], at))(GOOD["indices"])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: local(-1, 2), "local: `blocks` is -1"),
        (lambda: strided(4, 0), "strided: `stride` is 0"),
        (lambda: bigbird(8, window=2), "bigbird: `window` is 2; pass an odd number"),
        (lambda: document([3, -1], 4), "document: `lengths` is"),
        (lambda: block_indices(np.ones((2, 2))), "block_indices: `mask` has shape"),
    ],
)
def test_errors_of_patterns(call, words):
    with pytest.raises(ShapeError, match=words):
        call()


def test_xla_serves_everything():
    assert (
        SPARSE.implementations[-1].why_not(spec_of(GOOD["dense"], GOOD["values"], GOOD["indices"]), Target("cpu"))
        is None
    )
