"""Paged attention for GPUs beyond the contract: other tiles and splits, what lies in unused memory, vmap, torch
tensors, the update in place.

Run as they are, torch's tensors on the CPU are served by XLA; under TRITON_INTERPRET=1 (`make test-gpu`) by the Triton
kernels, interpreted.
"""

# Calls take NumPy arrays here.
# pyright: reportArgumentType=false

import contextlib
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import oracle_paged_attention  # noqa: E402
import vishwamai  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import from_numpy, to_numpy, triton_serves  # noqa: E402
from vishwamai.aot.compile.gpu import RecordedLaunch, inspect_launch, launches  # noqa: E402
from vishwamai.core import gpu as core_gpu  # noqa: E402
from vishwamai.core import triton_private  # noqa: E402
from vishwamai.core.cases import ArrayInit  # noqa: E402
from vishwamai.core.errors import ShapeError, UnsupportedError  # noqa: E402
from vishwamai.core.observe import record_plans  # noqa: E402
from vishwamai.core.target import Target  # noqa: E402
from vishwamai.core.triton_launch import POINTERS, KernelParameters  # noqa: E402
from vishwamai.ops.paged_attention import PAGED_ATTENTION  # noqa: E402
from vishwamai.ops.paged_attention.cases import ForwardCase, tables  # noqa: E402
from vishwamai.ops.paged_attention.gpu import TRITON, notes, why_not  # noqa: E402
from vishwamai.ops.paged_attention.gpu_tiles import PagedGpuConfig, heuristic  # noqa: E402
from vishwamai.ops.paged_attention.gpu_update import put, update  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402

pytestmark = pytest.mark.interpreter

interpreter = pytest.mark.skipif(not contract.TRITON, reason="for Triton's interpreter: make test-gpu")
native = pytest.mark.skipif(contract.TRITON, reason="the same without Triton")
interpreted_or_long = () if contract.TRITON else pytest.mark.long


@pytest.fixture(autouse=True)
def kernels():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


RUNS = ((1, 21), (6, 11), (0, 5), (2, 40))


