"""Dropout bits: golden values, the same eager, jitted and inside a Pallas kernel, and spread as chance would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import contract
import oracle
from vishwamai.core import dropout

SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
GOLDEN_BITS = "00050697d33091c0930fdeca1d6a98dd"  # of the unbounded integers in tests/oracle.py
GOLDEN_SEEDS = ["0xac91290b", "0xf9807e00", "0x4d8729aa", "0x71a74530"]  # jax.random.bits of key 7


def keep(rows, columns, rate, seed=SEED, row_offset=0, column_offset=0):
    r, c = jnp.arange(rows)[:, None] + row_offset, jnp.arange(columns)[None, :] + column_offset
    return dropout.keep_mask(jnp.asarray(seed[0]), jnp.asarray(seed[1]), r, c, rate)


def test_golden_bits():
    """The bits are part of the format: a checkpointed run goes on with the same ones after an upgrade."""
    packed = np.packbits(np.asarray(keep(8, 16, 0.5)), axis=1)
    assert packed.tobytes().hex() == GOLDEN_BITS
    seeds = dropout.seeds(jax.random.key(7), 2, 3)
    assert seeds.shape == (2, 3, 2) and seeds.dtype == jnp.uint32
    assert [hex(int(x)) for x in seeds.reshape(-1)[:4]] == GOLDEN_SEEDS


def test_by_hand():
    """The same formula in unbounded integers, reduced modulo 2^32 step by step."""
    for rate in (0.1, 0.5, 0.9):
        expected = oracle.keep_mask(SEED[None, None], 37, 53, rate)[0, 0]
        np.testing.assert_array_equal(keep(37, 53, rate), expected)


def test_jit_and_offsets():
    """A block computed at its offset is that block of the whole."""
    whole = keep(64, 96, 0.3)
    np.testing.assert_array_equal(jax.jit(lambda: keep(64, 96, 0.3))(), whole)
    np.testing.assert_array_equal(keep(16, 32, 0.3, row_offset=24, column_offset=40), whole[24:40, 40:72])


def test_inside_a_kernel():
    def body(seed_ref, out_ref):
        i = pl.program_id(0)
        rows = i * 8 + jax.lax.broadcasted_iota(jnp.int32, (8, 1), 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, (1, 128), 1)
        kept = dropout.keep_mask(seed_ref[0, 0], seed_ref[0, 1], rows, columns, 0.25)
        out_ref[...] = kept.astype(jnp.float32)

    with contract.simulated_tpu():
        call = pl.pallas_call(
            body,
            grid=(3,),
            in_specs=[pl.BlockSpec((1, 2), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((24, 128), jnp.float32),
        )
        got = np.asarray(jax.jit(call)(jnp.asarray(SEED)[None]))
    np.testing.assert_array_equal(got != 0, keep(24, 128, 0.25))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_chance(rate):
    """Rows, columns and neighbours look independent: counts within five standard deviations."""
    n = 512
    kept = np.asarray(keep(n, n, rate), np.float64) - (1 - rate)
    variance = rate * (1 - rate)
    assert abs(kept.mean()) < 5 * np.sqrt(variance / n**2)
    for axis in (0, 1):
        assert np.abs(kept.mean(axis)).max() < 5.5 * np.sqrt(variance / n)
    for other in (np.roll(kept, 1, 0), np.roll(kept, 1, 1), np.roll(kept, 64, 1)):
        assert abs((kept * other).mean() / variance) < 5 / n
    across = (kept * kept.T)[~np.eye(n, dtype=bool)]  # each pair counts twice
    assert abs(across.mean() / variance) < 5 * np.sqrt(2) / n
    second = np.asarray(keep(n, n, rate, seed=SEED + np.uint32(1)), np.float64) - (1 - rate)
    assert abs((kept * second).mean() / variance) < 5 / n


def test_rates_at_the_ends():
    assert bool(keep(8, 8, 0.0).all())
    assert dropout.threshold(0.0) == 0 and dropout.threshold(1.0) == 1 << 24
    assert not bool(keep(8, 8, 1.0).any())
