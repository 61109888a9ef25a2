"""`update_pages` with `rope_tables`: the new keys are rotated by their positions on their way into the pages."""

# Calls take NumPy arrays here, and values that are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vishwamai import RotaryCache, aot, apply_rope, kernel_config, ragged_paged_attention, update_pages
from vishwamai.core.errors import ShapeError
from vishwamai.ops.paged_attention.cases import tables

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")

RUNS = ((1, 5), (6, 11), (1, 1))
DIM, HEADS, POSITIONS = 16, 2, 12


def problem(form, dtype="float32", pages=None):
    """(kv_pages, key, value, kv_lens, page_indices, cu_q_lens)."""
    rng = np.random.default_rng(0)
    inits, number = tables(RUNS, 4)
    key, value = (rng.standard_normal((8, HEADS, DIM)).astype(jnp.dtype(dtype)) for _ in range(2))
    shape = {"combined": (2 * HEADS, DIM), "separate": (HEADS, DIM), "latent": (DIM + 2,)}[form]
    pool = rng.integers(-3, 3, (number, 4, *shape)).astype(jnp.dtype(pages or dtype))
    pools = (pool, pool[::-1].copy()) if form == "separate" else pool
    rows = (key[:, 0], None) if form == "latent" else (key, value)
    return pools, *rows, *(np.asarray(init.make(rng)) for init in inits.values())


def by_apply_rope(key, pairs, interleaved):
    """(the rotated keys, the tables) of the positions that the keys of RUNS have."""
    positions = np.concatenate([np.arange(length - new, length) for new, length in RUNS])
    latent = key.ndim == 2
    cache = RotaryCache(2 * pairs if latent else DIM, POSITIONS, rotary_dim=2 * pairs)
    rest, turning = (key[:, : DIM - 2 * pairs], key[:, None, DIM - 2 * pairs :]) if latent else (key[:, :0], key)
    turned = apply_rope(turning[None], positions, cache=cache, interleaved=interleaved, layout="bshd")[0]
    return jnp.concatenate([rest, turned[:, 0]], 1) if latent else turned, (cache.cos, cache.sin)


