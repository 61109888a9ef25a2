"""Attention's TPU kernels: the schedule of tiles against the mask itself, tilings that must not change the answer,
memory plans, declined calls.

The numbers of every feature are the contract suite's; here stands what only these kernels have.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import rotation
from vishwamai.core import hardware
from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.pallas import planning_chip
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.core.target import Target
from vishwamai.ops.attention import reference, tpu
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.tpu_schedule import Panel, Tiling, make_schedule, pack_tile, panel_bound, unpack_tile
from vishwamai.ops.attention.tpu_walk import live_tiles


def spec_of(
    q_len=256, kv_len=256, *, heads=(1, 1), dims=(64, 64), dtype="float32", extra=None, **options
) -> AttentionSpec:
    kind = jnp.dtype(dtype)
    operands = Operands(
        ArraySpec((1, heads[0], q_len, dims[0]), kind),
        ArraySpec((1, heads[1], kv_len, dims[0]), kind),
        ArraySpec((1, heads[1], kv_len, dims[1]), kind),
        **(extra or {}),
    )
    return AttentionSpec(operands, scale=dims[0] ** -0.5, **options)


def visible(spec: AttentionSpec) -> np.ndarray:
    """The static mask, `[Tq, Tk]`, from its definition."""
    low, high = spec.band
    distance = np.arange(spec.kv_len)[None, :] - np.arange(spec.q_len)[:, None]
    seen = np.ones(distance.shape, bool)
    if low is not None:
        seen &= distance >= low
    if high is not None:
        seen &= distance <= high
    return seen


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "bottom right": {"causal": True, "causal_offset": -700},
    "window": {"window": (200, 100)},
    "window left of causal": {"window": (300, None), "causal": True},
    "nothing": {"window": (0, 0), "causal_offset": 5000},
}


@pytest.mark.parametrize("kv_major", [False, True])
@pytest.mark.parametrize("panels", [(1, 1), (2, 4), (8, 8)])
@pytest.mark.parametrize("mask", MASKS, ids=lambda name: name.replace(" ", "_"))
def test_schedule_visits_what_the_mask_shows_and_nothing_else(mask, panels, kv_major):
    spec = spec_of(900, 1000, heads=(4, 2), **MASKS[mask])
    panel_q, panel_kv = panels
    tiling = Tiling(128, 128, panel_q, panel_kv, 2)
    schedule = make_schedule(spec, tiling, masked=False, kv_major=kv_major, heads=2)
    seen = visible(spec)
    visits: dict[tuple[int, int, int], bool] = {}
    steps = [Panel(schedule.panels.reshape(-1), step) for step in range(schedule.steps)]
    for panel in steps:
        plain, count, start = schedule.counts[panel.tiles]
        for n, word in enumerate(schedule.tiles[start : start + count]):
            i, j, _ = unpack_tile(word)
            at = panel.q * panels[0] + i, panel.kv * panels[1] + j, int(panel.g)
            assert at not in visits
            visits[at] = n < plain
    for g in range(spec.group):
        for i in range(8):
            for j in range(8):
                block = seen[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                assert ((i, j, g) in visits) == bool(block.any())
                if visits.get((i, j, g)):
                    assert block.shape[1] == 128 and block.all()  # no mask code: complete, and no key past the end
    # Every accumulation begins once and ends once, whatever it sees.
    sums = [panel.kv if kv_major else (panel.q, panel.g) for panel in steps]
    expected = [*range(8 // panels[1])] if kv_major else [(q, g) for q in range(8 // panels[0]) for g in range(2)]
    assert [at for at, panel in zip(sums, steps, strict=True) if panel.begins] == expected
    assert [at for at, panel in zip(sums, steps, strict=True) if panel.ends] == expected
    assert len(steps) <= panel_bound(spec, tiling) * spec.group


def test_causal_work_is_half():
    spec = spec_of(4096, 4096, causal=True)
    schedule = make_schedule(spec, Tiling(512, 512, 8, 8, 4), masked=False, kv_major=False)
    assert schedule.counts.tolist() == [[28, 36, 0]]  # of 64: the tiles below the diagonal, and the eight on it


def test_segments_rewrite_the_list():
    """Tiles whose ids cannot meet go, tiles of one segment need no mask, and the rest comes last."""
    q_ids, kv_ids = np.array([[0, 0], [0, 1], [2, 2]]), np.array([[0, 0], [1, 2], [3, 3]])
    tiles = [pack_tile(i, j) for j in range(3) for i in range(3)]

    def kernel(tiles_ref, q_ref, kv_ref, out_ref, count_ref):
        def run(spare_ref):
            plain, count = live_tiles(
                lambda t: tiles_ref[t],
                (jnp.int32(8), jnp.int32(9)),
                lambda n: (q_ref[2 * n], q_ref[2 * n + 1]),
                lambda n: (kv_ref[2 * n], kv_ref[2 * n + 1]),
                out_ref,
                spare_ref,
                1,
            )
            count_ref[0], count_ref[1] = plain, count

        pl.run_scoped(run, pltpu.SMEM((10,), jnp.int32))

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        out, counts = pl.pallas_call(
            kernel,
            in_specs=[smem] * 3,
            out_specs=[smem] * 2,
            out_shape=[jax.ShapeDtypeStruct((10,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)],
        )(*(jnp.asarray(x, jnp.int32).reshape(-1) for x in ([*tiles, 0], q_ids, kv_ids)))
    plain, count = counts.tolist()
    found = [unpack_tile(word)[:2] for word in out.tolist()[:count]]
    assert found[:plain] == [(0, 0)]
    assert found[plain:] == [(1, 0), (1, 1), (2, 1)]
    assert out[count] == 0


def run(spec: AttentionSpec, operands: Operands, cotangents: Outputs, sizes: tuple[int, ...], form: dict[str, bool]):
    config = tpu.AttentionConfig(Tiling(*sizes), Tiling(*sizes), tpu.Form(**form))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)):
        outputs, logsumexp = tpu.forward(spec, config, operands, True)
        assert logsumexp is not None
        gradients = tpu.backward(spec, config, operands, outputs, logsumexp, cotangents)
        return jax.tree.map(np.asarray, (outputs, tuple(gradients[:3])))


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        pytest.param(*given, id=f"{given[0]}-{given[1]}", marks=rotation.one_in(2, i))
        for i, given in enumerate(
            (
                ((128, 128, 1, 1, 2, 2), {"streaming": True}),
                ((128, 256, 2, 1, 2, 1), {"split": True}),
                ((256, 128, 2, 4, 4, 2), {}),
                ((128, 128, 2, 1, 2, 2), {"streaming": True, "resident": True}),
            )
        )
    ],
)
def test_panels_do_not_change_the_answer(sizes, form):
    """Several key panels (dq is summed in HBM, or stays), several query panels, both; one walk and two; one buffer and
    two.
    """
    rng = np.random.default_rng(0)
    shapes = ((1, 2, 500, 16), (1, 1, 500, 16), (1, 1, 500, 16))
    operands = Operands(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))
    spec = AttentionSpec(
        Operands(*(None if x is None else array_spec(x) for x in operands)),
        causal=True,
        window=(300, None),
        scale=0.25,
        precision="highest",
    )
    cotangents = Outputs(jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32), None)
    outputs, _ = reference.forward(spec, operands, False)
    expected = autodiff_backward(reference.forward)(spec, None, operands, cotangents)
    (out, _), gradients = run(spec, operands, cotangents, sizes, form)
    np.testing.assert_allclose(out, outputs.out, atol=1e-5)
    for ours, theirs in zip(gradients, expected[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


@pytest.mark.turns(3)
@pytest.mark.parametrize("chip", [None, *hardware.TPUS.values()], ids=lambda chip: chip.name if chip else "unknown")
@pytest.mark.parametrize("length", [1, 63, 4096, 65536])
@pytest.mark.parametrize("dim", [1, 64, 128, 256])
def test_heuristic_fits_the_chip(chip, length, dim):
    for dtype in ("float32", "bfloat16"):
        spec = spec_of(length, length, heads=(32, 8), dims=(dim, dim), dtype=dtype, causal=True)
        config = tpu.heuristic(spec, Target("tpu", chip))
        assert tpu.why_not(spec, Target("tpu", chip)) is None
        assert config.vmem_bytes <= planning_chip(Target("tpu", chip)).vmem_bytes * 7 // 8
        assert config.backward_vmem_bytes <= planning_chip(Target("tpu", chip)).vmem_bytes * 15 // 16
        for tiling in (config.forward, config.backward):
            q_blocks, kv_blocks = tiling.blocks(spec)
            assert q_blocks * tiling.block_q < length + max(128, tiling.block_q)
            assert kv_blocks * tiling.block_kv < length + max(128, tiling.block_kv)
            assert tiling.unroll % 2 == 0 and tiling.block_q % 128 == 0 and tiling.block_kv % 128 == 0
        # The schedule has to fit the scalar memory beside everything else.
        schedule = make_schedule(spec, config.backward, masked=False, kv_major=True, heads=4)
        assert schedule.words < tpu.SCHEDULE_WORDS


def test_block_size_bounds_the_tiles():
    spec = spec_of(2048, 2048, dtype="bfloat16")
    config = tpu.heuristic(spec, Target("tpu", hardware.TPUS["v5e"])).with_block_size(200)
    for tiling in (config.forward, config.backward):
        assert (tiling.block_q, tiling.block_kv, tiling.panel_q) == (256, 256, 1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of(dtype="float16"), "`query` is float16, and the kernel computes in float32 and bfloat16."),
        (spec_of(0, 8), "an operand is empty."),
        (spec_of(dims=(40000, 64)), "takes .* bytes of VMEM, more than the .* there are to plan with"),
        (spec_of(1 << 21, 1 << 21, heads=(64, 1), dims=(256, 256)), "words of schedule, and scalar memory has"),
    ],
    ids=["float16", "empty", "too wide", "too long"],
)
def test_declined_calls_name_the_reason(spec, words):
    reason = tpu.why_not(spec, Target("tpu", hardware.TPUS["v5e"]))
    assert reason is not None
    assert re.search(words, reason)


def test_dtypes_must_agree():
    spec = spec_of()
    mixed = dataclasses.replace(
        spec, operands=spec.operands._replace(key=ArraySpec((1, 1, 256, 64), jnp.dtype("bfloat16")))
    )
    assert "one dtype for query, key and value" in (tpu.why_not(mixed, Target("tpu")) or "")
