"""The model of the links: its formulas by hand, the axes of meshes, and figures for every chip."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from vishwamai import aot
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.parallel import (
    AxisLinks,
    axis_links,
    estimate_collective,
    estimate_overlap,
    estimate_split_attention,
    make_mesh,
)

RING = AxisLinks(TPUS["v5p"], (8,), (True,))
LINE = AxisLinks(TPUS["v5e"], (4,), (False,))


def test_every_chip_has_links():
    """A chip's links move less than its memory, and slices are joined by slower ones."""
    for chip in TPUS.values():
        assert chip.dcn_bandwidth < chip.ici_bandwidth < chip.hbm_bandwidth
        assert chip.ici_latency == 1e-6


def test_formulas_by_hand():
    # Seven eighths of 80 MB arrive at every chip over two links of 90 GB/s.
    assert estimate_collective("all_gather", 80e6, RING) == pytest.approx(70e6 / 180e9)
    assert estimate_collective("reduce_scatter", 80e6, RING) == pytest.approx(70e6 / 180e9)
    assert estimate_collective("all_reduce", 80e6, RING) == pytest.approx(140e6 / 180e9)
    # The chip at the end of a line has one link.
    assert estimate_collective("all_gather", 80e6, LINE) == pytest.approx(60e6 / 45e9)
    # V / (4 W) with W both ways, as the book has it; a line has half of the links across its middle.
    assert estimate_collective("all_to_all", 80e6, RING) == pytest.approx(80e6 / (4 * 180e9))
    assert estimate_collective("all_to_all", 80e6, LINE) == pytest.approx(80e6 / (4 * 45e9))
    assert estimate_collective("permute", 90e6, RING) == pytest.approx(1e-3)


def test_small_messages_cost_hops():
    assert estimate_collective("all_gather", 8, RING) == pytest.approx(4e-6)
    assert estimate_collective("all_gather", 8, LINE) == pytest.approx(3e-6)
    assert estimate_collective("all_reduce", 0, LINE) == pytest.approx(6e-6)
    assert estimate_collective("all_gather", 1e9, AxisLinks(TPUS["v5e"], (), ())) == 0.0


def test_two_sides_have_twice_the_links():
    both = AxisLinks(TPUS["v5p"], (4, 8), (True, True))
    assert estimate_collective("all_gather", 32e6, both) == pytest.approx(31e6 / (4 * 90e9))
    # Across the longer side: 4 rings of two links each.
    assert estimate_collective("all_to_all", 32e6, both) == pytest.approx(32e6 / 4 / (8 * 90e9))


@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("topology", "axes", "axis", "sides", "wraps"),
    [
        ("v5e:4x4", "data=4,tensor=4", "tensor", (4,), (False,)),
        ("v5e:4x4", "tensor=16", "tensor", (4, 4), (False, False)),
        ("v5e:8x16", "data=8,tensor=16", "tensor", (16,), (True,)),
        ("v5p:4x4x4", "data=4,tensor=16", "tensor", (4, 4), (True, True)),
        ("v5p:4x4x4", "data=4,tensor=16", "data", (4,), (True,)),
        ("tpu7x:2x2x1", "data=4,tensor=2", "tensor", (), ()),
        ("tpu7x:2x2x1", "data=2,tensor=4", "tensor", (2,), (False,)),
    ],
)
def test_links_of_a_mesh(topology, axes, axis, sides, wraps):
    mesh = make_mesh(axes, topology=topology)
    found = axis_links(mesh, axis)
    assert found.chip is TPUS[topology.partition(":")[0]]
    assert (found.sides, found.wraps) == (sides, wraps)
    assert found.devices == mesh.shape[axis]


@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("topology", "axes", "axis", "expected"),
    [
        # A side of four is cut for "tensor", and the two chips of "fsdp" are two apart: on v5p there is a way around.
        ("v5p:4x4x4", "data=4,fsdp=2,tensor=8", "fsdp", ((2,), (True,), (2,))),
        ("v5e:4x4", "fsdp=8,tensor=2", "fsdp", ((2, 4), (False, False), (2, 1))),
        ("v5e:4x4", "fsdp=8,tensor=2", "tensor", ((2,), (False,), (1,))),
        ("v5e:4x4", "fsdp=2,tensor=8", "fsdp", ((2,), (False,), (2,))),
    ],
)
def test_an_axis_whose_groups_interleave(topology, axes, axis, expected):
    found = axis_links(make_mesh(axes, topology=topology), axis)
    assert (tuple(sorted(found.sides)), found.wraps, tuple(sorted(found.strides, reverse=True))) == expected
    assert found.devices == make_mesh(axes, topology=topology).shape[axis]


