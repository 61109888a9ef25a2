"""Grouped products on TPUs you do not have, compared with their peers: the compiler's own schedule of each kernel,
followed by the same simulator.

Peers are jax's `megablox` (`gmm`, and `tgmm` for the gradient of rhs) at the best of a few tiles, and Tokamax's
`ragged_dot` where the package is installed (`pip install tokamax`). Ours has the tiles that the library itself chooses.
Every time is an estimate of the whole program, the tables of visits included (docs/aot.md says how far to trust it;
differences below 4 % are not worth reading). "even" groups end where tiles do, "uneven" ones do not; "zipf" are 64
groups whose sizes fall as one over their rank. "share" is ours of the roofline; below it are the programs that XLA adds
around our kernel. With `--columns` the matrices lie column by column, `[groups, N, K]`, which all three read as they
lie (`transpose_rhs`).

    python benchmarks/tpu.py grouped --targets v4,v5e,v5p,v6e,tpu7x --products forward,grad_lhs,grad_rhs --groups
    even,uneven,zipf
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai import grouped_gemm
from vishwamai.aot import Inspection, KernelSchedule, inspect_many
from vishwamai.bench import estimates

MEGABLOX_TILES = ((512, 1024, 1024), (1024, 1024, 1024), (1024, 1024, 2048))


@dataclasses.dataclass(frozen=True)
class Problem:
    """bfloat16 rows in groups of these sizes, `[K, N]` for each group. `tiles`: of the peers."""

    sizes: tuple[int, ...]
    k: int = 4096
    n: int = 14336
    tiles: tuple[tuple[int, int, int], ...] = MEGABLOX_TILES

    @property
    def m(self) -> int:
        return sum(self.sizes)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    @property
    def lhs(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.k), jnp.bfloat16)

    @property
    def rhs(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(self.sizes), self.k, self.n), jnp.bfloat16)

    @property
    def out(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), jnp.bfloat16)

    def arrays(self, product: str, columns: bool = False) -> list[Any]:
        """The operands of a product, and the sizes."""
        rhs = self.rhs
        if columns:
            rhs = jax.ShapeDtypeStruct((len(self.sizes), self.n, self.k), jnp.bfloat16)
        pairs = {"forward": (self.lhs, rhs), "grad_lhs": (self.out, rhs), "grad_rhs": (self.lhs, self.out)}
        return [*pairs[product], np.array(self.sizes, np.int32)]


def zipf(rows: int, groups: int) -> tuple[int, ...]:
    """Sizes that fall as 1 / rank, in a random order: what a router without balance gives.

    >>> zipf(100, 4)
    (16, 48, 24, 12)
    """
    shares = 1 / np.arange(1, groups + 1)
    ends = np.round(np.cumsum(shares) / shares.sum() * rows).astype(int)
    return tuple(int(n) for n in np.random.default_rng(0).permutation(np.diff(ends, prepend=0)))


PRODUCTS = ("forward", "grad_lhs", "grad_rhs")
PROBLEMS = {
    # Mixtral 8x7B's gate for 4096 tokens, two experts each.
    "even": Problem((1024,) * 8),
    "uneven": Problem((700, 1500, 1024, 300, 2000, 900, 1268, 500)),
    # Widths of gpt-oss.
    "zipf": Problem(zipf(32768, 64), 2880, 2880, ((512, 1024, 1024), (256, 1024, 1024), (256, 1536, 1024))),
}


def ours(problem: Problem, product: str, columns: bool = False) -> Callable[..., Any]:
    """The product alone; XLA drops what a gradient does not need."""

    def multiply(a: Any, b: Any, sizes: Any) -> Any:
        return grouped_gemm(a, b, sizes, transpose_rhs=columns)

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(x.shape, x.dtype)

    if product == "forward":
        return multiply
    if product == "grad_lhs":
        return lambda dout, b, sizes: jax.vjp(lambda a: multiply(a, b, sizes), zeros(problem.lhs))[1](dout)[0]
    rhs = problem.arrays("forward", columns)[1]
    return lambda a, dout, sizes: jax.vjp(lambda b: multiply(a, b, sizes), zeros(rhs))[1](dout)[0]


def megablox(problem: Problem, product: str, columns: bool = False) -> Iterator[estimates.Call]:
    import importlib

    kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    for tiles in problem.tiles:
        options = {"preferred_element_type": jnp.bfloat16, "tiling": tiles}

        def call(a: Any, b: Any, sizes: Any, options: Any = options) -> Any:
            if product == "grad_rhs":
                rows, others = (b, a) if columns else (a, b)
                return kernels.tgmm(rows.swapaxes(0, 1), others, sizes, **options)
            return kernels.gmm(a, b, sizes, transpose_rhs=(product == "grad_lhs") != columns, **options)

        yield f"megablox {'/'.join(map(str, tiles))}", call


def tokamax(problem: Problem, product: str, columns: bool = False) -> Iterator[estimates.Call]:
    """The Pallas kernels of Tokamax's `ragged_dot`, as it calls them; nothing where the package is not installed."""
    try:
        from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernels  # type: ignore
    except ImportError:
        return
    default = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
    for tiles in problem.tiles:
        options = {"precision": default, "out_dtype": jnp.bfloat16, "tiling": tiles}

        def call(a: Any, b: Any, sizes: Any, options: Any = options) -> Any:
            if product == "grad_rhs":
                rows, others = (b, a) if columns else (a, b)
                return kernels.tgmm(rows.swapaxes(0, 1), others, group_sizes=sizes, **options)
            return kernels.gmm(a, b, group_sizes=sizes, transpose_rhs=(product == "grad_lhs") != columns, **options)

        yield f"tokamax {'/'.join(map(str, tiles))}", call


def main() -> None:
    parser = estimates.parser(__doc__, products=PRODUCTS, groups=PROBLEMS)
    parser.add_argument("--columns", action="store_true", help="matrices that lie column by column")
    options = parser.parse_args()
    table = estimates.PeerTable(f"{'product':<10}{'groups':<8}{'target':<7}")
    for product in options.products:
        for groups in options.groups:
            problem, how = PROBLEMS[groups], (product, options.columns)
            calls = [(estimates.OURS, ours(problem, *how)), *megablox(problem, *how), *tokamax(problem, *how)]
            for target in options.targets:
                programs = [
                    Inspection(call, problem.arrays(*how), target=target, flops=problem.flops, name=name)
                    for name, call in calls
                ]
                results = dict(zip((name for name, _ in calls), inspect_many(programs)))
                table.line(f"{product:<10}{groups:<8}{target:<7}", groups, estimates.seconds_of(results))
                mine = results[estimates.OURS]
                if isinstance(mine, KernelSchedule):
                    share = mine.roofline.seconds / mine.seconds
                    print(*(f"  {line}" for line in (f"share {share:.2f}", *estimates.around(mine))), sep="\n")
    table.means()
