"""How libtpu compiles a sum that is split over the devices of a slice: as a reduce-scatter, or as a whole sum first.

    python benchmarks/tpu.py sums                        all rows of docs/parallel.md, "Sums of gradients"
    python benchmarks/tpu.py sums v5e:4x4=16 v5e:2x4=8   slices, and how many devices add up

Needs libtpu and no TPU.
"""

from __future__ import annotations

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.aot.compile.libtpu import devices_for

ROWS = (
    "v5e:4x4=16 v6e:4x4=16 v5e:8x8=64 v5e:16x16=256 v4:2x2x2=8 v5p:2x2x2=8 v5p:2x2x4=16 v5p:2x4x4=32 v5p:4x4x4=64 "
    "v5e:2x4=8 v5e:4x8=32 v5e:8x16=128 v6e:2x4=8 "
    "v5e:4x4=8 v5e:4x8=16 v5e:16x16=16 v5p:2x2x4=8 v5p:2x4x4=16 v5p:4x4x4=16"
)


def program(target: str, group: int) -> str:
    """The compiled program of a sum over so many devices of a slice, the first ones in JAX's order."""
    devices = devices_for(target)
    mesh = Mesh(np.array(devices).reshape(-1, group), ("apart", "together"))
    every = PartitionSpec(("apart", "together"))
    x = jax.ShapeDtypeStruct((len(devices), 2048, 2048), jnp.float32, sharding=NamedSharding(mesh, every))

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(x[0], "together", scatter_dimension=0, tiled=True)[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    return jax.jit(run).lower(x).compile().as_text() or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="SLICE=DEVICES", default=ROWS.split())
    for row in parser.parse_args().rows:
        target, group = row.split("=")
        text = program(target, int(group))
        kinds = [kind for kind in ("reduce-scatter", "all-reduce") if re.search(rf" {kind}\(", text)]
        print(f"{target:<12}{group:>4} devices: {', '.join(kinds)}", flush=True)