def test_interleaved_groups_by_hand():
    """Two lines of four on a side of eight, each with every second chip: every link carries what both send."""
    apart, alone = (AxisLinks(TPUS["v5e"], (4,), (False,), strides=strides) for strides in ((2,), ()))
    assert (apart.links, apart.hops, str(apart)) == (0.5, 6, "v5e, a line of 4 chips, 2 links apart")
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"):
        for nbytes in (1e9, 1):  # bandwidth, latency
            assert estimate_collective(kind, nbytes, apart) == pytest.approx(
                2 * estimate_collective(kind, nbytes, alone)
            )
    ring = AxisLinks(TPUS["v5p"], (2,), (True,), strides=(2,))  # both ways around, two links each, shared by two pairs
    assert estimate_collective("all_gather", 1e9, ring) == pytest.approx(0.5e9 / TPUS["v5p"].ici_bandwidth)
    with pytest.raises(ShapeError, match="`strides` is \\(1, 2\\); pass chips along each side"):
        AxisLinks(TPUS["v5p"], (4,), (True,), strides=(1, 2))


@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_an_axis_that_lies_across():
    """The diagonal of a square is no lattice."""
    by_place = {tuple(device.coords[:2]): device for device in make_mesh("data=16", topology="v5e:4x4").devices.flat}
    diagonals = [[by_place[i, (i + shift) % 4] for i in range(4)] for shift in range(4)]
    with pytest.raises(UnsupportedError, match="the 4 chips of 'b' are neither a box of the slice nor evenly spaced"):
        axis_links(Mesh(np.array(diagonals), ("a", "b")), "b")


def shape(heads, length, dim=128):
    return jax.ShapeDtypeStruct((1, heads, length, dim), jax.numpy.bfloat16)


def test_ways_of_attention_by_hand():
    """Eight chips, 4096 keys each: a hop is 2 * 2 * heads * 4096^2 * 128 operations, and 2 * kv_heads * 4096 * 128
    * 2 bytes travel, fewer than a hop hides.
    """
    chip, full, few = TPUS["v5p"], shape(8, 8 * 4096), shape(2, 8 * 4096)
    hop = 4 * 8 * 4096**2 * 128 / chip.peak_bf16
    found = estimate_split_attention(full, few, few, RING)
    assert found.seconds["ring"] == pytest.approx(8 * hop)
    one = 8 * 8 * 4096 * 128 * 2  # bytes of all queries
    assert found.seconds["ulysses"] == pytest.approx(8 * hop + estimate_collective("all_to_all", 4 * one, RING))
    assert found.seconds["gather"] == pytest.approx(64 * hop + estimate_collective("all_gather", 1.5 * one, RING))
    assert found.best == "ring" and "zigzag" not in found.seconds

    causal = estimate_split_attention(full, few, few, RING, causal=True)
    assert causal.seconds["ring"] == pytest.approx(7.5 * hop, rel=1e-3)  # as the last device sees all
    assert causal.seconds["zigzag"] == pytest.approx(4 * hop, rel=1e-3)
    assert causal.seconds["ulysses"] < causal.seconds["ring"] and causal.best == "zigzag"
    assert str(causal).startswith("zigzag ") and "; ulysses " in str(causal)


def test_transfers_that_no_hop_hides():
    short = shape(8, 8 * 128)
    found = estimate_split_attention(short, short, short, RING)
    moved = max(2 * 8 * 128 * 128 * 2 / 90e9, 1e-6)
    read = 4 * 8 * 128 * 128 * 2 / TPUS["v5p"].hbm_bandwidth  # longer than 4 * 8 * 128**2 * 128 operations take
    assert found.seconds["ring"] == pytest.approx(7 * moved + read)
    windowed = estimate_split_attention(short, short, short, RING, window=(100, 0))
    assert windowed.seconds["ring"] < found.seconds["ring"] / 5  # two hops of eight
    few = estimate_split_attention(shape(4, 1024), shape(1, 1024), shape(1, 1024), RING)
    assert "4 query heads do not divide over 8 devices" in few.declined["ulysses"]


