"""Meshes: what the text says, on neighbours of the torus, and errors that name what to pass."""

import dataclasses
import itertools
import math

import jax
import pytest
from jax.sharding import AxisType

from vishwamai import aot
from vishwamai.core import hardware
from vishwamai.core.errors import CacheWarning, DeviceError, ShapeError
from vishwamai.core.hardware import tpu_for
from vishwamai.parallel import axis_links, configure_tpu_mesh, make_mesh, torus
from vishwamai.parallel.mesh import laid_out
from vishwamai.training.config import MeshSection
from vishwamai.training.sharding import make_layout

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")


def test_axes_in_text():
    mesh = make_mesh("fsdp=2, tensor=-1,sequence=2")
    assert dict(mesh.shape) == {"fsdp": 2, "tensor": 2, "sequence": 2}
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert make_mesh({"data": 4}, devices=jax.devices()[:4]).devices.tolist() == jax.devices()[:4]


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "axes"),
    [
        ("v5e:4x4", "data=2,tensor=8"),
        ("v5e:4x4", "tensor=16"),
        ("v5p:2x2x2", "tensor=8"),
        ("v5p:4x4x4", "data=4,tensor=16"),
        ("v5p:4x4x4", "data=4,fsdp=2,tensor=8"),
        ("v6e:8x16", "data=8,tensor=16"),
        ("tpu7x:2x2x2", "tensor=16"),
    ],
)
def test_the_busiest_axis_is_a_ring_of_neighbours(topology, axes):
    mesh = make_mesh(axes, topology=topology)
    devices = list(mesh.devices.flat)
    assert len(set(devices)) == len(devices) == math.prod(mesh.shape.values())
    chip, sides = tpu_for(devices[0].device_kind), torus.sides_of(devices)
    assert chip is not None
    wraps = hardware.wraps(chip, sides)
    for line in mesh.devices.reshape(-1, mesh.devices.shape[-1]):
        for a, b in zip(line, [*line[1:], line[0]]):
            assert torus.hops(torus.place(a), torus.place(b), sides, wraps) <= 1


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a placement reads of a device."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"
    core_on_chip: int = 0
    process_index: int = 0


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "axes", "sides"),
    [
        ("v5e:2x4", "expert=4,tensor=2", [(4,), (2,)]),
        ("v6e:2x4", "expert=2,tensor=4", [(2,), (4,)]),
        ("v5e:2x2", "data=2,tensor=2", [(2,), (2,)]),
        ("v5e:2x4", "data=2,tensor=4,one=1", [(2,), (4,), ()]),
    ],
)
def test_axes_of_a_small_slice_have_their_own_links(topology, axes, sides):
    """JAX cuts these slices out of one ring, in which an axis that is not the last goes across."""
    mesh = make_mesh(axes, topology=topology)
    assert [axis_links(mesh, axis).sides for axis in mesh.axis_names] == sides
    assert len({device.id for device in mesh.devices.flat}) == mesh.size


def test_the_first_axis_goes_over_slices():
    """Two slices of 2x4: what is next to each other in the other axes is so within a slice."""
    places = itertools.product(range(2), range(4), range(2))
    chips = [Chip(i, (x, y, 0), index) for i, (index, y, x) in enumerate(places)]
    for shape in ((2, 8), (2, 2, 4), (4, 4)):
        grid = laid_out(shape, chips)
        assert grid.shape == shape and {chip.id for chip in grid.flat} == set(range(16))
        for index, slice_of in enumerate(grid.reshape(2, 8)):
            assert {chip.slice_index for chip in slice_of} == {index}
    with pytest.raises(ValueError, match="there are 2 slices, which do not divide the first axis of 1"):
        laid_out((1, 16), chips)


