"""Attention over a static block mask: masks against their definition, work by what is live, options together, errors.
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
from test_attention_tpu import spec_of
from vishwamai import BlockMask, block_sparse_attention, flash_attention
from vishwamai.core import ffi, hardware
from vishwamai.core.errors import ShapeError
from vishwamai.core.target import Target
from vishwamai.ops.attention import tpu
from vishwamai.ops.attention.block_mask import live_tiles, tile_masks, visible_pairs
from vishwamai.ops.attention.blocks import ChunkedConfig, ScoreBlocks
from vishwamai.ops.attention.spec import Operands
from vishwamai.ops.attention.tpu_operands import pattern_words
from vishwamai.ops.attention.tpu_schedule import Panel, Tiling, make_schedule, unpack_tile, visited_tiles
from vishwamai.ops.sparse import bigbird, local, strided

pytestmark = pytest.mark.filterwarnings("ignore::vishwamai.FallbackWarning")


def random_blocks(*shape, share=0.4, seed=0):
    return np.random.default_rng(seed).random(shape) < share


def written_out(mask, block_size, q_len, kv_len):
    """bool `[heads, q_len, kv_len]`."""
    mask = mask.reshape(-1, *mask.shape[-2:])
    i, j = np.arange(q_len) // block_size[0], np.arange(kv_len) // block_size[1]
    return mask[:, i][:, :, j]


def arrays(heads=(4, 2), lengths=(100, 150), dim=16, seed=0) -> Any:
    rng = np.random.default_rng(seed)

    def of(heads, length):
        return jnp.asarray(rng.standard_normal((1, heads, length, dim)), jnp.float32)

    return of(heads[0], lengths[0]), of(heads[1], lengths[1]), of(heads[1], lengths[1])


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("block_size", [(16, 24), (7, 50), (128, 64)], ids=str)
def test_tiles_of_any_size_see_the_mask(heads, block_size):
    """A tile is empty, whole, or looks as its pattern says, however tiles and blocks lie to one another."""
    q_len, kv_len = 100, 150
    live = random_blocks(heads, -(-q_len // block_size[0]), -(-kv_len // block_size[1]))
    mask, truth = BlockMask.from_blocks(live, block_size), written_out(live, block_size, q_len, kv_len)
    np.testing.assert_array_equal(mask.positions(q_len, kv_len), truth)
    for rows, columns in ((32, 32), (20, 70), (128, 128)):
        cut: Any = -(-q_len // rows), -(-kv_len // columns)
        tiles = tile_masks(mask, rows, columns, *cut)
        np.testing.assert_array_equal(live_tiles(mask, rows, columns, *cut), tiles.ids >= 0)
        for head, i, j in np.ndindex(*tiles.ids.shape):
            seen = truth[head, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            number = tiles.ids[head, i, j]
            shown = tiles.patterns[number][: seen.shape[0], : seen.shape[1]] if number >= 0 else np.zeros_like(seen)
            np.testing.assert_array_equal(shown, seen)


def test_a_function_gives_whole_empty_and_partial_blocks():
    mask = BlockMask.from_function(lambda i, j: (j <= i) & (i // 40 == j // 40), 100, 90, (20, 20))
    i, j = np.arange(100)[:, None], np.arange(90)[None, :]
    np.testing.assert_array_equal(mask.positions(100, 90)[0], (j <= i) & (i // 40 == j // 40))
    assert mask.codes[0, :2, :2].tolist() == [[2, 0], [1, 2]] and mask.codes[0, 4, :2].tolist() == [0, 0]
    assert len(mask.patterns) <= 2  # the diagonal, and the diagonal where the keys end


@pytest.mark.parametrize("band", [(None, None), (None, 0), (-30, 5)], ids=str)
def test_live_pairs_are_counted(band):
    low, high = band
    function = lambda i, j: (i * 7 + j * 3) % 11 < 5  # noqa: E731
    mask = BlockMask.from_function(function, 70, 90, (32, 16))
    distance = np.arange(90)[None, :] - np.arange(70)[:, None]
    seen = function(np.arange(70)[:, None], np.arange(90)[None, :])
    seen = seen & (distance >= (-1000 if low is None else low)) & (distance <= (1000 if high is None else high))
    assert visible_pairs(mask, 70, 90, low, high) == seen.sum()
    by_head = BlockMask.from_blocks(random_blocks(2, 3, 6), (32, 16))
    inside = (distance >= (-1000 if low is None else low)) & (distance <= (1000 if high is None else high))
    assert visible_pairs(by_head, 70, 90, low, high) == (by_head.positions(70, 90) & inside).sum()


def test_a_mask_is_its_contents():
    a, b = (BlockMask.from_blocks(random_blocks(4, 4, seed=seed), (8, 8)) for seed in (0, 0))
    assert a == b and hash(a) == hash(b) and a != BlockMask.from_blocks(random_blocks(4, 4, seed=1), (8, 8))
    assert a != BlockMask.from_blocks(random_blocks(4, 4), (8, 16))
    with pytest.raises(ValueError, match="read-only"):
        a.codes[0] = 0


def test_patterns_survive_the_packing():
    """The words of the TPU kernels hold every position of every pattern, a bit each."""
    for block_kv in (128, 256, 384):
        spec = dataclasses.replace(
            spec_of(256, 768), blocks=BlockMask.from_blocks(random_blocks(16, 48, share=0.5), (16, 16))
        )
        tiling = Tiling(128, block_kv, 1, 1, 2)
        words = pattern_words(spec, tiling)
        assert words is not None
        patterns = spec.tile_masks(128, block_kv, *tiling.blocks(spec)).patterns
        bits = block_kv // words.shape[1]
        unpacked = np.concatenate([(words.view(np.uint32) >> n) & 1 for n in range(bits)], axis=1).astype(bool)
        np.testing.assert_array_equal(unpacked, patterns.swapaxes(1, 2))


@pytest.mark.parametrize("kv_major", [False, True])
@pytest.mark.parametrize("panels", [(1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_the_schedule_visits_live_tiles_once(heads, panels, kv_major):
    live = random_blocks(heads, 8, 8, share=0.3)
    live[-1, 3], live[-1, :, 5] = False, False
    spec = dataclasses.replace(
        spec_of(1000, 1024, heads=(4, 2), causal=True), blocks=BlockMask.from_blocks(live, (128, 128))
    )
    tiling = Tiling(128, 128, panels[0], panels[1], 2)
    walked = 2 if kv_major else 1
    schedule = make_schedule(spec, tiling, masked=False, kv_major=kv_major, heads=walked)
    words = schedule.panels.reshape(-1)
    walks = len(schedule.panels)
    assert walks == (1 if heads == 1 else 4 // walked)
    for walk in range(4 // walked):
        visits: dict[tuple[int, int, int], bool] = {}
        begun = ended = 0
        for step in range(schedule.steps):
            panel = Panel(words, schedule.first_step(walk) + step)
            if panel.idle:
                assert not panel.begins and not panel.ends
                continue
            begun, ended = begun + bool(panel.begins), ended + bool(panel.ends)
            plain, count, start = schedule.counts[panel.tiles]
            for n, word in enumerate(schedule.tiles[start : start + count]):
                i, j, pattern = unpack_tile(int(word))
                at = int(panel.g), panel.q * panels[0] + i, panel.kv * panels[1] + j
                assert at not in visits and pattern == 0
                visits[at] = n < plain
        assert begun == ended == (8 // panels[1] if kv_major else 8 // panels[0])
        for g in range(walked):
            mask = live[walk * walked + g if heads > 1 else 0] & np.tri(8, dtype=bool)
            assert {(i, j) for head, i, j in visits if head == g} == {tuple(x) for x in np.argwhere(mask).tolist()}
            assert not any(visits[g, i, i] for i in range(8) if mask[i, i])  # the diagonal needs the causal mask's code


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_tiles_fit_the_mask(chip):
    """Blocks of 512 are walked in tiles of 512, blocks of 128 far from each other in smaller ones; nothing is visited
    that is not live.
    """
    for size, share in ((512, 0.3), (128, 0.1)):
        count = 4096 // size
        live = random_blocks(count, count, share=share)
        spec = dataclasses.replace(
            spec_of(4096, 4096, heads=(8, 8), dims=(128, 128), dtype="bfloat16"),
            blocks=BlockMask.from_blocks(live, (size, size)),
        )
        config = tpu.heuristic(spec, Target("tpu", hardware.TPUS[chip]))
        assert tpu.why_not(spec, Target("tpu", hardware.TPUS[chip])) is None
        for tiling in (config.forward, config.backward):
            area = visited_tiles(spec, tiling.block_q, tiling.block_kv) * tiling.block_q * tiling.block_kv
            assert area <= 1.6 * live.sum() * size * size
    full = dataclasses.replace(spec, blocks=None)
    assert spec.flops == round(full.flops * live.mean())


def test_blocked_xla_walks_live_pairs_only():
    live = random_blocks(2, 6, 6, share=0.3)
    spec = dataclasses.replace(spec_of(96, 96, heads=(2, 2)), blocks=BlockMask.from_blocks(live, (16, 16)))
    operands = Operands(*(jnp.zeros(x.shape) for x in spec.operands[:3]))
    blocks = ScoreBlocks(spec, ChunkedConfig(16, 16), operands)
    lists, counts = blocks.lists(by_key=False)
    assert counts.tolist() == live.sum((1, 2)).tolist()
    for head in range(2):
        assert lists[head, : counts[head], :2].tolist() == np.argwhere(live[head]).tolist()


def test_nothing_of_the_size_of_the_scores():
    """At 8192 positions neither pass of the blocked implementation holds the score matrix, or a mask of its size."""
    q = jax.ShapeDtypeStruct((1, 1, 8192, 16), jnp.float32)

    def both(q, k, v):
        def call(*a):
            options = {"block_size": 128, "implementation": "xla_chunked"}
            return block_sparse_attention(*a, block_mask=local(64, 3, 3), **options)

        out, pull = jax.vjp(call, q, k, v)
        return out, pull(out)

    compiled = jax.jit(both).lower(q, q, q).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 16e6  # the scores would be 268 MB, a byte for each 67


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
@pytest.mark.parametrize("heads", [1, 4])
def test_it_is_attention_under_the_mask_written_out(heads, implementation):
    q, k, v = arrays()
    live, size = random_blocks(heads, 4, 7), (32, 24)
    mask = jnp.asarray(written_out(live, size, 100, 150)[None])

    def run(call):
        return jax.vjp(lambda *a: call(*a), q, k, v)[1](jnp.ones((1, 4, 100, 16)))

    options = {"causal": True, "causal_align": "bottom_right", "window": (90, 20), "softcap": 3.0}
    ours = run(
        lambda *a: block_sparse_attention(
            *a, block_mask=live, block_size=size, implementation=implementation, **options
        )
    )
    theirs = run(lambda *a: flash_attention(*a, mask=mask, implementation="xla", **options))
    contract.close(ours, theirs, 1e-5)


@pytest.mark.turns(3)
def test_masks_of_heads_under_vmap_and_shardings():
    """A mapped axis leaves the heads where they are; a sharding over heads is gathered, one over the batch is not."""
    live = random_blocks(4, 4, 5)
    q, k, v = (jnp.concatenate([x] * 8) * jnp.arange(1.0, 9.0)[:, None, None, None] for x in arrays(lengths=(64, 80)))

    def run(q, k, v):
        return block_sparse_attention(q, k, v, live, block_size=16)

    expected = run(q, k, v)
    mapped = jax.vmap(run)(*(x.reshape(4, 2, *x.shape[1:]) for x in (q, k, v)))
    contract.close(mapped.reshape(expected.shape), expected, 1e-5)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
        with jax.set_mesh(mesh):
            got = jax.jit(run)(*(jax.device_put(x, spec) for x in (q, k, v)))
        contract.close(got, expected, 1e-5)


def test_functions_and_kept_masks_agree_inside_jit():
    q, k, v = arrays(lengths=(96, 96))
    function = lambda i, j: jnp.abs(i - j) % 5 < 3  # noqa: E731  jax.numpy is welcome, also while tracing
    mask = BlockMask.from_function(lambda i, j: abs(i - j) % 5 < 3, 96, 96, (32, 32))
    by_function = jax.jit(lambda *a: block_sparse_attention(*a, block_mask=function, block_size=32))(q, k, v)
    kept = jax.jit(lambda *a: block_sparse_attention(*a, block_mask=mask))(q, k, v)
    np.testing.assert_array_equal(by_function, kept)
    i, j = np.arange(96)[:, None], np.arange(96)[None, :]
    contract.close(kept, flash_attention(q, k, v, mask=jnp.asarray(abs(i - j) % 5 < 3), implementation="xla"), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [128, None], ids=["one tile a panel", "heuristic"])
@pytest.mark.parametrize(
    "mask, size",
    [
        (bigbird(5, 1, 1, 1, heads=4), 64),
        (strided(3, 2, kv_blocks=4), 100),
        (lambda i, j: (i // 30 + j // 50) % 3 > 0, 64),
    ],
    ids=["bigbird by head", "strided", "function"],
)
def test_tpu_kernels_in_any_tiling(mask, size, block_size):
    """Idle steps, panels, patterns and the bias's own pass in the simulator, against the reference."""
    q, k, v = arrays(lengths=(300, 310))
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 1, 310)), jnp.float32)

    def run(implementation, config=None):
        def call(q, k, v, bias):
            options = {"block_size": size, "bias": bias, "implementation": implementation, "config": config}
            return block_sparse_attention(q, k, v, mask, **options)

        return jax.jit(lambda *a: jax.vjp(call, *a)[1](jnp.ones((1, 4, 300, 16))))(q, k, v, bias)

    expected = run("xla")
    with contract.simulated_tpu():
        got = jax.block_until_ready(run("pallas_tpu", block_size))
    contract.close(got, expected, 1e-4)