def problem(runs=RUNS, heads=(4, 2), dim=16, page_size=4, seed=0):
    """(query, kv_pages, kv_lens, page_indices, cu_q_lens): NaN in pages where no sequence has a token, no page at all
    in entries that none uses.
    """
    rng = np.random.default_rng(seed)
    inits, pages = tables(runs, page_size)
    query = rng.standard_normal((sum(q for q, _ in runs) + 2, heads[0], dim)).astype(np.float32)
    pool = rng.standard_normal((pages, page_size, 2 * heads[1], dim)).astype(np.float32)
    lens, table, starts = (init.make(rng) for init in inits.values())
    owned, used = np.zeros(pool.shape[:2], bool), np.zeros(table.shape, bool)
    for s, length in enumerate(lens):
        at = np.arange(length)
        owned[table[s, at // page_size], at % page_size] = used[s, at // page_size] = True
    return (
        query,
        np.where(owned[..., None, None], pool, np.nan),
        lens,
        np.where(used, table, 2**31 - 1).astype(np.int32),
        starts,
    )


def expected(arrays, **options):
    query, pool, lens, table, starts = arrays
    return oracle_paged_attention.ragged_paged_attention(query, np.nan_to_num(pool), lens, table, starts, **options)


def on_torch(arrays):
    return [from_numpy(x) for x in arrays]


# Tiles of short runs, of long ones, splits, options, heads: both launches, one alone, splits without keys, a group
# wider than a tile.
TILES = [
    (16, 16, 1, {}, (8, 2)),
    (16, 32, 4, {"window": 9, "sinks": True, "slopes": True, "return_lse": True}, (8, 2)),
    (16, 32, 4, {"tree": 4, "sinks": True}, (8, 2)),
    (32, 32, 2, {"softcap": 2.0, "max_q_len": 6, "sinks": True, "return_lse": True}, (4, 1)),
    (16, 16, 1, {"softcap": 2.0, "return_lse": True}, (8, 2)),
    pytest.param(16, 16, 2, {"max_q_len": 6}, (40, 2), marks=pytest.mark.long),
]


@interpreter
@pytest.mark.parametrize("rows, long_rows, splits, options, heads", TILES, ids=str)
def test_tiles_and_splits(rows, long_rows, splits, options, heads):
    """The same numbers whatever the tiles: NaN in unowned memory never shows, wild entries are never read, rows of no
    sequence are 0, and their logsumexp -inf.
    """
    arrays = problem(heads=heads)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = np.linspace(-1, 2, heads[0], dtype=np.float32)
    if options.pop("slopes", False):
        options["alibi_slopes"] = np.linspace(0.5, 0.01, heads[0], dtype=np.float32)
    if columns := options.pop("tree", 0):
        options["tree_mask"] = np.random.default_rng(1).random((len(arrays[0]), columns)) < 0.7
    config = PagedGpuConfig(rows, 16, 4, 2, splits, long_rows, 16, 4, 2)
    call = jax.jit(lambda *a: vishwamai.ragged_paged_attention(*a, **options, implementation="triton", config=config))
    got, want = jax.block_until_ready(call(*arrays)), expected(arrays, **options)
    if options.get("return_lse"):
        (got, logsumexp), (want, statistics) = got, want
        np.testing.assert_allclose(logsumexp, statistics, rtol=2e-5, atol=2e-5)
        assert np.isneginf(logsumexp[-2:]).all() and np.isfinite(logsumexp[:-2]).all()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert (np.asarray(got)[-2:] == 0).all()


@interpreter
@pytest.mark.parametrize("splits", [1, 2])
def test_a_sink_without_weight(splits):
    """-inf, beside queries that see a key and queries that see none: as without the sink."""
    arrays = problem(((3, 1), (2, 6)))
    sinks = np.array([-np.inf, -np.inf, 0.5, -np.inf], np.float32)
    config = PagedGpuConfig(16, 16, 4, 2, splits, 16, 16, 4, 2)
    options = {"sinks": sinks, "return_lse": True}
    call = jax.jit(lambda *a: vishwamai.ragged_paged_attention(*a, **options, implementation="triton", config=config))
    for got, want in zip(jax.block_until_ready(call(*arrays)), expected(arrays, **options), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@interpreter
def test_vmap_is_folded():
    """Mapped queries and lengths on pages that all share: one launch."""
    arrays = problem(((1, 9), (2, 6)), page_size=8)
    query, pool, lens, table, starts = arrays
    queries, lengths = np.stack([query, query[::-1]]), np.stack([lens, lens - 1])
    call = jax.vmap(
        lambda q, n: vishwamai.ragged_paged_attention(q, pool, n, table, starts, implementation="triton", max_q_len=2)
    )
    got = jax.block_until_ready(jax.jit(call)(queries, lengths))
    for q, n, out in zip(queries, lengths, got, strict=True):
        np.testing.assert_allclose(out, expected((q, pool, n, table, starts)), rtol=2e-5, atol=2e-5)


def spec_of(runs, heads=(32, 8), dim=128, page_size=16, dtype="bfloat16", pages=None, **options):
    """The spec of a call with `options`."""
    inits, number = tables(runs, page_size)
    arrays = {"query": jax.ShapeDtypeStruct((sum(q for q, _ in runs), heads[0], dim), dtype)}
    rows = (dim,) if "latent_dim" in options else (2 * heads[1], dim)
    arrays["kv_pages"] = jax.ShapeDtypeStruct((number, page_size, *rows), pages or dtype)
    arrays |= {name: jax.ShapeDtypeStruct(x.shape, "int32") for name, x in inits.items()}
    plans = record_plans(lambda arrays: vishwamai.ragged_paged_attention(**arrays, **options), arrays)
    return plans[0].spec


@native
def test_splits_come_from_shapes_alone():
    """One long sequence is shared by many programs, many sequences by none, a short one by none."""
    long = heuristic(spec_of(((1, 65536),), max_q_len=1), Target("cuda"))
    assert (long.rows, long.splits) == (16, 64)
    assert heuristic(spec_of(((1, 4096),) * 128, max_q_len=1), Target("cuda")).splits == 1
    assert heuristic(spec_of(((1, 200),), max_q_len=1), Target("cuda")).splits == 1
    mixed = heuristic(spec_of(((1, 65536), (512, 512)), max_q_len=512), Target("cuda"))
    assert (mixed.rows, mixed.long_rows, mixed.splits) == (16, 128, 32)
    assert long.with_block_size(100) == dataclasses.replace(long, block_kv=128, long_kv=128)


@pytest.mark.turns(3)
@native
def test_what_is_declined():
    def reason(*args, **options):
        return why_not(spec_of(((1, 8),), *args, **options), Target("cuda", local=True)) or ""

    latent = {"scale": 1.0, "latent_dim": 512}
    assert "heads of 320 columns" in reason((4, 2), 320)
    assert "which bfloat16 queries would round" in reason((4, 2), 64, 8, "bfloat16", "float32")
    assert "512 + 256 columns" in reason((4, 1), 768, **latent)
    assert "float32 latent pages of 512" in reason((4, 1), 576, 8, "float32", **latent)
    if core_gpu.why_not() is None:
        assert reason((4, 1), 576, **latent) == "" == reason((4, 2), 64, 8, "float32", "bfloat16")
    assert "pages of 1" in notes(spec_of(((1, 8),), page_size=1), Target("cuda"))[0]
    assert TRITON in PAGED_ATTENTION.implementations


@pytest.mark.parametrize("form", ["combined", pytest.param("separate", marks=pytest.mark.long), "planes"])
def test_torch(form):
    """Every form of pools; `planes` are views into one tensor, as some servers keep them."""
    arrays = problem()
    query, pool, *rest = on_torch(arrays)
    k, v = pool[:, :, 0::2].contiguous(), pool[:, :, 1::2].contiguous()
    pools = {"combined": pool, "separate": (k, v), "planes": torch.stack((k, v), 1).unbind(1)}[form]
    slopes = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
    tree = np.random.default_rng(1).random((len(query), 3)) < 0.7
    options = {"alibi_slopes": torch.from_numpy(slopes), "tree_mask": torch.from_numpy(tree)}
    options |= {"num_seqs": 3, "return_lse": True}
    got, lse = vt.ragged_paged_attention(query, pools, *rest, window=(12, 0), **options)
    options |= {"alibi_slopes": slopes, "tree_mask": tree}
    want, statistics = expected((arrays[0], *arrays[1:]), window=12, **options)
    np.testing.assert_allclose(to_numpy(got, np.float32), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(to_numpy(lse, np.float32), statistics, rtol=2e-5, atol=2e-5)
    assert (got[7:] == 0).all()


@interpreter
def test_torch_latent_pages_wider_than_the_query():
    query, pool, lens, table, starts = problem()
    latent = pool[:, :, 0].copy()
    latent[..., 12:] = 0
    options = {"latent_dim": 8, "scale": 0.3}
    got = vt.ragged_paged_attention(*on_torch((query[..., :12], latent, lens, table, starts)), **options)
    want = expected((query[..., :12], latent[..., :12], lens, table, starts), **options)
    np.testing.assert_allclose(to_numpy(got, np.float32), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_torch_quantized_queries(dtype):
    query, pool, *rest = problem()
    codes = torch.from_numpy(4 * query).to(dtype)
    scale = np.array([0.2, 0.3], np.float32)
    got = vt.ragged_paged_attention(
        codes, *on_torch((pool, *rest)), q_scale=torch.from_numpy(scale), k_scale=0.5, out_dtype=torch.float32
    )
    want = expected((codes.float().numpy() * np.repeat(scale, 2)[:, None], pool, *rest), k_scale=0.5)
    np.testing.assert_allclose(to_numpy(got, np.float32), want, rtol=2e-5, atol=2e-5)


def checked():
    """Whether torch's calls check the values of tables, as on the CPU: lengths shorter than their new tokens and wild
    entries are errors there.
    """
    return bridge.platform_of(torch.empty(0)) == "cpu"


UPDATES = [
    pytest.param("float32", "combined", marks=pytest.mark.long),
    pytest.param("bfloat16", "separate", marks=interpreted_or_long),
    ("int8", "combined"),
    pytest.param("float8_e4m3fn", "latent", marks=interpreted_or_long),
]


@pytest.mark.parametrize("dtype, form", UPDATES)
def test_update_is_that_of_jax_and_in_place(dtype, form):
    """Bit by bit, in the very memory; other rows stay, tokens without a place are dropped, wild entries are never
    followed.
    """
    rng = np.random.default_rng(1)
    runs, heads, dim = ((1, 9), (3, 3), (4, 6 if checked() else 2)), 3, 8
    inits, number = tables(runs, 4)
    lens, table, starts = (init.make(rng) for init in inits.values())
    table[1, 1:] = 0 if checked() else 2**31 - 1
    key, value = (rng.standard_normal((10, heads, dim)).astype(np.float32) for _ in range(2))
    key[0, 0, 0] = 1e6
    shape = {"combined": (2 * heads, dim), "separate": (heads, dim), "latent": (dim + 2,)}[form]
    pool = rng.integers(-9, 9, (number, 4, *shape)).astype(jax.numpy.dtype(dtype))
    pools = (pool, pool[::-1].copy()) if form == "separate" else pool
    options = {} if dtype in ("float32", "bfloat16") else {"k_scale": 0.03, "v_scale": (0.01, 0.02, 0.5)}
    if form == "latent":
        key, value, options = key[:, 0], None, {"k_scale": 0.03}
    # Traced: known lengths that are shorter than their new tokens are an error.
    update = jax.jit(functools.partial(vishwamai.update_pages, num_seqs=3, **options))
    want = update(pools, key, value, lens, table, starts)
    mine = jax.tree.map(from_numpy, pools)
    got = vt.update_pages(
        mine, *(None if x is None else from_numpy(x) for x in (key, value, lens, table, starts)), num_seqs=3, **options
    )
    assert got is mine
    for a, b in zip(jax.tree.leaves(want), got if isinstance(got, tuple) else (got,), strict=True):
        np.testing.assert_array_equal(to_numpy(b, a.dtype), np.asarray(a))
    assert not np.array_equal(np.asarray(jax.tree.leaves(want)[0]), jax.tree.leaves(pools)[0])


@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=interpreted_or_long)])
@pytest.mark.parametrize(
    "dtype, form, pairs",
    [
        pytest.param("float32", "combined", 5, marks=interpreted_or_long),
        ("bfloat16", "separate", 6),
        ("int8", "combined", 3),
        ("float8_e4m3fn", "latent", 4),
    ],
)
def test_update_rotates_keys_as_jax_does(dtype, form, pairs, interleaved):
    """Where a position is past the tables, too; tokens without a place have negative ones."""
    rng = np.random.default_rng(1)
    inits, number = tables(((1, 9), (3, 3), (4, 6 if checked() else 2)), 4)
    places = [init.make(rng) for init in inits.values()]
    rows = "bfloat16" if dtype == "bfloat16" else "float32"
    key, value = (rng.standard_normal((10, 3, 12)).astype(jax.numpy.dtype(rows)) for _ in range(2))
    shape = {"combined": (6, 12), "separate": (3, 12), "latent": (14,)}[form]
    pool = rng.integers(-9, 9, (number, 4, *shape)).astype(jax.numpy.dtype(dtype))
    pools = (pool, pool[::-1].copy()) if form == "separate" else pool
    options = {"k_scale": 0.03, "v_scale": 0.02} if pool.dtype.itemsize == 1 else {}
    if form == "latent":
        key, value, options = key[:, 0], None, {"k_scale": 0.03}
    angles = rng.standard_normal((9 if dtype == "int8" or checked() else 8, pairs)).astype(np.float32)
    rope_tables = np.cos(angles), np.sin(angles)
    update = jax.jit(functools.partial(vishwamai.update_pages, interleaved=interleaved, **options))
    want = jax.tree.leaves(update(pools, key, value, *places, rope_tables=rope_tables))
    mine = jax.tree.map(from_numpy, pools)
    arguments = (None if x is None else from_numpy(x) for x in (key, value, *places))
    # As `vt.rope_tables` has them, and not.
    mine_tables = from_numpy(rope_tables[0])[None], from_numpy(rope_tables[1])
    vt.update_pages(mine, *arguments, rope_tables=mine_tables, interleaved=interleaved, **options)
    for a, b in zip(want, jax.tree.leaves(mine), strict=True):
        a, b = np.asarray(a, np.float32), to_numpy(b, a.dtype).astype(np.float32)
        if dtype == "float32":
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(b, a)
    assert not np.array_equal(a, np.asarray(jax.tree.leaves(pools)[-1], np.float32))


def attend_arguments():
    query, pool, lens, table, starts = on_torch(problem(((1, 5), (2, 6))))
    return query, pool.nan_to_num(), None, lens, table, starts, *(None,) * 11, False


def update_arguments():
    _, pool, _, lens, table, starts, *_ = attend_arguments()
    return pool, None, torch.randn(3, 2, 16), torch.randn(3, 2, 16), lens, table, starts, *(None,) * 5, False


@native
@pytest.mark.parametrize("name", ["paged_attention", "update_pages"])
def test_opcheck(name):
    arguments = attend_arguments() if name == "paged_attention" else update_arguments()
    op = getattr(torch.ops.vishwamai, name).default
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


@native
def test_torch_vmap():
    """Mapped queries meet the same pages."""
    query, *rest = on_torch(problem(((1, 5), (2, 6))))
    queries = torch.stack((query, 2 * query))
    got = torch.vmap(lambda q: vt.ragged_paged_attention(q, *rest))(queries)
    assert torch.equal(got, torch.stack([vt.ragged_paged_attention(q, *rest) for q in queries]))


@native
def test_a_step_of_decoding_compiles_in_one_graph():
    """The update, then attention, and the pages hold what an eager step leaves in them."""
    _, pool, _, lens, table, starts, *_ = attend_arguments()

    def step(query, pool, key, value):
        vt.update_pages(pool, key, value, lens, table, starts)
        return vt.ragged_paged_attention(query.sin(), pool, lens, table, starts, k_scale=0.5, max_q_len=2) * 2

    query, key, value = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    pools = pool.clone(), pool.clone()
    want = step(query, pools[0], key, value)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(query, pools[1], key, value)
    assert torch.equal(got, want) and torch.equal(*pools) and not torch.equal(pools[0], pool)


@native
def test_errors():
    query, pool, _, lens, table, starts, *_ = attend_arguments()
    with pytest.raises(ShapeError, match=r"ragged_paged_attention: `kv_lens` is int64\[2\]; pass int32"):
        vt.ragged_paged_attention(query, pool, lens.long(), table, starts)
    with pytest.raises(ShapeError, match=r"where heads divides"):
        vt.ragged_paged_attention(query[:, :3], pool, lens, table, starts)
    with pytest.raises(ShapeError, match=r"columns must lie side by side"):
        vt.ragged_paged_attention(query, pool.transpose(2, 3), lens, table, starts)
    with pytest.raises(ShapeError, match=r"update_pages: `key` has shape \(3, 1, 16\)"):
        vt.update_pages(pool, torch.ones(3, 1, 16), torch.ones(3, 2, 16), lens, table, starts)
    rows = torch.ones(3, 2, 16)
    with pytest.raises(ShapeError, match=r"`rope_tables` is a Tensor; pass a pair \(cos, sin\)"):
        vt.update_pages(pool, rows, rows, lens, table, starts, rope_tables=torch.ones(9, 8))
    with pytest.raises(ShapeError, match=r"float32\[9,9\] and float32\[9,9\], but a key has 16.*of 1 to 8 pairs"):
        vt.update_pages(pool, rows, rows, lens, table, starts, rope_tables=(torch.ones(9, 9), torch.ones(9, 9)))
    with pytest.raises(ShapeError, match=r"`v_scale` has shape \(3,\); pass a number or \(2,\)"):
        vt.ragged_paged_attention(query, pool, lens, table, starts, v_scale=(1.0, 2.0, 3.0))
    out = vt.ragged_paged_attention(query.requires_grad_(), pool, lens, table, starts)
    with pytest.raises(UnsupportedError, match=r"there is no gradient.*train with `flash_attention`"):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match=r"update_pages: pages have no gradient; call it under torch.no_grad"):
        vt.update_pages(pool, torch.ones(3, 2, 16, requires_grad=True), torch.ones(3, 2, 16), lens, table, starts)


@interpreter
def test_a_pool_is_not_copied_for_its_alignment():
    query, pool, _, lens, table, starts, *_ = attend_arguments()
    odd = torch.empty(pool.numel() + 1)[1:].view(pool.shape).copy_(pool)
    with pytest.raises(ShapeError, match="begins 4 bytes past a multiple of 16"):
        vt.ragged_paged_attention(query, odd, lens, table, starts)


compiler = pytest.mark.skipif(core_gpu.why_not() is not None, reason=str(core_gpu.why_not()))


def step(
    dim=128, heads=(32, 8), page_size=16, dtype="bfloat16", pages=None, queries=1, sequences=32, tree=0, **options
):
    """The launches of a batch of sequences of 4096 tokens."""
    scaled = {"k_scale": 0.1, "v_scale": 0.1} if pages else {}
    latent = "latent_dim" in options
    inits, number = tables(((queries, 4096),) * sequences, page_size)
    arrays = {"query": ArrayInit((queries * sequences, heads[0], dim), dtype)}
    arrays["kv_pages"] = ArrayInit((number, page_size, *(() if latent else (2 * heads[1],)), dim), pages or dtype)
    if tree:
        arrays["tree_mask"] = ArrayInit((queries * sequences, tree), "bool", "mask")
    call = vishwamai.ragged_paged_attention
    case = ForwardCase("step", "paged_attention", call, arrays | inits, options | scaled | {"max_q_len": queries})
    return launches(case)


LATENT = {"dim": 576, "heads": (128, 1), "latent_dim": 512, "scale": 0.1}
STEPS = {
    "page 16": ({}, ()),
    "page 1": ({"page_size": 1}, pytest.mark.long),
    "one head": ({"heads": (8, 8), "dim": 64, "sequences": 2}, pytest.mark.long),
    "wide heads": ({"dim": 256}, pytest.mark.long),
    "float32": ({"dim": 128, "dtype": "float32"}, pytest.mark.long),
    "int8": ({"pages": "int8"}, pytest.mark.long),
    "int4": ({"pages": "int4"}, pytest.mark.long),
    "fp8 for float16": ({"dtype": "float16", "pages": "float8_e4m3fn", "dim": 256}, pytest.mark.long),
    "prefill": ({"queries": 512}, pytest.mark.long),
    "prefill with everything": (
        {"queries": 512, "window": 256, "softcap": 20.0, "pages": "float8_e5m2"},
        pytest.mark.long,
    ),
    "prefill of wide heads": ({"queries": 512, "dim": 256}, pytest.mark.long),
    "prefill float32": ({"queries": 512, "dim": 64, "dtype": "float32"}, pytest.mark.long),
    "prefill beside trees": ({"queries": 512, "tree": 64}, pytest.mark.long),
    "latent": (LATENT, pytest.mark.long),
    "latent fp8": (LATENT | {"pages": "float8_e4m3fn"}, pytest.mark.long),
    "latent, 16 heads": (LATENT | {"heads": (16, 1)}, pytest.mark.long),
}


@pytest.mark.turns(4)
@native
@compiler
@pytest.mark.parametrize("options", [pytest.param(o, id=name, marks=m) for name, (o, m) in STEPS.items()])
def test_hopper_code(options):
    """Nothing spills, tensor cores multiply, and pages arrive 16 bytes at a time (8-bit values: 8) whatever the page's
    size.
    """
    recorded = step(**options)
    codes = [inspect_launch(launch) for launch in recorded]
    # 8 bytes, where ptxas holds the program to a third of a multiprocessor's registers.
    assert max(code.spill for code in codes) <= (8 if options.get("pages") and options.get("queries", 1) > 1 else 0)
    walks = [
        (dict(r.launch.constants), code) for r, code in zip(recorded, codes, strict=True) if code.kernel == "attend"
    ]
    assert [how["ITEMS"].DIRECT for how, _ in walks] == ([False, True] if options.get("queries", 1) > 1 else [True])
    for how, code in walks:
        assert (code.wgmma if how["TILES"].ROWS >= 64 else code.mma) > 0
        width = 1 if "pages" in options else 4 if "dtype" in options else 2
        size = how["TILES"].COLUMNS * how["WIDTHS"].D_TILE * width
        pools = 1 if "pages" in options or how["WIDTHS"].LATENT else 2
        assert code.copies > 0 and code.wide >= pools * size // (32 * code.warps * 16)


def step_of_decoding(count, length, heads, kv_heads, dtype, **scales):
    """The program for CUDA of new keys into donated pages of 16, and attention over them."""

    def step(pages, query, key, value, *tables):
        pages = vishwamai.update_pages(pages, key, value, *tables, **scales)
        return pages, vishwamai.ragged_paged_attention(query, pages, *tables, **scales, max_q_len=1)

    inits, number = tables(((1, length),) * count, 16)
    pages = jax.ShapeDtypeStruct((number, 16, 2 * kv_heads, 128), dtype)
    query, key = (jax.ShapeDtypeStruct((count, n, 128), "bfloat16") for n in (heads, kv_heads))
    rest = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inits.values()]
    traced = jax.jit(step, donate_argnums=0).trace(pages, query, key, key, *rest)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@native
