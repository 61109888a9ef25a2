"""Small programs whose schedule can be worked out by hand, and the recording of their dumps.

`python tests/aot_programs.py [NAMES]` compiles them (needs libtpu) and writes tests/data/aot; the tests read those, so
that they need no compiler.
"""

import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

RECORDED = pathlib.Path(__file__).parent / "data" / "aot"
TABLE = np.array([0, 0, 3, 3, 3, 1], np.int32)
BF16 = jnp.bfloat16


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == 3)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y):
    """[512, 1024] x [1024, 256] in blocks of 256 x 256 x 256: grid (2, 1, 4)."""
    block = lambda index: pl.BlockSpec((256, 256), index)  # noqa: E731
    return pl.pallas_call(
        matmul_kernel,
        grid=(2, 1, 4),
        in_specs=[block(lambda i, j, k: (i, k)), block(lambda i, j, k: (k, j))],
        out_specs=block(lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((512, 256), BF16),
        scratch_shapes=[pltpu.VMEM((256, 256), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, y)


def gather_kernel(table_ref, x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def gather(table, x):
    """Copies the blocks that a scalar-prefetch table names: a block that comes twice in a row is fetched once."""
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(TABLE.size,),
        in_specs=[pl.BlockSpec((64, 128), lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec((64, 128), lambda i, table: (i, 0)),
    )
    out = jax.ShapeDtypeStruct((64 * TABLE.size, 128), jnp.float32)
    return pl.pallas_call(gather_kernel, grid_spec=grid, out_shape=out, name="gather")(table, x)


def turn_kernel(turn_ref, x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def turns(total, x):
    """A kernel that takes the places of its blocks from the counter of the loop around it, by a division and its
    remainder.
    """

    def turn(n, total):
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(TURN_STEPS,),
            in_specs=[
                pl.BlockSpec((64, 128), lambda g, n: (jax.lax.div(g, n[0]), 0)),
                pl.BlockSpec((64, 128), lambda g, n: (jax.lax.rem(g, n[0]), 0)),
            ],
            out_specs=pl.BlockSpec((64, 128), lambda g, n: (g, 0)),
        )
        out = jax.ShapeDtypeStruct(total.shape, total.dtype)
        return total + pl.pallas_call(turn_kernel, grid_spec=grid, out_shape=out, name="turn")(n.reshape(1), x, x)

    return jax.lax.fori_loop(1, 1 + TURNS, turn, total)


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def chain(x):
    """Two kernels: the second reads the first's result, which the compiler keeps in VMEM and copies out beside it."""

    def double(x, name):
        block = pl.BlockSpec((256, 1024), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        grid = (x.shape[0] // 256,)
        return pl.pallas_call(double_kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=out, name=name)(x)

    y = double(x, "first")
    return y, double(y, "second")


TURNS, TURN_STEPS = 3, 6
PROGRAMS = {
    # x does not fit in VMEM, so that its blocks are copied
    "turns": (turns, [jax.ShapeDtypeStruct((rows, 128), jnp.float32) for rows in (64 * TURN_STEPS, 1 << 19)]),
    "chain": (chain, (jax.ShapeDtypeStruct((16384, 1024), BF16),)),
    "matmul": (matmul, (jax.ShapeDtypeStruct((512, 1024), BF16), jax.ShapeDtypeStruct((1024, 256), BF16))),
    "gather": (gather, (TABLE, jax.ShapeDtypeStruct((64 * 4, 128), jnp.float32))),
}
RECORDINGS = [*(("matmul", target) for target in ("v4", "v5e", "v5p", "v6e", "tpu7x"))]
RECORDINGS += [("gather", "v5e"), ("turns", "v5e"), ("chain", "v5e")]


def record(names=()):
    """Compiles the named programs, or all, anew and keeps their dumps."""
    from vishwamai.aot.schedule import dump, inspection
    from vishwamai.core import caches

    for name, target in RECORDINGS:
        if names and name not in names:
            continue
        fn, args = PROGRAMS[name]
        made = inspection.prepare(fn, args, {}, target)
        dump.dump(made)
        place = RECORDED / f"{name}-{target}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for file in (caches.cache_directory("aot") / made.fingerprint).glob("*.gz"):
            if "<late" not in file.name:
                shutil.copy(file, place / file.name)
        print(place, sum(file.stat().st_size for file in place.iterdir()), "bytes")


if __name__ == "__main__":
    record(sys.argv[1:])