@pytest.mark.turns(3)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [DIM // 2, 3])
@pytest.mark.parametrize("form", ["combined", "separate", "latent"])
@pytest.mark.parametrize("dtype, pages", [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_as_apply_rope_then_the_update(dtype, pages, form, pairs, interleaved):
    """All else stays bit by bit. A rotated feature of float32 may differ by the rounding of one product, for a compiler
    may fuse it with the sum; of bfloat16 these round to the same.
    """
    pools, key, value, *places = problem(form, dtype, pages)
    turned, rope_tables = by_apply_rope(key, pairs, interleaved)
    scales = {"k_scale": 0.03} | ({} if form == "latent" else {"v_scale": 0.02}) if pages else {}
    want = update_pages(pools, turned, value, *places, **scales)
    call = functools.partial(update_pages, rope_tables=rope_tables, interleaved=interleaved, **scales)
    for got in (call(pools, key, value, *places), jax.jit(call)(pools, key, value, *places)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            if dtype == "bfloat16":
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            else:
                np.testing.assert_allclose(a, b, rtol=0, atol=2**-24 * 2 * np.abs(key).max())


@pytest.mark.turns(3)
def test_float64_turns_in_float64():
    with jax.enable_x64(True):
        pools, key, value, *places = problem("combined", "float64")
        angles = np.arange(POSITIONS)[:, None] * np.array([1.0, 0.1])
        got = update_pages(pools, key, value, *places, rope_tables=(np.cos(angles), np.sin(angles)))
        at = np.arange(5, 11)
        turned = key[1:7, :, 0] * np.cos(at)[:, None] - key[1:7, :, 2] * np.sin(at)[:, None]
        rows = np.asarray(got)[places[1][1, at // 4], at % 4]
        np.testing.assert_allclose(rows[:, 0::2, 0], turned, rtol=1e-14, atol=1e-14)


def test_attention_to_the_pages_is_rotary():
    """Queries by `apply_rope`, keys by the update: as if both had been rotated before."""
    pools, key, value, *places = problem("combined")
    query = np.random.default_rng(1).standard_normal((8, 4, DIM)).astype(np.float32)
    turned, rope_tables = by_apply_rope(key, DIM // 2, False)
    query, _ = by_apply_rope(query, DIM // 2, False)
    pages = [update_pages(pools, turned, value, *places), update_pages(pools, key, value, *places, None,
             rope_tables=rope_tables)]  # fmt: skip
    np.testing.assert_allclose(*(ragged_paged_attention(query, x, *places) for x in pages), rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4)
def test_transforms():
    """vmap, and the gradient, which turns back."""
    pools, key, value, *places = problem("separate")
    _, rope_tables = by_apply_rope(key, DIM // 2, False)
    update = lambda key: update_pages(pools, key, value, *places, rope_tables=rope_tables)[0]  # noqa: E731
    keys = jnp.stack([key, key + key])
    for got, one in zip(jax.vmap(update)(keys), keys, strict=True):
        np.testing.assert_allclose(got, update(one), rtol=1e-6, atol=1e-6)
    weight = np.random.default_rng(2).standard_normal(pools[0].shape).astype(np.float32)
    gradient = jax.grad(lambda key: jnp.vdot(weight, update(key)))(jnp.asarray(key))
    difference = jnp.vdot(weight, update(key) - update(np.zeros_like(key)))  # the update is linear in the keys
    np.testing.assert_allclose(jnp.vdot(gradient, key), difference, rtol=1e-4)
    # A rotation keeps lengths.
    at = [(places[1][s, p // 4], p % 4) for s, (new, length) in enumerate(RUNS) for p in range(length - new, length)]
    for row, (page, slot) in enumerate(at):
        np.testing.assert_allclose(jnp.linalg.norm(gradient[row]), np.linalg.norm(weight[page, slot]), rtol=1e-5)


def test_positions_past_the_tables():
    """An error where the lengths are known, or with checks; else NaN, in no row but those of such positions."""
    pools, key, value, *places = problem("combined")
    short = np.ones((10, 4), np.float32), np.zeros((10, 4), np.float32)
    update = functools.partial(update_pages, rope_tables=short)
    text = r"`kv_lens` has 11 at \[1\], but `rope_tables` have 10 positions; pass tables of 11 positions or more"
    with pytest.raises(ShapeError, match=text):
        update(pools, key, value, *places)
    got = np.asarray(jax.jit(update)(pools, key, value, *places))
    spoiled = np.zeros(got.shape, bool)
    spoiled[places[1][1, 2], 2, 0::2, :8] = True  # position 10 of sequence 1
    np.testing.assert_array_equal(np.isnan(got), spoiled)
    with kernel_config(checks=True):
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(jax.jit(update)(pools, key, value, *places))
        jax.effects_barrier()
    lens = np.array([5, 11, 1], np.int32)
    nothing_new = np.array([0, 1, 1, 2], np.int32)  # sequence 1, past the tables, has no new token
    assert np.isfinite(update(pools, key, value, lens, places[1], nothing_new)).all()


ONES = np.ones((POSITIONS, 4), np.float32)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"interleaved": True}, "`interleaved` is True without `rope_tables`"),
        ({"rope_tables": (ONES,)}, r"`rope_tables` is (.|\n)*of type tuple; pass a pair"),
        ({"rope_tables": ONES}, "`rope_tables`"),
        ({"rope_tables": (ONES, ONES[:, :3])}, r"float32\[12,4\] and float32\[12,3\].*16 features.*of 1 to 8 pairs"),
        ({"rope_tables": (np.ones((9, 9)), np.ones((9, 9)))}, "16 features.*of 1 to 8 pairs"),
        ({"rope_tables": (ONES.astype(int), ONES.astype(int))}, r"pass cos and sin, floats \[positions, pairs\]"),
        ({"rope_tables": (ONES[None], ONES[None])}, r"pass cos and sin, floats \[positions, pairs\]"),
    ],
)
def test_errors_name_the_argument(options, match):
    pools, key, value, *places = problem("combined")
    with pytest.raises(ShapeError, match=f"update_pages: .*{match}"):
        update_pages(pools, key, value, *places, **options)


@pytest.mark.turns(4)
@needs_libtpu
@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=pytest.mark.long)])
def test_on_a_tpu_no_rotated_keys_go_through_hbm(interleaved):
    """Compared with the plain update the program moves the tables and no more, of a prompt's 2048 keys of 4 MiB."""
    pools = (jax.ShapeDtypeStruct((64, 64, 8, 128), jnp.bfloat16),) * 2
    rows = jax.ShapeDtypeStruct((2048, 8, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    places = np.array([2048], np.int32), np.arange(32, dtype=np.int32)[None], np.array([0, 2048], np.int32)

    def rotating(pools, key, value, cos, sin, *places):
        return update_pages(pools, key, value, *places, rope_tables=(cos, sin), interleaved=interleaved)

    def plain(pools, key, value, cos, sin, *places):
        return update_pages(pools, key, value, *places)

    inspections = [
        aot.Inspection(f, (pools, rows, rows, table, table, *places), target="v5e") for f in (plain, rotating)
    ]
    found: Any = aot.inspect_many(inspections)
    few, more = (schedule.simulation.hbm_bytes for schedule in found)
    assert more - few < 1.1 * 2 * 2048 * 64 * 4