@compiler
def test_a_step_of_decoding_in_a_program_for_cuda():
    """XLA's scatter into the pages that were given away, then our kernel, and the combination of its splits."""
    text = step_of_decoding(32, 4096, 32, 8, "bfloat16")
    assert re.search(r"%arg0: tensor<\d+x16x16x128xbf16> \{tf.aliasing_output = 0", text)
    assert re.findall(r' name = "(\w+)"', text) == ["attend", "combine"] and text.count('stablehlo.scatter"(') == 1


@pytest.mark.turns(3)
@native
@compiler
def test_a_program_for_cuda_hands_pages_of_int4_to_the_kernels():
    """As they are, for their bytes are in the order that the kernels read; a conversion would copy the pool."""
    text = step_of_decoding(8, 256, 8, 2, "int4", k_scale=0.1, v_scale=0.1)
    assert re.search(r"%arg0: tensor<\d+x16x4x128xi4> \{tf.aliasing_output = 0", text)
    assert re.findall(r' name = "(\w+)"', text)[:2] == ["put", "attend"]
    assert "stablehlo.scatter" not in text and "bitcast_convert" not in text


@interpreter
@pytest.mark.parametrize("row", [(4, 16), (40,)], ids=str)
def test_rows_of_int4_are_written_as_the_scatter_writes_them(row):
    """In the bytes that two numbers share; those without a place are not."""
    rng = np.random.default_rng(2)
    pool, rows = (rng.integers(-8, 8, (*n, *row)).astype(jax.numpy.int4) for n in ((3, 4), (5,)))
    page, slot = np.array([2, 0, 3, 2, -1], np.int32), np.array([3, 0, 1, 2, 0], np.int32)
    want = pool.copy()
    for i in (0, 1, 3):
        want[page[i], slot[i]] = rows[i]
    got = jax.jit(put)(pool, rows, page, slot)
    np.testing.assert_array_equal(np.asarray(got).astype(np.int8), want.astype(np.int8))


