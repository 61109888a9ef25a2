"""Compiling for chips you do not have: every generation, topologies, and every error in words."""

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import vishwamai
from vishwamai import aot
from vishwamai.aot.compile import compiled, diagnose, libtpu
from vishwamai.aot.compile.compiled import place
from vishwamai.core.config import current_config
from vishwamai.core.errors import DeviceError, KernelError, ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS, tpu_for
from vishwamai.parallel import make_mesh

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")


def shape(dims, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def blocks_of(mib, chip_limit=None):
    """A copy kernel whose double-buffered blocks take `mib` MiB."""
    rows, steps = (mib << 20) // 2048, 64
    block = pl.BlockSpec((rows, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        double,
        out_shape=shape((rows * steps, 128)),
        grid=(steps,),
        in_specs=[block],
        out_specs=block,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip_limit),
        name="doubler",
    )
    return call, shape((rows * steps, 128))


@needs_libtpu
@pytest.mark.parametrize("target", TPUS)
def test_every_chip_compiles_and_counts(target):
    x = shape((1024, 1024), jnp.bfloat16)
    program = aot.compile_for(lambda a, b: a @ b, x, x, target=target)
    assert program.chip is TPUS[target]
    assert program.memory.arguments == 2 * 1024 * 1024 * 2
    assert program.memory.outputs == 1024 * 1024 * 2
    assert program.memory.fits
    assert program.cost.flops == 2 * 1024**3
    assert "dot" in program.text or "convolution" in program.text
    assert libtpu.describe_device(target).device_kind in TPUS[target].device_kinds


@pytest.mark.turns(4)
@needs_libtpu
@pytest.mark.parametrize("target", TPUS)
def test_hbm_table_is_what_the_compiler_says(target):
    with pytest.raises(DeviceError, match="of HBM") as caught:
        aot.compile_for(lambda a: a @ a, shape((400_000, 400_000)), target=target)
    # the compiler prints two decimals of a GiB
    assert diagnose.problem_of(caught.value).limit == pytest.approx(TPUS[target].hbm_usable_bytes, abs=0.01 * 2**30)


@needs_libtpu
@pytest.mark.parametrize("target", TPUS)
def test_scoped_vmem_table_is_what_the_compiler_says(target):
    limit = TPUS[target].vmem_scoped_bytes >> 20
    fn, x = blocks_of(limit - 4)
    kernels = {k.name: k for k in aot.compile_for(fn, x, target=target).kernels}
    assert kernels["doubler.1"].pallas
    assert kernels["doubler.1"].vmem == (limit - 4) << 20
    fn, x = blocks_of(limit + 4)
    report = aot.check(fn, x, target=target)
    assert not report.compiles
    (problem,) = report.problems
    assert problem.kind == ("vmem" if target == "v4" else "scoped vmem")  # v4: a kernel's share is all there is
    assert problem.used == (limit + 4) << 20
    assert problem.limit == limit << 20
    assert "doubler" in str(report)
    assert f"{limit + 4}.0 MiB" in str(report)
    assert "smaller blocks" in str(report)


@needs_libtpu
def test_vmem_limit_bytes_is_the_fix_that_it_says():
    fn, x = blocks_of(20)
    assert "vmem_limit_bytes" in str(aot.check(fn, x, target="v5e"))
    fn, x = blocks_of(20, chip_limit=24 << 20)
    assert aot.check(fn, x, target="v5e").fits


@pytest.mark.turns(3)
@needs_libtpu
def test_one_block_larger_than_the_chip(monkeypatch):
    monkeypatch.setattr(compiled, "refuse_too_large", lambda *_: None)  # which would be first
    fn, x = blocks_of(300)
    with pytest.raises(DeviceError, match=r"input window allocation.*takes 150\.0 MiB, but v5p has 64\.0 MiB of VMEM"):
        aot.compile_for(fn, x, target="v5p")


@needs_libtpu
def test_smem_exhaustion_names_the_operand():
    def body(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[0].astype(jnp.float32)

    block = pl.BlockSpec((8, 128), lambda i, table: (0, 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block)
    call = pl.pallas_call(body, out_shape=shape((8, 128)), grid_spec=grid, name="prefetcher")
    with pytest.raises(DeviceError, match=r"prefetched SMEM operand 0.*16\.0 MiB.*1\.0 MiB of SMEM") as caught:
        aot.compile_for(call, shape((4 << 20,), jnp.int32), shape((8, 128)))
    assert diagnose.problem_of(caught.value).kernel == "prefetcher.1"


@needs_libtpu
@pytest.mark.parametrize(
    ("target", "dtype", "fix"),
    [
        ("v4", jnp.int8, "v4 multiplies bfloat16 and float32; convert"),
        ("v4", jnp.float8_e4m3fn, "v4 multiplies bfloat16 and float32; convert"),
        ("v5e", jnp.float16, "no float16"),
    ],
)
def test_mosaic_errors_name_kernel_operation_and_line(target, dtype, fix):
    out = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def product(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...], preferred_element_type=o_ref.dtype)

    call = pl.pallas_call(product, out_shape=shape((256, 256), out), name="product")
    with pytest.raises(UnsupportedError, match=fix) as caught:
        aot.compile_for(call, shape((256, 256), dtype), target=target)
    assert diagnose.problem_of(caught.value).kernel == "product.1"
    assert "test_aot_compile.py:" in (diagnose.problem_of(caught.value).where or "")
    assert "tpu." in str(caught.value)


@needs_libtpu
def test_pallas_errors():
    def sorts(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=0)

    with pytest.raises(UnsupportedError, match="no `sort` inside a TPU kernel"):
        aot.compile_for(pl.pallas_call(sorts, out_shape=shape((8, 128))), shape((8, 128)))
    odd = pl.BlockSpec((7, 100), lambda i: (i, 0))
    call = pl.pallas_call(double, grid=(2,), in_specs=[odd], out_specs=odd, out_shape=shape((70, 300)), name="odd")
    with pytest.raises(UnsupportedError, match=r"a block of \(7, 100\) over an array of \(70, 300\) cannot be tiled"):
        aot.compile_for(call, shape((70, 300)))


@needs_libtpu
def test_topology_with_shardings():
    mesh = aot.mesh_for("v5e:4x4", {"data": 4, "model": 4})
    assert mesh.explicit_axes == ("data", "model")
    a = shape((1024, 512), jnp.bfloat16, NamedSharding(mesh, PartitionSpec("data", None)))
    b = shape((512, 1024), jnp.bfloat16, NamedSharding(mesh, PartitionSpec(None, "model")))
    program = aot.compile_for(lambda a, b: a @ b, a, b, target="v5e:4x4")
    assert program.devices == 16
    assert program.memory.arguments == 2 * (1024 * 512 * 2 // 4)
    assert program.memory.outputs == 1024 * 1024 * 2 // 16
    # a mesh of anything else is carried over, and unsharded arguments are replicated
    mesh = AbstractMesh((2, 4), ("x", "y"))
    a = shape((1024, 512), jnp.bfloat16, NamedSharding(mesh, PartitionSpec("x", "y")))
    program = aot.compile_for(lambda a, b: a @ b, a, np.ones((512, 64), jnp.bfloat16), target="v6e:2x4")
    assert program.memory.arguments == 1024 * 512 * 2 // 8 + 512 * 64 * 2
    with pytest.raises(ShapeError, match=r"sharded over 8 devices .* has 1; name a topology"):
        aot.compile_for(jnp.sum, a, target="v6e")
    report = aot.check(pl.pallas_call(double, out_shape=shape((1024, 512), jnp.bfloat16)), a, target="v6e:2x4")
    assert report.problems[0].kind == "sharding"
    assert "shard_map" in str(report)
    explicit = "Mesh(devices, ('x', 'y'), axis_types=(jax.sharding.AxisType.Explicit,) * len(('x', 'y')))"
    assert explicit in report.problems[0].fix
    with pytest.raises(ShapeError, match="hold 8 devices, but 'v5e:4x4' has 16"):
        aot.mesh_for("v5e:4x4", {"data": 8})


@needs_libtpu
def test_a_mesh_of_the_targets_own_devices_keeps_their_order():
    """A ring over two sides of the torus, say; other arguments follow."""
    mesh = make_mesh("ring=8", topology="v5e:2x4")
    spec = PartitionSpec("ring")
    split = jax.shard_map(
        lambda x, y: jax.lax.psum(x, "ring") + y, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    x = shape((64, 128), jnp.float32, NamedSharding(mesh, spec))
    placed = place((x, shape((8, 128), jnp.float32)), "v5e:2x4")
    assert [d.id for d in placed[1].sharding.mesh.devices.flat] == [d.id for d in mesh.devices.flat] != list(range(8))
    assert aot.compile_for(split, *placed, target="v5e:2x4").devices == 8


@needs_libtpu
@pytest.mark.long
def test_explicit_axes_around_a_call_split_a_kernel_in_a_program_of_automatic_axes():
    devices = aot.mesh_for("v5e:2x2", {"data": 2, "heads": 2}).devices
    mesh = jax.sharding.Mesh(devices, ("data", "heads"))  # automatic
    spec = PartitionSpec("data", "heads")
    x = shape((2, 4, 256, 128), jnp.bfloat16, NamedSharding(mesh, spec))

    def attend(q, k, v):
        return vishwamai.flash_attention(q, k, v, causal=True)

    def double(q, k, v):  # a kernel that is not ours
        kernel = pl.pallas_call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * 2), out_shape=q)
        return kernel(q) + k + v

    def loss(q, k, v):
        attend_explicit: Any = jax.sharding.explicit_axes(attend, in_sharding=(spec, spec, spec))
        return jnp.sum((attend_explicit(q, k, v) * 2).astype(jnp.float32) ** 2)

    fix = aot.check(double, x, x, x, target="v5e:2x2").problems[0].fix
    mine = "jax.sharding.PartitionSpec('data', 'heads')"
    assert f"explicit_axes(function, in_sharding=({mine}, {mine}, {mine}))(*operands)" in fix
    assert "Mesh(devices, ('data', 'heads'), axis_types=" in fix
    with jax.set_mesh(mesh):
        program = aot.compile_for(jax.grad(loss, argnums=(0, 1, 2)), x, x, x, target="v5e:2x2")
    text = program.compiled.as_text() or ""
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


@needs_libtpu
def test_the_target_is_ambient_while_tracing():
    seen = []

    def fn(x):
        seen.append(current_config().target)
        return x + 1

    aot.compile_for(fn, shape((8,)), target="v6e")
    aot.compile_for(jax.jit(fn), shape((8,)), target="v5p")
    assert seen == ["v6e", "v5p"]
    assert current_config().target is None


@needs_libtpu
def test_functions_without_arrays_and_with_static_arguments():
    assert aot.check(lambda: jnp.ones((8, 128)) + 3, target="v5e").fits
    power = jax.jit(lambda x, n: x**n, static_argnums=1)
    assert aot.compile_for(power, shape((8, 128)), 3).memory.outputs == 8 * 128 * 4


@needs_libtpu
def test_the_functions_own_errors_pass_through():
    with pytest.raises(TypeError):
        aot.check(lambda x: x + "text", shape((8,)))


@needs_libtpu
def test_topologies_that_do_not_exist():
    with pytest.raises(DeviceError, match="v4, v5e, v5p, v6e, tpu7x"):
        aot.check(jnp.sin, shape((8,)), target="v9")
    with pytest.raises(DeviceError, match="'many' is not a topology.*such as 'v5e:2x2'"):
        aot.check(jnp.sin, shape((8,)), target="v5e:many")
    # libtpu ends the process on v5e:32x8 and on a side of 0
    for impossible in ("v5e:3x5", "v5e:0x2", "v5p:0x1x1", "v5e:2x2x2", "v5e:32x8", "v6e:64x64", "v5p:64x64x64"):
        with pytest.raises(DeviceError, match=f"has no slice of .* chips; the nearest are {impossible[:3]}:"):
            aot.check(jnp.sin, shape((8,)), target=impossible)


@pytest.mark.turns(3)
def test_jax_profiles_a_process_that_compiled_for_a_tpu():
    """In a process of its own: where libtpu's profiler is loaded, a trace ends the process by SIGSEGV."""
    program = """
import tempfile, jax, jax.numpy as jnp
from vishwamai.aot.compile.libtpu import devices_for
assert len(devices_for("v5e:2x2")) == 4
with tempfile.TemporaryDirectory() as directory, jax.profiler.trace(directory):
    jnp.ones(3).sum().block_until_ready()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_missing_libtpu_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(libtpu, "has_libtpu", lambda: False)
    libtpu._describe.cache_clear()
    with pytest.raises(DeviceError, match="pip install"):
        aot.compile_for(jnp.sin, shape((8,)))
    libtpu._describe.cache_clear()


def test_unknown_compiler_texts_are_passed_on():
    problem = diagnose.diagnose("INTERNAL: E9999: SomethingNew: the moon is in the way\nmore", TPUS["v6e"])
    assert problem.kind == "compiler"
    assert "the moon is in the way" in str(problem)
    error = diagnose.translate(RuntimeError("INTERNAL: unheard of"), TPUS["v6e"])
    assert type(error) is KernelError


def test_only_the_compilers_exceptions_are_translated():
    assert not diagnose.from_compiler(ValueError("my own"))
    assert not diagnose.from_compiler(KeyError("x"))
    assert diagnose.from_compiler(NotImplementedError("Mosaic kernels cannot be automatically partitioned."))
    assert diagnose.from_compiler(jax.errors.JaxRuntimeError("INTERNAL"))


def test_chip_table():
    assert list(TPUS) == ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert tpu_for("TPU v5 lite") is TPUS["v5e"]
    assert tpu_for("NVIDIA H200") is None
    for one in TPUS.values():
        # the peak follows from the arrays and the clock: one row a cycle up to v5, two from v6e on (within rounding)
        rows = 1 if one.generation < 6 else 2
        derived = one.cores * one.mxus * one.mxu_size**2 * 2 * rows * one.clock
        assert derived == pytest.approx(one.peak_bf16, rel=0.01), one.name
        assert one.vmem_scoped_bytes <= one.vmem_bytes
        assert one.hbm_usable_bytes * one.devices <= one.hbm_bytes * 1.01
        assert one.peak("float32") < one.peak("bfloat16") <= one.peak("int8")
        assert one.cores_per_device * one.devices == one.cores
    assert [c.name for c in TPUS.values() if c.cores_per_device > 1] == ["v4", "v5p"]
    assert [c.name for c in TPUS.values() if c.has_int8] == ["v5e", "v5p", "v6e"]
    assert [c.name for c in TPUS.values() if c.has_fp8] == ["v6e", "tpu7x"]


@needs_libtpu
def test_blocks_beyond_vmem_are_refused_before_the_compiler(monkeypatch):
    def product(x_ref, y_ref, o_ref, sum_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...]) + sum_ref[...]

    def call(x, block):
        specs = [pl.BlockSpec((block, block), where) for where in (lambda i, j: (i, 0), lambda i, j: (0, 0))]
        out = pl.BlockSpec((block, block), lambda i, j: (i, j))
        scratch = [pltpu.VMEM((block, block), jnp.float32)]
        shape = jax.ShapeDtypeStruct((16384, 16384), jnp.float32)
        return pl.pallas_call(
            product, shape, grid=(4, 4), in_specs=specs, out_specs=out, scratch_shapes=scratch, name="wide"
        )(x, x)

    monkeypatch.setattr(libtpu, "quiet_compiler", lambda: pytest.fail("the compiler ran"))
    x = jax.ShapeDtypeStruct((16384, 16384), jnp.float32)
    report = aot.check(jax.jit(call, static_argnums=1), x, 4096, target="v5e")
    (problem,) = report.problems
    mib = 2**20
    assert (problem.kind, problem.kernel, problem.used, problem.limit) == ("vmem", "wide", 384 * mib, 128 * mib)
    assert problem.allocations[0] == "128.0 MiB: a block of float32[4096,4096] (buffered 2 times)"
    assert problem.allocations[2:] == (
        "64.0 MiB: scratch of float32[4096,4096]",
        "64.0 MiB: a block of float32[4096,4096]",
    )