@pytest.mark.parametrize(
    "sides", [(1,), (5,), (2, 2), (3, 4), (4, 3), (3, 3), (2, 3, 5), (3, 3, 3), (4, 1, 2), (2, 2, 2, 2)]
)
def test_a_ring_visits_every_point(sides):
    found = torus.ring(sides)
    assert sorted(found) == sorted(itertools.product(*map(range, sides)))
    steps = list(zip(found, found[1:]))
    closes = sum(side > 1 for side in sides) > 1 and any(side % 2 == 0 for side in sides)
    if closes:
        steps.append((found[-1], found[0]))
    assert all(sum(abs(x - y) for x, y in zip(a, b)) == 1 for a, b in steps)


@needs_libtpu
def test_the_promised_name():
    assert dict(configure_tpu_mesh(num_cores=8, topology="2x2x2").shape) == {"data": 8}
    mesh = configure_tpu_mesh(16, "tpu7x:2x2x2", "data=2,tensor=8")
    assert dict(mesh.shape) == {"data": 2, "tensor": 8}
    assert dict(configure_tpu_mesh(4, "2x2").shape) == {"data": 4}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_mesh("fsdp"), ShapeError, "write names and sizes"),
        (lambda: make_mesh("a=0"), ShapeError, "'a': 0; pass every name once"),
        (lambda: make_mesh("a=2,a=4"), ShapeError, "'a': 2; pass every name once"),
        (lambda: make_mesh("a=-1,b=-1"), ShapeError, "-1 for at most one"),
        (lambda: make_mesh({}), ShapeError, "at least one axis"),
        (lambda: make_mesh("a=3,b=-1"), ShapeError, r"axes {'a': 3, 'b': 2} hold 6 devices, but the list has 8"),
        (lambda: make_mesh("a=2,b=2"), ShapeError, "pass a=4,b=2 or a=2,b=4, or the first 4 devices"),
        (lambda: make_mesh("a=16"), ShapeError, "force_host_platform_device_count=16 makes them"),
        (lambda: make_mesh("a=2", devices=[jax.devices()[0]] * 2), ShapeError, "has 2 devices, 1 of them different"),
        (lambda: make_mesh("a=1", devices=[3]), ShapeError, "`devices` has 3, of type int"),
        (lambda: make_mesh("a=2", topology="v5e:4x4", devices=jax.devices()), ShapeError, "both given"),
        (lambda: make_mesh("a=2", topology="v5e"), ShapeError, "pass a slice, such as 'v5e:2x2'"),
        (lambda: make_mesh("a=12", topology="v5e:3x4"), DeviceError, "the nearest are v5e:4x4, v5e:2x4"),
        (lambda: configure_tpu_mesh(16, "2x2x2"), ShapeError, "v4:2x2x2 has 8 devices, but .* the nearest are 2x2x4"),
        (lambda: configure_tpu_mesh(8, "axb"), DeviceError, "topology` is 'axb'; pass the sides of a slice such as"),
        (lambda: configure_tpu_mesh(0), ShapeError, "`num_cores` is 0"),
        (lambda: configure_tpu_mesh(8, "2x2x3"), DeviceError, "no slice of 2x2x3 chips; the nearest are"),
        (lambda: configure_tpu_mesh(8, "v5e"), ShapeError, "pass the sides of a slice"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@needs_libtpu
def test_sizes_that_do_not_fit_a_slice():
    with pytest.raises(ShapeError, match="hold 3 devices, but v5e:4x4 has 16; pass a=16, or another slice: v5e:2x2"):
        make_mesh("a=3", topology="v5e:4x4")


@pytest.mark.parametrize(
    "several",
    [
        lambda: make_mesh("a=2", devices=jax.devices()[:2]),
        lambda: make_layout(MeshSection(fsdp=2), {}, {}, batch_size=2, microbatches=1),
    ],
)
def test_programs_of_several_cpu_devices_are_not_read_from_the_cache(tmp_path, several):
    """Read back, a pipeline's step waited for ever, or ended the process: devices were in different collectives."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert make_mesh("a=1", devices=jax.devices()[:1]).size == 1
    assert jax.config.values["jax_enable_compilation_cache"]
    with pytest.warns(CacheWarning, match="turned off: programs of several CPU devices"):
        several()
    assert not jax.config.values["jax_enable_compilation_cache"]
