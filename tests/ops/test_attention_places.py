"""Where queries stand and which keys exist, as operands of attention; packed sequences; attention in parts."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import contract
from vishwamai import (
    flash_attention,
    flash_attention_varlen,
    kernel_config,
    merge_attention,
    ragged_paged_attention,
)
from vishwamai.core.errors import ShapeError


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, want)


def running(implementation: str) -> Any:
    (impl,) = (i for i in contract.OPERATIONS["attention"].op.implementations if i.name == implementation)
    return contract.running(impl)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "implementation, places",
    [
        ("xla_chunked", "a segment"),
        ("xla_chunked", "rows in any order"),
        ("pallas_tpu", "rows in any order"),
        *(pytest.param("pallas_tpu", places, marks=pytest.mark.long) for places in ("a segment", "an offset")),
    ],
)
def test_tiles_that_values_hide_are_not_computed(implementation: str, places: str) -> None:
    """Over several tiles: the numbers and gradients of the definition, and NaN in a tile of keys that no query sees
    stays there.
    """
    q, k, v = normal(0, 1, 1, 200, 8), normal(1, 1, 1, 384, 8), normal(2, 1, 1, 384, 8)
    rows = np.arange(200) + 30
    options: dict[str, Any] = {"causal": True, "window": (100, 0)}
    if places == "a segment":
        options = {"kv_lens": jnp.array([230]), "kv_starts": jnp.array(3)}
    elif places == "an offset":
        options["q_offset"] = jnp.array([30])
    else:
        options["q_offset"] = jnp.asarray(np.random.default_rng(3).permutation(rows))[None]

    def run(q: Any, k: Any, v: Any, **how: Any) -> Any:
        out, pull = jax.vjp(lambda *x: flash_attention(*x, **options, **how), q, k, v)
        return out, pull(out)

    hidden = v.at[:, :, 256:].set(jnp.nan)
    want = run(q, k, v, implementation="xla")
    with running(implementation):
        got = jax.jit(lambda *x: run(*x, implementation=implementation, block_size=128))(q, k, hidden)
        got = jax.tree.map(np.asarray, got)
    close(got, want)


def test_an_offset_is_an_operand() -> None:
    """One program serves every offset; an int gives the same numbers."""
    q, k, v = normal(0, 2, 4, 16, 8), normal(1, 2, 2, 48, 8), normal(2, 2, 2, 48, 8)
    traces = []

    @jax.jit
    def run(offset: Any) -> Any:
        traces.append(offset)
        return flash_attention(q, k, v, causal=True, q_offset=offset, implementation="xla_chunked")

    for offset in (-20, 0, 32, 100):
        close(run(offset), flash_attention(q, k, v, causal=True, q_offset=offset, implementation="xla"))
    assert len(traces) == 1
    bottom = flash_attention(q, k, v, causal=True, causal_align="bottom_right")
    close(flash_attention(q, k, v, causal=True, q_offset=32), bottom)
    mapped = jax.vmap(lambda offset: flash_attention(q, k, v, causal=True, q_offset=offset, implementation="xla"))
    close(mapped(jnp.array([5, 9]))[1], run(9))


@pytest.mark.parametrize("rows", [4, 2048])
def test_positions_become_no_mask(rows: int) -> None:
    """A mask of 2048 rows by 4096 keys would be 8 MiB, and its steps four times that; keys are 1 MiB."""
    q, k = (jax.ShapeDtypeStruct((1, 1, n, 64), jnp.float32) for n in (rows, 4096))
    offset = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = jax.jit(lambda q, k, offset: flash_attention(q, k, k, causal=True, q_offset=offset))
    program = call.lower(q, k, offset).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**20


def test_nothing_asks_where_rows_stand() -> None:
    """Without causal mask or window an offset changes nothing, not even the kernel."""
    q, k, v = normal(0, 1, 2, 16, 8), normal(1, 1, 2, 16, 8), normal(2, 1, 2, 16, 8)
    with kernel_config(strict=True):
        np.testing.assert_array_equal(flash_attention(q, k, v, q_offset=jnp.array(3)), flash_attention(q, k, v))
    wide = flash_attention(q, k, v, window=(0, 2**40), implementation="xla")
    close(wide, flash_attention(q, k, v, window=(0, None), implementation="xla"))


def test_left_padding_is_the_sequence_alone() -> None:
    """A sequence that is padded on the left gives what it gives without padding."""
    q, k, v = normal(0, 2, 2, 40, 8), normal(1, 2, 2, 40, 8), normal(2, 2, 2, 40, 8)
    starts: Any = np.array([0, 13], np.int32)
    out = flash_attention(q, k, v, causal=True, kv_starts=starts)
    alone = flash_attention(q[1:, :, 13:], k[1:, :, 13:], v[1:, :, 13:], causal=True)
    close(out[1:, :, 13:], alone)
    assert not np.asarray(out[1, :, :13]).any()


def test_errors_of_places() -> None:
    q = normal(0, 2, 2, 16, 8)
    wrong: Any = (
        ({"q_offset": jnp.zeros(3, jnp.int32)}, "`q_offset` has shape (3,), but there are 2 batch elements of 16"),
        ({"q_offset": jnp.zeros((2, 5), jnp.int32)}, "pass an int, or integers of shape (), (2,) or (2, 16)"),
        ({"q_offset": jnp.zeros(2)}, "`q_offset` has dtype float32; pass integers"),
        ({"q_offset": 2**31}, "`q_offset` is 2147483648; pass a position between"),
        ({"q_offset": jnp.array(2**30)}, "`q_offset` holds 1073741824; pass values from"),
        ({"q_offset": 3, "causal_align": "bottom_right"}, "`q_offset` says where the queries stand"),
        ({"kv_lens": jnp.array([4, 17])}, "`kv_lens` holds 17; pass values from 0 to 16"),
        ({"kv_starts": jnp.zeros(3, jnp.int32)}, "`kv_starts` has shape (3,), but there are 2 batch elements"),
        ({"kv_lens": jnp.zeros(2)}, "`kv_lens` has dtype float32; pass integers"),
    )
    for options, text in wrong:
        with pytest.raises(ShapeError, match=re.escape(text)):
            flash_attention(q, q, q, causal=True, **options)


@pytest.mark.turns(4)
@pytest.mark.parametrize("causal_align", ["bottom_right", pytest.param("top_left", marks=pytest.mark.long)])
def test_starts_are_operands(causal_align: Any) -> None:
    """One program serves sequences of any lengths, with numbers that those of known starts have."""
    q, k, v = normal(0, 30, 2, 8), normal(1, 50, 2, 8), normal(2, 50, 2, 8)
    options: dict[str, Any] = {"causal": True, "causal_align": causal_align, "return_lse": True}
    traces = []

    @jax.jit
    def run(a: Any, b: Any) -> Any:
        traces.append(a)
        return flash_attention_varlen(q, k, v, a, b, implementation="xla_chunked", **options)

    a: Any
    b: Any
    for a, b in (([0, 9, 30], [0, 40, 50]), ([0, 0, 20], [0, 11, 23]), ([0, 7, 30], [0, 7, 30])):
        a, b = np.array(a, np.int32), np.array(b, np.int32)
        got = run(a, b)
        close(got, flash_attention_varlen(q, k, v, a, b, implementation="xla", **options))
        for n in range(2):
            at, of = slice(*a[n : n + 2]), slice(*b[n : n + 2])
            one = (x.swapaxes(0, 1)[None] for x in (q[at], k[of], v[of]))
            out, lse = flash_attention(*one, **options)
            close((got[0][at], got[1][:, at]), (out[0].swapaxes(0, 1), lse[0]))
    assert len(traces) == 1


def test_errors_of_starts() -> None:
    x = normal(0, 10, 2, 8)
    good: Any = np.array([0, 4, 10], np.int32)
    wrong: Any = (
        ((x, x, x, np.array([0, 4, 11]), good), "`cu_seqlens_q` is [0, 4, 11] ...; pass starts that rise from 0 to 10"),
        ((x, x, x, good, np.array([0, 4])), "`cu_seqlens_q` has 3 entries and `cu_seqlens_k` 2"),
        ((x, x, x, good, good, 5), "`max_seqlen_q` is 5, but a sequence has 6 positions"),
        ((x[None], x, x, good, good), "`query` has shape (1, 10, 2, 8); pass packed sequences"),
        ((x, x, x, good, good.astype(np.float32)), "`cu_seqlens_k` is float32 of shape (3,); pass integers"),
    )
    for arguments, text in wrong:
        with pytest.raises(ShapeError, match=re.escape(text)):
            flash_attention_varlen(*arguments)


def test_parts_merge_to_the_whole() -> None:
    """Ring attention by hand: every part of the keys with its offset, one program for all; values and gradients."""
    q, k, v = normal(0, 1, 4, 24, 8), normal(1, 1, 2, 48, 8), normal(2, 1, 2, 48, 8)
    options: dict[str, Any] = {"causal": True, "window": (30, None), "return_lse": True, "implementation": "xla"}

    def whole(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, q_offset=10, **options)

    def parts(q: Any, k: Any, v: Any) -> Any:
        def step(carry: Any, part: Any) -> Any:
            n, k, v = part
            found = flash_attention(q, k, v, q_offset=10 - 12 * n, **options)
            return merge_attention(*zip(carry, found, strict=True)), None

        cut = (x.reshape(1, 2, 4, 12, 8).transpose(2, 0, 1, 3, 4) for x in (k, v))
        start = jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf)
        return jax.lax.scan(step, start, (jnp.arange(4), *cut))[0]

    def gradients(run: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: sum((y**2).sum() for y in run(*x)), argnums=(0, 1, 2)))(q, k, v)

    close(parts(q, k, v), whole(q, k, v))
    close(gradients(parts), gradients(whole), 2e-4)


@pytest.mark.turns(4)
def test_merging_nothing() -> None:
    """Rows without keys in any part are 0 with logsumexp -inf, and nothing flows back."""
    empty, lse = jnp.zeros((2, 3, 4)), jnp.full((2, 3), -jnp.inf)
    out, merged = merge_attention((empty, empty), (lse, lse))
    assert not np.asarray(out).any() and np.isneginf(merged).all()
    slopes = jax.grad(lambda a, b: merge_attention((a, empty), (b, lse))[0].sum(), argnums=(0, 1))(empty, lse)
    assert all(not np.asarray(x).any() for x in slopes)
    full = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.zeros((3, 2))
    out, merged = merge_attention(*zip(full, full, strict=True), layout="bshd")
    assert out.dtype == jnp.bfloat16 and merged.shape == (3, 2)
    close(merged, np.full((3, 2), np.log(2)))


def test_errors_of_merging() -> None:
    x, lse = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3))
    wrong: Any = (
        ((), (), "one at least"),
        ((x, x), (lse,), "there are 2 `outputs` and 1 `lses`"),
        ((x, x[:1]), (lse, lse), "`outputs[1]` is float32 (1, 3, 4), but `outputs[0]` is float32 (2, 3, 4)"),
        ((x,), (lse.T,), "`lses[0]` has shape (3, 2), but the outputs (2, 3, 4) have one (2, 3); pass layout='bshd'"),
        ((x,), (lse.astype(int),), "`lses[0]` has dtype int32"),
    )
    for outputs, lses, text in wrong:
        with pytest.raises(ShapeError, match=re.escape(text)):
            merge_attention(outputs, lses)


@pytest.mark.turns(3)
def test_a_shared_prefix_over_pages() -> None:
    """A cascade: the prefix that two sequences share in one run of queries, each one's own pages in another."""
    pages = normal(0, 8, 4, 4, 16)
    query = normal(1, 2, 4, 16)
    starts, ends = jnp.array([0, 1, 2], jnp.int32), jnp.array([11, 14], jnp.int32)
    whole = jnp.array([[5, 2, 1, 0], [5, 2, 7, 6]], jnp.int32)
    shared = jnp.array([[5, 2]] * 2, jnp.int32)
    options: dict[str, Any] = {"return_lse": True, "max_q_len": 1, "implementation": "xla"}
    want = ragged_paged_attention(query, pages, ends, whole, starts, **options)
    prefix = ragged_paged_attention(query, pages, jnp.array([8, 8], jnp.int32), shared, starts, **options)
    rest = ragged_paged_attention(query, pages, ends - 8, whole[:, 2:], starts, **options)
    close(merge_attention(*zip(prefix, rest, strict=True)), want)