@pytest.mark.parametrize(
    "mask, options, words",
    [
        (np.ones((3, 4), bool), {"block_size": 32}, "3 x 4 blocks, but 100 queries and 150 keys have 4 x 5"),
        (np.ones((4, 5)), {"block_size": 32}, "dtype float64 .* pass bool"),
        (np.ones((2, 4, 5), bool), {"block_size": 32}, "2 heads, but `query` has 4"),
        (np.ones((4, 5), bool), {"block_size": 0}, "`block_size` is 0; pass a positive number"),
        (np.ones((4, 5), bool), {"block_size": (32, 32, 32)}, "`block_size` is .*; pass a positive number"),
        (BlockMask.from_blocks(np.ones((4, 5), bool), (32, 32)), {"block_size": 64}, "leave it out"),
    ],
    ids=["blocks", "dtype", "heads", "size", "sizes", "two sizes"],
)
def test_errors(mask, options, words):
    if isinstance(mask, np.ndarray) and mask.ndim == 3:
        mask[0, 0, 0] = False
    with pytest.raises(ShapeError, match=words):
        block_sparse_attention(*arrays(), block_mask=mask, **options)


def test_a_traced_mask_is_an_error():
    mask = jnp.ones((4, 5), bool)
    with pytest.raises(ShapeError, match="`block_mask` is traced"):
        jax.jit(lambda mask: block_sparse_attention(*arrays(), block_mask=mask, block_size=32))(mask)


def test_the_native_kernel_visits_no_empty_block():
    """Keys and values that no block shows are NaN, which a product with a weight of zero would not survive."""
    if (reason := ffi.why_not()) is not None:
        pytest.skip(reason)
    q, k, v = arrays(lengths=(100, 160))
    live = np.tri(4, 5, dtype=bool)
    live[:, [1, 4]] = False
    hidden = jnp.repeat(jnp.asarray(~live.any(0)), 32)[:, None]

    def run(q, k, v):
        return jnp.sin(block_sparse_attention(q, k, v, live, block_size=32, implementation="native_cpu")).sum()

    expected = jax.value_and_grad(run, (0, 1, 2))(q, *(jnp.where(hidden, 0, x) for x in (k, v)))
    got = jax.value_and_grad(run, (0, 1, 2))(q, *(jnp.where(hidden, jnp.nan, x) for x in (k, v)))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert not np.isnan(got[0])
