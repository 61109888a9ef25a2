"""Paged attention beyond the contract suite: what lies in unused memory, which pages are read, the in-place update,
errors, gradients, several devices.
"""

# Calls take NumPy arrays here, and values that are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import contract
import oracle_paged_attention
import rotation
import vishwamai
from vishwamai import aot, ragged_paged_attention, update_pages
from vishwamai.core import ffi
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.core.qtensor import bits
from vishwamai.ops.paged_attention import PAGED_ATTENTION, tpu_update
from vishwamai.ops.paged_attention import rows as paged_rows
from vishwamai.ops.paged_attention.cases import tables
from vishwamai.ops.paged_attention.spec import PagedSpec
from vishwamai.ops.paged_attention.tpu import PagedConfig

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")


NAMED = {impl.name: impl for impl in PAGED_ATTENTION.implementations}


def problem(runs, heads=(4, 2), dim=16, page_size=4, dtype=np.float32, seed=0, spare=3):
    """(query, kv_pages, kv_lens, page_indices, cu_q_lens)."""
    rng = np.random.default_rng(seed)
    inits, pages = tables(runs, page_size, spare=spare)
    query = rng.standard_normal((sum(q for q, _ in runs), heads[0], dim)).astype(dtype)
    pool = rng.standard_normal((pages, page_size, 2 * heads[1], dim)).astype(dtype)
    return query, pool, *(init.make(rng) for init in inits.values())


def poison_unused(pool, lens, table):
    """The pool with NaN in every row that no sequence owns."""
    page_size = pool.shape[1]
    owned = np.zeros(pool.shape[:2], bool)
    for length, row in zip(lens, table, strict=True):
        at = np.arange(length)
        owned[row[at // page_size], at % page_size] = True
    assert not owned.all()
    return np.where(owned[:, :, None, None], pool, np.nan).astype(pool.dtype)


def check(got, arrays, **options):
    expected = oracle_paged_attention.ragged_paged_attention(*arrays, **options)
    assert np.isfinite(np.asarray(got)).all()
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


RUNS = ((1, 5), (6, 11), (1, 1))


@pytest.mark.turns(4)
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_what_no_sequence_owns_is_never_seen(implementation):
    """NaN in free pages and past a sequence's end, and page tables whose unused entries name no page at all."""
    query, pool, lens, table, starts = problem(RUNS)
    pool = poison_unused(pool, lens, table)
    used = np.arange(table.shape[1]) < -(-lens[:, None] // pool.shape[1])
    wild = np.where(used, table, np.iinfo(np.int32).max).astype(np.int32)
    call = jax.jit(lambda *a: ragged_paged_attention(*a, implementation=implementation, max_q_len=6))
    with contract.running(NAMED[implementation]):
        got = jax.block_until_ready(call(query, pool, lens, wild, starts))
    check(got, (query, np.nan_to_num(pool), lens, table, starts))


@pytest.mark.turns(3)
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_num_seqs_is_an_argument(implementation):
    """Sequences from `num_seqs` on do not count, whatever their tables hold; their tokens' rows are 0. More queries
    than keys see nothing.
    """
    runs = ((2, 7), (3, 1), (2, 6))
    query, pool, lens, table, starts = problem(runs)
    call = jax.jit(lambda *a: ragged_paged_attention(*a, implementation=implementation, max_q_len=3))
    with contract.running(NAMED[implementation]):
        got = np.asarray(jax.block_until_ready(call(query, pool, lens, table, starts, np.int32(2))))
    check(got, (query, pool, lens, table, starts, 2))
    assert (got[5:] == 0).all() and (got[2:4] == 0).all() and (got[4] != 0).all()


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "dtype, unpack",
    [
        ("float8_e4m3fn", "b11fnuz"),
        pytest.param("float8_e5m2", "convert", marks=pytest.mark.long),
        pytest.param("int8", "convert", marks=pytest.mark.long),
        ("int4", "convert"),
    ],
)
def test_narrow_pages_by_the_chips_own_conversions(dtype, unpack):
    """Every code of the format, -0, NaN and infinity among them: as XLA has them, and what a head of one sequence
    stores reaches no other.
    """
    heads = (16, 8) if dtype == "int4" else (8, 4)
    query, pool, lens, table, starts = problem(((1, 70), (1, 3), (1, 32)), heads, 32, 8)

    def stored(codes):
        return codes.view(np.int8).astype(jnp.int4) if dtype == "int4" else codes.view(jnp.dtype(dtype))

    codes = np.random.default_rng(1).permutation(np.resize(np.arange(256, dtype=np.uint8), pool.size))
    special = ~np.isfinite(stored(codes).astype(np.float32))
    codes = np.where(special, 0x80, codes).reshape(pool.shape)
    pool = stored(codes)
    spoiled = codes.copy()
    spoiled[table[1, 0], 1, 2 * 2, 5] = 0xFF  # a key of sequence 1, head 2; of integers, -1
    options = {"max_q_len": 1, "k_scale": 0.01, "v_scale": 0.01}
    config = PagedConfig(64, chunk_keys=32, unpack=unpack)
    plain, ours = (
        jax.jit(lambda *a, how=how: ragged_paged_attention(*a, **options, **how))
        for how in ({"implementation": "xla"}, {"implementation": "pallas_tpu", "config": config})
    )
    for pages in (pool, stored(spoiled)):
        arguments = (jnp.asarray(query, jnp.bfloat16), jnp.asarray(pages), lens, table, starts)
        expected = np.asarray(plain(*arguments), np.float32)
        with contract.running(NAMED["pallas_tpu"]):
            got = np.asarray(jax.block_until_ready(ours(*arguments)), np.float32)
        assert np.isnan(expected).any() == (pages is not pool and not dtype.startswith("int"))
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2 * np.nanmax(np.abs(expected)))


@pytest.mark.turns(6)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([(2, 1), (6, 2)]),
    st.sampled_from([None, 0, 4]),
)
def test_any_batch(runs, page_size, heads, window):
    """Random runs, page sizes and windows: the reference is the definition."""
    runs = tuple((q, q + more) for q, more in runs)
    if not sum(q for q, _ in runs):
        return
    arrays = problem(runs, heads, 8, page_size)
    check(ragged_paged_attention(*arrays, window=window, implementation="xla"), arrays, window=window)