def test_devices_of_a_chip():
    """TPU7x has two devices on each chip: they divide the rows, and hops between them take no link."""
    chip = TPUS["tpu7x"]
    ring, one = AxisLinks(chip, (4,), (True,)), AxisLinks(chip, (), ())
    assert (ring.chips, ring.devices, one.devices, AxisLinks(chip, (4,), (True,), 1).devices) == (4, 8, 2, 4)
    assert ring == AxisLinks(chip, (4,), (True,), 2) and RING.devices == RING.chips
    assert str(ring) == "tpu7x, a ring of 4 chips, 8 devices" and str(RING) == "v5p, a ring of 8 chips"
    found = estimate_overlap("all_gather", 8192, 8192, 4096, "bfloat16", ring)
    assert (found.pieces, found.steps) == (8, 4)
    assert found.piece == pytest.approx(2 * 1024 * 8192 * 4096 / (chip.peak_bf16 / 2))
    with pytest.raises(ShapeError, match="the 8 devices do not divide the 12 rows"):
        estimate_overlap("all_gather", 12, 8, 8, "bfloat16", ring)
    full, few = shape(8, 8 * 4096), shape(2, 8 * 4096)
    hop = 4 * 8 * 4096**2 * 128 / (chip.peak_bf16 / 2)
    assert estimate_split_attention(full, few, few, ring).seconds["ring"] == pytest.approx(8 * hop)
    assert estimate_split_attention(full, full, full, one).seconds["ring"] == pytest.approx(2 * 16 * hop)
    with pytest.raises(ShapeError, match="the 8 devices do not divide the 12 rows of `query`"):
        estimate_split_attention(shape(8, 12), shape(8, 12), shape(8, 12), ring)


def test_a_hybrid_by_hand():
    """Four groups around a ring, two devices in each: a device has half of the heads and a group's keys."""
    chip, full, few = TPUS["v5p"], shape(8, 8 * 4096), shape(2, 8 * 4096)
    around, pair = AxisLinks(chip, (4,), (True,)), AxisLinks(chip, (2,), (False,))
    box = AxisLinks(chip, (4, 2), (True, False))
    found = estimate_split_attention(full, few, few, box, hybrid=(around, pair))
    hop = 4 * 4 * (2 * 4096) ** 2 * 128 / chip.peak_bf16
    one = 8 * 8 * 4096 * 128 * 2 / 4  # bytes of a group's queries
    exchanged = estimate_collective("all_to_all", 1.5 * one, pair) + estimate_collective("all_to_all", one, pair)
    assert found.seconds["hybrid"] == pytest.approx(4 * hop + exchanged)
    causal = estimate_split_attention(full, few, few, box, causal=True, hybrid=(around, pair))
    assert causal.seconds["hybrid"] == pytest.approx(3.5 * hop + exchanged, rel=1e-3)  # the last group sees all
    odd = estimate_split_attention(shape(3, 1024), shape(3, 1024), shape(3, 1024), box, hybrid=(around, pair))
    assert "3 query heads do not divide over 2 devices" in odd.declined["hybrid"] and "hybrid" not in odd.seconds
    assert "hybrid" not in {**causal.declined, **estimate_split_attention(full, few, few, box).seconds}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate_collective("broadcast", 1, RING), "pass one of all_gather, reduce_scatter"),  # pyright: ignore
        (lambda: estimate_collective("all_gather", -1, RING), "`bytes` is -1"),
        (
            lambda: estimate_split_attention(shape(2, 1025), shape(2, 1025), shape(2, 1025), RING),
            "8 devices do not divide the 1025 rows",
        ),
        (
            lambda: AxisLinks(TPUS["v5e"], (4,), (False,), 2),
            "`on_chip` is 2; pass 1 to 1, the devices of a chip",
        ),
        (
            lambda: estimate_split_attention(shape(2, 64), shape(2, 64), shape(2, 64), RING, hybrid=(LINE, LINE)),
            "`hybrid` has 4 x 4 devices, but `links` has 8",
        ),
        (lambda: axis_links(make_mesh("data=8"), "tensor"), "`axis` is 'tensor', but the mesh has data"),
        (lambda: axis_links(make_mesh("data=8"), "data"), "the devices are cpu; pass a mesh of TPUs"),
    ],
)
def test_wrong_arguments(call, message):
    assert jax.device_count() == 8
    with pytest.raises(ShapeError, match=message):
        call()
