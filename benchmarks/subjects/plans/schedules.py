"""How far `vishwamai.aot.inspect` can be trusted: its estimates against device times that others have measured and
published.

The times are those of the tuning tables of openxla/tokamax, copied into aot_measured.json here: splash attention and
ragged_dot at their tuned configurations, whole operations with their layout changes. None of them was used to set a
constant of the model. Needs the kernels that were measured: `pip install tokamax==0.0.12` (not a dependency of
vishwamai). Prints one line a case, then the distribution of estimate / measured.

    python benchmarks/plans.py schedules [--chips v5e,v5p] [--every 2] [--timeout 60] [--json OUT]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.aot import Inspection, KernelSchedule, inspect_many

MEASURED = pathlib.Path(__file__).with_name("aot_measured.json")


def shape(dims: Sequence[int]) -> jax.ShapeDtypeStruct:
    """A bfloat16 argument."""
    return jax.ShapeDtypeStruct(tuple(dims), jnp.bfloat16)


def attention(row: dict[str, Any]) -> Inspection:
    """tokamax's splash attention as its public operation calls it: scale, transpose, kernel, transpose."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel  # type: ignore
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks  # type: ignore

    layout = kernel.QKVLayout
    config = {key: layout(value) if key.endswith("layout") else value for key, value in row["config"].items()}
    lengths = (row["q"][1], row["k"][1])
    mask = masks.CausalMask(lengths) if row["causal"] else masks.FullMask(lengths)
    splash = kernel.make_splash_mha(mask=mask, config=kernel.SplashConfig(**config, use_base2_exp=True), q_seq_shards=1)

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = query * jnp.asarray(row["q"][-1] ** -0.5, query.dtype)
        out = jax.vmap(splash)(*(jnp.swapaxes(x, 1, 2) for x in (query, key, value)))
        return jnp.swapaxes(out, 1, 2)

    batch, q_len, heads, depth = row["q"]
    flops = 2 * batch * heads * q_len * row["k"][1] * (depth + row["v"][-1]) * (0.5 if row["causal"] else 1)
    return Inspection(run, [shape(row[n]) for n in "qkv"], target=row["chip"], flops=flops, name="attention")


def ragged_dot(row: dict[str, Any]) -> Inspection:
    """tokamax's grouped matrix product; where only the number of groups was published, they are equal, as tokamax makes
    them.
    """
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as kernel  # type: ignore

    groups = row["groups"]
    if isinstance(groups, dict):
        count, total = groups["num_groups"], groups["total_size"]
        groups = [total // count + (i < total % count) for i in range(count)]
    operation = kernel.PallasMosaicTpuRaggedDot(config=kernel.Config(**row["config"]))
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        out, _ = operation._fwd(
            lhs,
            rhs,
            group_sizes=sizes,
            ragged_dot_dimension_numbers=numbers,
            precision=(jax.lax.Precision.DEFAULT,) * 2,
            preferred_element_type=None,
            config=operation.config,
        )
        return out

    args = [shape(row["lhs"]), shape(row["rhs"]), np.asarray(groups, np.int32)]
    flops = 2.0 * row["lhs"][0] * row["lhs"][1] * row["rhs"][2]
    return Inspection(run, args, target=row["chip"], flops=flops, name="ragged_dot")


BUILD: dict[str, Callable[[dict[str, Any]], Inspection]] = {"attention": attention, "ragged_dot": ragged_dot}


def describe(row: dict[str, Any]) -> str:
    """One case in a few words."""
    if row["op"] == "attention":
        return f"{row['q']} {'causal' if row['causal'] else 'full'}"
    return f"{row['lhs']} x {row['rhs']}"


def order_kept(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of the pairs of cases whose order by estimate is that by measurement."""
    right = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in itertools.combinations(pairs, 2)]
    return sum(right) / len(right) if right else math.nan


def summarise(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The distribution of estimate / measured by chip and operation."""
    lines = ["chip    operation    n   mean    sd     min    median  max    pairs in order"]
    for chip, operation in sorted({(row["chip"], row["op"]) for row in rows}):
        pairs = [(row["estimate_ms"], row["ms"]) for row in rows if (row["chip"], row["op"]) == (chip, operation)]
        ratios = [estimate / measured for estimate, measured in pairs]
        spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
        lines.append(
            f"{chip:<7} {operation:<11} {len(ratios):>2}   {statistics.mean(ratios):.3f}   {spread:.3f}  "
            f"{min(ratios):.3f}  {statistics.median(ratios):.3f}   {max(ratios):.3f}  {order_kept(pairs):.0%}"
        )
    return lines


def main() -> None:
    """Inspects every published case and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", help="only these, comma-separated")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case of an operation")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a compilation is given up")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    rows = json.loads(MEASURED.read_text())["measured"]
    rows = [row for row in rows if not options.chips or row["chip"] in options.chips.split(",")]
    counts: dict[tuple[str, str], itertools.count[int]] = {}
    rows = [
        row for row in rows if next(counts.setdefault((row["chip"], row["op"]), itertools.count())) % options.every == 0
    ]
    done = []
    for row in rows:
        (schedule,) = inspect_many([BUILD[row["op"]](row)], options.timeout)
        if not isinstance(schedule, KernelSchedule):
            print(f"{row['chip']:<6} {row['op']:<10} {describe(row)}: {schedule}", flush=True)
            continue
        row["estimate_ms"] = schedule.seconds * 1e3
        row["guessed"] = list(schedule.guessed)
        done.append(row)
        print(
            f"{row['chip']:<6} {row['op']:<10} {describe(row):<55} measured {row['ms']:8.3f} ms  estimate "
            f"{row['estimate_ms']:8.3f} ms  ratio "
            f"{row['estimate_ms'] / row['ms']:.3f}{'  guessed: ' + schedule.guessed[0] if schedule.guessed else ''}",
            flush=True,
        )
    print("\n".join(["", *summarise(done)]))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(done, indent=1))