@pytest.mark.turns(3)
def test_latent_pages_may_be_wider_than_the_query():
    """Columns past the query's are no part of the products, and the update fills them with 0."""
    query, pool, lens, table, starts = problem(RUNS)
    pages = pool[:, :, 0]
    options: dict[str, Any] = {"latent_dim": 8, "scale": 0.3}
    pages[..., 12:] = 0
    got = ragged_paged_attention(query[..., :12], pages, lens, table, starts, **options)
    check(got, (query[..., :12], pages[..., :12], lens, table, starts), **options)
    rows = np.ones((8, 12), np.float32)
    written = np.asarray(update_pages(np.full_like(pages, 7.0), rows, None, lens, table, starts))
    assert {tuple(row) for row in written.reshape(-1, 16)} == {(7.0,) * 16, (1.0,) * 12 + (0.0,) * 4}


@pytest.mark.turns(4)
def test_as_flash_attention():
    """One sequence of which all tokens are new is causal attention; of which the last are, causal attention aligned
    bottom right.
    """
    for q_len, kv_len in ((13, 13), (5, 13)):
        query, pool, lens, table, starts = problem(((q_len, kv_len),))
        at = np.arange(kv_len)
        rows = pool[table[0, at // 4], at % 4]  # [keys, 2 * kv_heads, dim]
        q, k, v = (np.moveaxis(x, 1, 0)[None] for x in (query, rows[:, 0::2], rows[:, 1::2]))
        expected = vishwamai.flash_attention(q, k, v, causal=True, causal_align="bottom_right")
        got = ragged_paged_attention(query, pool, lens, table, starts)
        np.testing.assert_allclose(got, np.moveaxis(np.asarray(expected)[0], 1, 0), rtol=2e-5, atol=2e-5)


@pytest.mark.turns(3)
def test_a_gradient_is_an_error_that_explains_itself_and_offered_by_the_reference():
    query, pool, lens, table, starts = problem(RUNS)

    @functools.partial(jax.jit, static_argnums=2)
    def loss(query, pool, implementation):
        out = ragged_paged_attention(query, pool, lens, table, starts, softcap=3.0, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    with pytest.raises(UnsupportedError, match=r'no gradient.*flash_attention.*implementation="xla"'):
        jax.grad(loss)(query, pool, None)
    with jax.enable_x64(True):
        wide = query.astype(np.float64), pool.astype(np.float64)
        gradients = jax.grad(loss, (0, 1))(*wide, "xla")
        rng = np.random.default_rng(1)
        for i in range(2):
            step = 1e-5 * rng.standard_normal(wide[i].shape)
            high, low = list(wide), list(wide)
            high[i], low[i] = high[i] + step, low[i] - step
            ends = float(loss(high[0], high[1], "xla")), float(loss(low[0], low[1], "xla"))
            np.testing.assert_allclose(np.vdot(gradients[i], 2 * step), ends[0] - ends[1], rtol=1e-6)


def temporary_bytes(sequences, kv_len):
    runs = ((1, kv_len),) * sequences
    arrays = problem(runs, (4, 2), 64, 16)
    compiled = (
        jax.jit(lambda *a: ragged_paged_attention(*a, max_q_len=1, implementation="xla")).lower(*arrays).compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.turns(4)
def test_the_reference_holds_one_step_at_a_time():
    """Its memory does not grow with the length of the sequences, and with their number no faster than it."""
    small = temporary_bytes(8, 1024)
    assert temporary_bytes(8, 16384) <= 1.1 * small + 4096
    assert temporary_bytes(32, 1024) <= 5 * small


@pytest.mark.turns(6)
@needs_libtpu
def test_only_live_pages_are_read():
    """By the schedule: a batch with an eighth of the keys, or a window, moves about an eighth of the bytes, in the same
    program.
    """

    def case(length, window=None):
        arrays = [
            jax.ShapeDtypeStruct((8, 8, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((128, 64, 4, 128), jnp.bfloat16),
        ]
        table = np.arange(128, dtype=np.int32).reshape(8, 16)
        lens, starts = np.full(8, length, np.int32), np.arange(9, dtype=np.int32)
        call = lambda *a: ragged_paged_attention(*a, max_q_len=1, window=window)  # noqa: E731
        return aot.Inspection(call, (*arrays, lens, table, starts), target="v5e")

    found: Any = aot.inspect_many([case(1024), case(128), case(1024, window=100)])
    whole, few, windowed = (schedule.simulation.hbm_bytes for schedule in found)
    pages = 128 * 64 * 4 * 128 * 2
    assert pages <= whole <= 1.1 * pages
    assert few <= 0.25 * whole
    assert windowed <= 0.3 * whole


def new_rows(tokens, heads, dim, seed=7):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((tokens, heads, dim)).astype(np.float32) for _ in range(2)]


@pytest.mark.turns(3)
def test_update_then_attend():
    """What is written is what is attended to; rows of others stay; tokens past the last sequence are not written."""
    query, pool, lens, table, starts = problem(RUNS)
    key, value = new_rows(len(query) + 2, 2, 16)
    got = np.asarray(update_pages(pool, key, value, lens, table, starts))
    expected = pool.copy()
    for s in range(len(lens)):
        for i in range(starts[s + 1] - starts[s]):
            at = lens[s] - (starts[s + 1] - starts[s]) + i
            expected[table[s, at // 4], at % 4, 0::2] = key[starts[s] + i]
            expected[table[s, at // 4], at % 4, 1::2] = value[starts[s] + i]
    np.testing.assert_array_equal(got, expected)
    k_pages, v_pages = update_pages((pool[:, :, 0::2], pool[:, :, 1::2]), key, value, lens, table, starts)
    np.testing.assert_array_equal(k_pages, expected[:, :, 0::2])
    np.testing.assert_array_equal(v_pages, expected[:, :, 1::2])
    latent = update_pages(pool[:, :, 0], key[:, 0], None, lens, table, starts)
    np.testing.assert_array_equal(latent, expected[:, :, 0])
    few = np.asarray(update_pages(pool, key, value, lens, table, starts, 1))
    at = np.arange(5)
    mine = few[table[0, at // 4], at % 4]
    np.testing.assert_array_equal(mine, expected[table[0, at // 4], at % 4])
    assert (few != pool).any(axis=(2, 3)).sum() == 1


@pytest.mark.parametrize(
    "dtype, error", [("int8", 0.51 / 127), ("int4", 0.51 / 7), ("float8_e4m3fn", 2**-4), ("float8_e5m2", 2**-3)]
)
def test_update_of_narrow_pages(dtype, error):
    """Divided by their scales, rounded to the nearest and clipped; read back within half a unit."""
    _, pool, lens, table, starts = problem(RUNS)
    key, value = new_rows(8, 2, 16)
    most = {"int8": 127.0, "int4": 7.0}.get(dtype) or float(jnp.finfo(dtype).max)
    scales = (
        np.abs(key).max(axis=(0, 2)) / most,
        float(np.abs(value).max() / most / 2),
    )  # the largest values are clipped
    stored = np.zeros(pool.shape, jnp.dtype(dtype))
    rows = np.asarray(update_pages(stored, key, value, lens, table, starts, k_scale=scales[0], v_scale=scales[1]))
    at = np.arange(5, 11)  # positions of sequence 1's six new tokens
    mine = rows[table[1, at // 4], at % 4].astype(np.float32)
    np.testing.assert_allclose(mine[:, 0::2] * scales[0][:, None], key[1:7], rtol=error, atol=error * np.abs(key).max())
    limit = scales[1] * most
    np.testing.assert_allclose(
        mine[:, 1::2] * scales[1], np.clip(value[1:7], -limit, limit), rtol=error, atol=error * limit
    )


def cpu_update(pages, dtype, tokens, form="combined"):
    """(compiled program, arguments): the update of one sequence's tokens, pages donated."""
    shape = (pages, 16, 4, 128) if form == "combined" else (pages, 16, 512)
    rows = jnp.ones((tokens, *shape[2:]), jnp.bfloat16)[:, ::2] if form == "combined" else jnp.ones((tokens, 512))
    tables = jnp.array([tokens]), 1 + jnp.arange(tokens // 16 + 1)[None], jnp.array([0, tokens])

    def update(pool, *tables):
        return update_pages(pool, rows, rows if form == "combined" else None, *tables)

    arguments = jnp.zeros(shape, dtype), *(x.astype(jnp.int32) for x in tables)
    return jax.jit(update, donate_argnums=0).lower(*arguments).compile(), arguments


@pytest.mark.skipif(
    ffi.why_not(None, "vishwamai_update_pages") is not None, reason="the native module lacks the kernel"
)
class TestUpdateOnTheCpu:
    """XLA's own scatter copies the pool there."""

    @pytest.mark.parametrize("form", ["combined", "latent"])
    @pytest.mark.parametrize("tokens", [1, 20])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4", "float8_e4m3fn"])
    def test_it_copies_no_pool(self, dtype, tokens, form):
        """The program returns its argument's memory, needs less than a page besides, and writes what it should."""
        program, (pool, *tables) = cpu_update(64, dtype, tokens, form)
        text = program.as_text() or ""
        assert re.search(r"input_output_alias=\{[^}]*\{\}: \(0,", text)
        assert program.memory_analysis().temp_size_in_bytes < pool.nbytes / 3
        assert not re.search(r"= \w+\[(1,)?64,16,\S+ (copy|fusion|convert)\(", text)
        before = pool.unsafe_buffer_pointer()
        out = program(pool, *tables)
        assert out.unsafe_buffer_pointer() == before
        expected = np.zeros((64, 16), np.float32)
        expected[1 + np.arange(tokens) // 16, np.arange(tokens) % 16] = 1
        got = np.asarray(out, np.float32).reshape(64, 16, -1)
        np.testing.assert_array_equal(got, np.broadcast_to(expected[:, :, None], got.shape))

    @pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
    def test_time_follows_the_tokens_and_not_the_pool(self, dtype):
        """A pool 64 times as large takes about as long; a copy of it would take a hundred times as long."""
        times = {}
        for pages in (64, 4096):
            program, (pool, *tables) = cpu_update(pages, dtype, 1)
            pool = program(pool, *tables)
            each = []
            for _ in range(7):
                start = time.process_time()
                for _ in range(20):
                    pool = program(pool, *tables)
                jax.block_until_ready(pool)
                each.append(time.process_time() - start)
            times[pages] = min(each)
        assert times[4096] < 5 * times[64]

    @pytest.mark.parametrize("columns", [33, 34])
    def test_rows_of_4_bits_that_are_whole_bytes_or_not(self, columns):
        random = np.random.default_rng(columns)
        pool, rows = (jnp.asarray(random.integers(-7, 8, (*n, columns)), jnp.int4) for n in ((5, 4), (3,)))
        page, slot = jnp.array([4, 7, 0]), jnp.array([1, 0, 3])
        text = jax.jit(paged_rows.put).lower(pool, rows, page, slot).as_text()
        assert ("vishwamai_update_pages" in text) == (columns == 34)
        expected = pool.at[page, slot].set(rows, mode="drop")
        np.testing.assert_array_equal(jax.jit(paged_rows.put)(pool, rows, page, slot), expected)

    @pytest.mark.turns(3)
    def test_transforms(self):
        """vmap and the gradient are those of the scatter; a pool that is not donated stays."""
        query, pool, lens, table, starts = problem(RUNS)
        key, value = new_rows(len(query), 2, 16)
        pools = jnp.stack([pool, 2 * pool, 3 * pool])

        def update(pool, key):
            return update_pages(pool, key, value, lens, table, starts)

        each = jax.vmap(update, (0, None))(pools, key)
        for got, one in zip(each, pools, strict=True):
            np.testing.assert_array_equal(got, update(one, key))
        np.testing.assert_array_equal(pools[0], pool)
        weight = np.random.default_rng(0).standard_normal(pool.shape).astype(np.float32)
        of_pool, of_key = jax.grad(lambda *a: jnp.sum(weight * update(*a)), (0, 1))(jnp.asarray(pool), key)
        written = np.asarray(update(np.zeros_like(pool), np.ones_like(key)))[:, :, 0] != 0
        np.testing.assert_array_equal(of_pool, np.where(written[:, :, None], 0, weight))
        assert np.abs(of_key).min() > 0


@pytest.mark.turns(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 5, 300])  # the last: more than are under way at once, on both cores
def test_the_tpu_kernel_of_the_update_is_the_scatter(dtype, tokens):
    random = np.random.default_rng(tokens)
    pages, page_size = 12, 64
    heads, most = (8, 8) if dtype == "int4" else (4, 100)
    pool, rows = (
        jnp.asarray(random.integers(-most, most, (n, *shape, heads, 128)), dtype)
        for n, shape in ((pages, (page_size,)), (tokens, ()))
    )
    # Half of the rows stand one after the other.
    run = np.arange(3, 3 + tokens // 2)
    others = random.permutation(np.arange(len(run) + 3, pages * page_size))
    place = np.concatenate((run, others[: tokens - len(run)]))
    lost = (np.arange(tokens) % 7 == 3) & (np.arange(tokens) >= len(run))
    page = np.where(lost, random.choice([-1, pages, 2 * pages], tokens), place // page_size)
    page, slot = jnp.asarray(page, jnp.int32), jnp.asarray(place % page_size, jnp.int32)
    with contract.simulated_tpu():
        got = jax.jit(tpu_update.put)(pool, rows, page, slot)
    dropped = jnp.where(page < 0, pages, page)  # a negative index would count from the end
    np.testing.assert_array_equal(got, pool.at[dropped, slot].set(rows, mode="drop"))


@needs_libtpu
@pytest.mark.parametrize("chip", rotation.in_turn(5, TPUS))
def test_the_tpu_kernel_of_the_update_takes_less_time_than_the_scatter(chip):
    """A prompt's 2048 rows, by the compiler's schedule, in which both begin with a copy of the pool."""
    pool = jax.ShapeDtypeStruct((2048, 64, 16, 128), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((2048, 16, 128), jnp.bfloat16)
    places = [place.astype(np.int32) for place in np.divmod(np.arange(2048), 64)]
    found = {}
    for name in ("pallas_tpu", "xla"):
        with vishwamai.kernel_config(implementation=name, target=chip):
            found[name] = aot.inspect(paged_rows.put, (pool, rows, *places), target=chip)
    assert any("update_pages" in one.name for one in found["pallas_tpu"].simulation.programs)
    assert found["pallas_tpu"].seconds < found["xla"].seconds - 80e-6


@needs_libtpu
@pytest.mark.parametrize(
    "form, heads, dtype, kernel",
    [
        ("combined", 8, "bfloat16", True),
        ("latent", 1, "bfloat16", False),
        ("combined", 4, "int4", True),
        pytest.param("combined", 2, "int4", False, marks=pytest.mark.long),
        pytest.param("combined", 3, "int8", False, marks=pytest.mark.long),
    ],
)
def test_the_update_is_in_place(form, heads, dtype, kernel):
    """With the pages donated, the compiled program returns its argument's own memory and makes no copy of the pool."""
    shape = (512, 16, 2 * heads, 128) if form == "combined" else (2048, 64, 640)
    pages = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    rows = jax.ShapeDtypeStruct((64, heads, 128) if form == "combined" else (64, 576), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((64,), (64, 8), (65,))]

    def update(pages, rows, *tables):
        return update_pages(pages, rows, rows if form == "combined" else None, *tables)

    program = aot.compile_for(jax.jit(update, donate_argnums=0), pages, rows, *ints, target="v5e")
    assert re.search(r"input_output_alias=\{[^}]*\{\}: \(0,", program.text), program.text[:300]
    assert program.memory.temporaries < int(np.prod(shape)) * bits(dtype) / 8 / 4
    dims = ",".join(map(str, shape))
    assert not re.findall(rf"= \w+\[{dims}\]\S* copy\(", program.text)
    assert ("tpu_custom_call" in program.text) == kernel


def trees(columns, sequences=2, new=16, length=1500):
    """Arguments of a batch of trees, the tables known."""
    arrays = [
        jax.ShapeDtypeStruct((sequences * new, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((sequences * 96, 16, 16, 128), jnp.bfloat16),
    ]
    table = np.arange(sequences * 96, dtype=np.int32).reshape(sequences, 96)
    lens, starts = np.full(sequences, length, np.int32), new * np.arange(sequences + 1, dtype=np.int32)
    return (*arrays, lens, table, starts), np.ones((sequences * new, columns), bool)


@pytest.mark.turns(5)
@needs_libtpu
def test_a_tree_costs_its_own_blocks_only():
    """By the schedule on v5e: blocks without new tokens run the code of a call without the mask."""

    def time(columns):
        arrays, tree = trees(max(columns, 1))
        options = {"max_q_len": 16, "tree_mask": tree if columns else None, "implementation": "pallas_tpu"}
        return aot.Inspection(lambda *a: ragged_paged_attention(*a, **options), arrays, target="v5e")

    found: Any = aot.inspect_many([time(0), time(16)])
    plain, tree = (schedule.seconds for schedule in found)
    assert plain < tree < 1.1 * plain


def test_a_tree_of_many_columns_is_declined():
    def verdict(columns):
        arrays, tree = trees(columns)
        (call,) = vishwamai.explain(ragged_paged_attention, *arrays, tree_mask=tree, target="v5e").calls
        return call

    assert verdict(1024).runs == "pallas_tpu"
    assert verdict(1025).runs == "xla" and "`tree_mask` has 1025 columns" in verdict(1025).verdicts[0].reason


def test_heads_are_split_over_explicit_axes():
    """Heads of query and pages live on the same devices, and so does the result; the numbers are those of one
    device.
    """
    query, pool, lens, table, starts = problem(RUNS, heads=(8, 4))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((query, pool), (P(None, "x"), P(None, None, "x")), strict=True)
        ]
        got = jax.jit(ragged_paged_attention)(*placed, lens, table, starts)
        assert jax.typeof(got).sharding.spec == P(None, "x", None)
    check(got, (query, pool, lens, table, starts))


def token_scales(arguments, dtype=np.float32):
    pages, page_size, rows, _ = arguments["kv_pages"].shape
    return np.ones((pages, page_size, rows // 2, 1), dtype)


ERRORS = {
    "rank of pages": (lambda a: a | {"kv_pages": a["kv_pages"][0, 0]}, r"`kv_pages` has shape \(4, 16\)"),
    "odd rows": (
        lambda a: a | {"kv_pages": a["kv_pages"][:, :, :3]},
        r"`kv_pages` has shape \(\d+, \d+, 3, 16\).*2 \* heads.*keys and values in turn",
    ),
    "kv_lens": (
        lambda a: a | {"kv_lens": a["kv_lens"][:2]},
        r"`page_indices` has shape \(3, \d+\), but `kv_lens` has 2 sequences in its last axis; pass `page_indices` of "
        r"shape \(2, entries\)",
    ),
    "cu_q_lens": (
        lambda a: a | {"cu_q_lens": a["cu_q_lens"][:3]},
        r"`cu_q_lens` has shape \(3,\).*of shape \(4,\), where",
    ),
    "int64": (lambda a: a | {"kv_lens": a["kv_lens"].astype(np.float32)}, "`kv_lens` is float32"),
    "heads": (
        lambda a: a | {"query": a["query"][:, :3]},
        r"`query` has 3 heads in axis -2; pass .*2 \* heads, 16\) where heads divides 3",
    ),
    "head_dim": (
        lambda a: a | {"query": a["query"][..., :8]},
        r"`kv_pages` has shape .*`query` has head_dim = 8 in its last axis",
    ),
    "window": (lambda a: a | {"window": (4, 2)}, r"`window` is \(4, 2\)"),
    "softcap": (lambda a: a | {"softcap": 0.0}, "`softcap` is 0.0"),
    "latent_dim": (lambda a: a | {"latent_dim": 8}, "`latent_dim` is 8 with key and value pages"),
    "latent scale": (
        lambda a: a | {"kv_pages": a["kv_pages"][:, :, 0], "latent_dim": 8},
        "`scale` is None with latent",
    ),
    "sinks": (lambda a: a | {"sinks": np.zeros(2)}, r"`sinks` has shape \(2,\)"),
    "tree_mask": (
        lambda a: a | {"tree_mask": np.ones((7, 3), bool)},
        r"`tree_mask` has shape \(7, 3\), but `query` has 8 tokens in axis -3; pass `tree_mask` of shape \(8, "
        r"columns\), a row for each query",
    ),
    "tree_mask dtype": (lambda a: a | {"tree_mask": np.ones((8, 3), np.int32)}, r"`tree_mask`.*int32"),
    "tree_mask columns": (lambda a: a | {"tree_mask": np.ones((8, 0), bool)}, r"`tree_mask` is bool\[8,0\]; pass bool"),
    "q_scale": (lambda a: a | {"q_scale": np.ones(3)}, r"`q_scale` has shape \(3,\)"),
    "out_dtype": (lambda a: a | {"out_dtype": "float16"}, "`out_dtype` is .*float16.* with queries of float32"),
    "out_dtype of int8": (
        lambda a: a | {"query": a["query"].astype(np.int8), "out_dtype": "int8"},
        "`out_dtype` is .*int8.*; pass one of bfloat16",
    ),
    "query of int32": (
        lambda a: a | {"query": a["query"].astype(np.int32)},
        "`query` has dtype int32; pass one of.*int8",
    ),
    "k_scale": (lambda a: a | {"k_scale": np.ones(3)}, r"`k_scale` has shape \(3,\)"),
    "k_scale of tokens": (
        lambda a: a | {"k_scale": np.ones((*a["kv_pages"].shape[:3], 1), np.float32)},
        r"`k_scale` has shape .*a scale of each token and kv head of the pages, or pass a number",
    ),
    "k_scale of tokens in float16": (
        lambda a: a | {"k_scale": token_scales(a, np.float16)},
        "`k_scale` is float16.*32",
    ),
    "scales of tokens and of heads": (
        lambda a: a | {"k_scale": token_scales(a), "v_scale": 0.5},
        r"`v_scale` \(2,\); pass scales of tokens, or of heads, for both",
    ),
    "max_q_len": (lambda a: a | {"max_q_len": 0}, "`max_q_len` is 0"),
    "num_seqs": (
        lambda a: a | {"num_seqs": np.ones(2, np.int32)},
        r"`num_seqs` has shape \(2,\); pass `num_seqs` of shape \(1,\), or an int",
    ),
}


def test_quantized_queries_are_those_that_they_stand_for():
    """Numbers of 8 bits times a scale for each kv head: as the same numbers in float32."""
    query, pool, lens, table, starts = problem(RUNS)
    codes = np.clip(np.round(query * 40), -127, 127).astype(np.int8)
    scale = np.array([0.02, 0.03], np.float32)
    got = ragged_paged_attention(codes, pool, lens, table, starts, q_scale=scale, k_scale=0.5, out_dtype=np.float32)
    assert got.dtype == np.float32
    plain = codes * np.repeat(scale, 2)[:, None]
    check(got, (plain.astype(np.float32), pool, lens, table, starts), k_scale=0.5)
    assert ragged_paged_attention(codes, pool, lens, table, starts).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    arrays = dict(zip(("query", "kv_pages", "kv_lens", "page_indices", "cu_q_lens"), problem(RUNS), strict=True))
    change, match = ERRORS[name]
    with pytest.raises(ShapeError, match=match):
        ragged_paged_attention(**change(arrays))


def test_update_errors():
    _, pool, lens, table, starts = problem(RUNS)
    key, value = new_rows(8, 2, 16)
    with pytest.raises(ShapeError, match=r"`value` is None"):
        update_pages(pool, key, None, lens, table, starts)
    with pytest.raises(
        ShapeError, match=r"`key` has shape \(8, 1, 16\).*`kv_pages` has 2 heads.*of shape \(tokens, 2, 16\)"
    ):
        update_pages(pool, key[:, :1], value, lens, table, starts)
    with pytest.raises(ShapeError, match="latent pages, which hold keys only"):
        update_pages(pool[:, :, 0], key[:, 0], value, lens, table, starts)


def test_a_page_table_too_large_for_scalar_memory_is_declined():
    def struct(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    bf16 = jnp.bfloat16
    args = (
        struct(256, 8, 128, dtype=bf16),
        struct(9, 1, 4, 128, dtype=bf16),
        struct(256),
        struct(256, 4096),
        struct(257),
    )
    (call,) = vishwamai.explain(ragged_paged_attention, *args, target="v5e").calls
    assert isinstance(call.spec, PagedSpec) and call.runs == "xla"
    assert "page table has 1,048,576 entries" in call.verdicts[0].reason