@native
@compiler
@pytest.mark.long
@pytest.mark.parametrize("name", ["page 16", "prefill", "latent, 16 heads", "fp8 for float16", "int4"])
def test_amd_compiles(name):
    for launch in step(**STEPS[name][0]):
        code = inspect_launch(launch, "gfx942")
        assert code.registers > 0 and (code.mma > 0) == (code.kernel == "attend")


@pytest.mark.turns(3)
@native
@compiler
@pytest.mark.parametrize("rotating", [False, True])
def test_the_update_compiles(rotating):
    """For Hopper and AMD, as for JAX and as torch launches it, whose sizes are arguments at run time."""
    found = []

    def record(how, inputs, outputs):
        assert not outputs
        found.append((how, tuple((name, POINTERS[str(x.dtype)[6:]]) for name, x in inputs.items())))
        return []

    before = core_gpu.register_launcher("torch", record)
    try:
        _, pool, _, lens, table, starts, *_ = attend_arguments()
        key, value = torch.ones(2, 3, 2, 16)
        k_scale, v_scale = torch.ones(2, 2)
        options = {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8)} if rotating else {}
        update(pool[None].char(), None, key, value, lens, table, starts, None, k_scale, v_scale, **options)
    finally:
        core_gpu.register_launcher("torch", before)
    ((how, types),) = found
    code = inspect_launch(RecordedLaunch(how, types))
    assert code.kernel == "update" and code.spill == 0
    assert inspect_launch(RecordedLaunch(how, types), "gfx942").registers > 0
    function, constants, pointers = how.kernel.load(), dict(how.constants), dict(types)
    constexprs, values = triton_private.constexpr_parameters(function), {}

    def place(path, name):
        if name in pointers:
            return pointers[name]
        if name not in constexprs and constants.get(name) not in (None, 1):
            return "i32"
        values[path] = constants.get(name)
        return "constexpr"

    signature = {
        name: place((i,), name) if bundle is None else bundle(*(place((i, j), leaf) for j, leaf in enumerate(leaves)))
        for i, (name, bundle, leaves) in enumerate(KernelParameters.of(how.kernel, how.bundles).entries)
    }
    assert triton_private.compile_kernel(function, signature, values, (), 90, {}).asm["cubin"]
