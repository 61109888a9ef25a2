"""Whatever block size is asked for, the tiles that `explain` promises fit the chip and compile."""

import functools
import random
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import rotation
import vishwamai
from vishwamai import aot
from vishwamai.bench.gradient import gradient_case
from vishwamai.core.config import kernel_config
from vishwamai.core.explain import explain
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.pallas import vmem_budget
from vishwamai.ops.attention.tpu_tiles import AttentionConfig
from vishwamai.ops.catalogue import operations

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
BLOCK_SIZES = (1, 7, 64, 100, 128, 300, 512, 2048, 4096, 65536, 10**9)
A, B = (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16) for _ in range(2))


def plans(op, case, chip, block_size):
    """The plans of the op in a case."""
    with kernel_config(target=chip, block_size=block_size, strict=False):
        return [p for p in record_plans(lambda arrays: case.run(arrays), case.shapes()) if p.op.name == op.name]


def chosen(salt, count):
    """(operation, case, chip, block size): so many of every operation, another share of them every day."""
    for op in operations().values():
        rng = random.Random(zlib.crc32(f"{rotation.SEED}/{salt}/{op.name}".encode()))
        for _ in range(count):
            case, chip, block_size = rng.choice(op.cases), rng.choice(list(TPUS)), rng.choice(BLOCK_SIZES)
            yield pytest.param(op, case, chip, block_size, id=f"{op.name}-{case.name}-{chip}-{block_size}")


@pytest.mark.parametrize("block_size", [4096, 10**9])
def test_gemm_of_a_huge_block_size_plans_what_fits(block_size):
    with kernel_config(block_size=block_size):
        (plan,) = plans_of_gemm("v5e")
    config = plan.choice("tpu").config
    need = config.needs(plan.spec, plan.choice("tpu").target)["vmem_bytes"]
    assert need == config.vmem_bytes <= vmem_budget(plan.choice("tpu").target), config


def plans_of_gemm(chip, **options):
    with kernel_config(target=chip):
        return record_plans(lambda a, b: vishwamai.gemm(a, b, **options), A, B)


def test_explain_says_that_a_config_of_ones_own_does_not_fit():
    (plan,) = plans_of_gemm("v5e")
    config = plan.choice("tpu").config.with_sizes(dict(block_m=8192, block_n=8192, block_k=8192))
    found = explain(lambda a, b: vishwamai.gemm(a, b, config=config), A, B, target="v5e")
    assert "of VMEM, more than the 134,217,728 of a core, so it may not compile" in str(found)
    assert "may not compile" not in str(explain(vishwamai.gemm, A, B, target="v5e"))


@pytest.mark.turns(3)
def test_small_tiles_of_a_long_sequence_keep_within_scalar_memory():
    x = jax.ShapeDtypeStruct((1, 1, 1 << 18, 128), jnp.bfloat16)
    found = []
    for block_size in (None, 128):
        with kernel_config(target="v5e", block_size=block_size):
            (plan,) = record_plans(lambda q: vishwamai.flash_attention(q, q, q, causal=True), x)
        found.append(plan.choice("tpu").config)
    assert isinstance(found[0], AttentionConfig) and found[0] == found[1]


@pytest.mark.parametrize("op, case, chip, block_size", list(chosen("plan", 2)))
def test_a_block_size_plans_what_fits(op, case, chip, block_size):
    usual, asked = plans(op, case, chip, None), plans(op, case, chip, block_size)
    assert len(usual) == len(asked) > 0
    for one, other in zip(usual, asked):
        before, after = one.choice("tpu"), other.choice("tpu")
        assert before.implementation is after.implementation
        if after.implementation.name == "pallas_tpu" and after.config is not None:
            for name, need in after.config.needs(other.spec, after.target).items():
                allowed = max(vmem_budget(after.target), getattr(before.config, name))
                assert after.config == before.config or need <= allowed, (name, need, after.config)


@pytest.mark.long
@needs_libtpu
@pytest.mark.parametrize("op, case, chip, block_size", list(chosen("compile", 3)))
def test_what_explain_promises_compiles(op, case, chip, block_size):
    """Forward, and forward with backward where the case has gradients."""
    for one in (case, gradient_case(case)):
        if one is not None and (case.name, chip) not in op.facts.unreadable:
            with kernel_config(block_size=block_size):
                aot.compile_for(lambda arrays, one=one: one.run(arrays), one.shapes(), target=chip)


@pytest.mark.turns(3)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_the_last_part_of_a_weight_has_its_own_scales(transpose_b):
    """The gradient of `a` sums over the columns that keep their scales, and 300 leaves a part of 512 of them."""
    a, dy, w = (jnp.asarray(np.random.default_rng(i).standard_normal((n, 512))) for i, n in enumerate((16, 16, 512)))
    weight = vishwamai.quantize(w.astype(jnp.bfloat16), "int4", axis=1 if transpose_b else 0, block_size=32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(implementation, a, dy):
        options = {"transpose_b": transpose_b, "implementation": implementation, "block_size": 300}
        return jax.vjp(lambda a: vishwamai.gemm(a, weight, **options), a)[1](dy)[0].astype(jnp.float32)

    a, dy = a.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)):
        ours = gradient("pallas_tpu", a, dy)
    np.testing.assert_allclose(ours, gradient("xla", a, dy), rtol=2**-7, atol=2**-7)


@needs_libtpu
@pytest.mark.parametrize("block_size", [1, 64])
def test_a_grouped_product_of_small_blocks_compiles(block_size):
    """What is multiplied at once keeps whole registers along the depth."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (4, 256, 256))]
    with kernel_config(block_size=block_size):
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        assert aot.check(vishwamai.grouped_gemm, *shapes, sizes, target="tpu7x").fits


@needs_libtpu
@pytest.mark.parametrize("chip", rotation.in_turn(len(TPUS), TPUS))
def test_the_loss_of_wide_rows_of_float32_compiles(chip):
    """The compiler keeps the pieces of bfloat16 that it multiplies in place of float32."""
    x, head = (jax.ShapeDtypeStruct((n, 4096), jnp.float32) for n in (512, 128256))
    labels = jax.ShapeDtypeStruct((512,), jnp.int32)
    assert aot.check(vishwamai.linear_cross_entropy, x, head, labels, target=chip).fits


@needs_libtpu
def test_one_row_and_a_ragged_depth_compile():
    """Mosaic has no comparison of a single row of bfloat16, which the last step's zeros need."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1000), (1000, 256)))
    with kernel_config(block_size=128):
        assert aot.check(lambda x, w: vishwamai.gated_linear_unit(x, (w, w)), x, w, target="v5e").fits


@pytest.mark.long
@needs_libtpu
def test_gemm_of_a_block_size_of_4096_compiles():
    with kernel_config(block_size=4096):
        assert aot.check(vishwamai.gemm, A, B, target="v5e").fits
