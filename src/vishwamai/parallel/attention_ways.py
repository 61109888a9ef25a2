"""How long attention over a split sequence takes each way, by the model of the links and the chip's peak."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.signature import array_specs
from vishwamai.ops.attention.checks import Options, make_spec
from vishwamai.ops.attention.ring_hops import Part, Ring, why_not_ring
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.ulysses_exchange import why_not_ulysses
from vishwamai.parallel.links import AxisLinks, estimate_collective


@dataclasses.dataclass(frozen=True)
class SplitAttentionEstimate:
    """Seconds of a forward pass each way: lower bounds, not measurements.

    Attributes:
      seconds: by the names of `KernelConfig(split_sequence=...)`; without those that cannot serve the call.
      declined: why the others cannot.
    """

    seconds: dict[str, float]
    declined: dict[str, str]

    @property
    def best(self) -> str:
        """The way that takes least time. "zigzag" needs the sequence in that order."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def __str__(self) -> str:
        times = [f"{way} {1e6 * seconds:.1f} us" for way, seconds in sorted(self.seconds.items(), key=lambda x: x[1])]
        return "; ".join([*times, *(f"{way} cannot: {reason}" for way, reason in self.declined.items())])


@checks_its_own("window")
def estimate_split_attention(
    query: Any, key: Any, value: Any, links: AxisLinks, *, causal: bool = False, window: Any = None
) -> SplitAttentionEstimate:
    """The times of `flash_attention` whose sequence is split over a mesh axis: ring, zig-zag ring, Ulysses, gathered.

    A ring hides its transfers behind its products, but in order a causal mask leaves its first devices idle. Ulysses
    hides nothing, and shares the work evenly. In the gathered form every device computes everything.

    Args:
      query: array, or `jax.ShapeDtypeStruct`, of the whole sequence: `[batch, heads, seq, dim]`, of the batch elements
        and heads of one device. key: as many heads or fewer.
      value: as key. links: of `axis_links(mesh, axis)`.
      causal: as in `flash_attention`.
      window: as in `flash_attention`.

    Raises:
      ShapeError: an argument is not legal, or the devices do not divide the sequence.

    >>> from vishwamai.core.hardware import TPUS
    >>> query, key = (jax.ShapeDtypeStruct((1, heads, 32768, 128), "bfloat16") for heads in (8, 2))
    >>> found = estimate_split_attention(query, key, key, AxisLinks(TPUS["v5p"], (8,), (True,)), causal=True)
    >>> found.best, found.seconds["ring"] > 1.5 * found.seconds["zigzag"]
    ('zigzag', True)
    """
    name, size = "estimate_split_attention", links.chips
    options = Options(causal=causal, window=window, layout="bhsd")
    whole = _spec((query, key, value), options)
    for label, length in (("query", whole.q_len), ("key", whole.kv_len)):
        if length % size:
            raise ShapeError(f"{name}: the {size} chips do not divide the {length} rows of `{label}`; pad them.")
    q, k, v = whole.operands[:3]
    parts = [jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] // size, x.shape[3]), x.dtype) for x in (q, k, v)]
    own, chip = _spec(parts, options), links.chip
    gathered = estimate_collective("all_gather", q.nbytes + k.nbytes + v.nbytes, links)
    seconds, declined = {"gather": _compute(chip, whole) + gathered}, {}
    reason = why_not_ring(own)
    if reason is None:
        seconds["ring"] = _around(own, links, zigzag=False)
    else:
        declined["ring"] = reason
    if reason is None and causal and window is None and own.q_len % 2 == 0:
        seconds["zigzag"] = _around(own, links, zigzag=True)
    reason = why_not_ulysses(whole, whole.q_heads, size)
    if reason is None:
        copies = math.lcm(whole.kv_heads, size) // whole.kv_heads
        out = whole.batch * whole.q_heads * whole.q_len * whole.v_dim * q.dtype.itemsize
        nbytes = q.nbytes + copies * (k.nbytes + v.nbytes) + out
        seconds["ulysses"] = _compute(chip, whole) / size + estimate_collective("all_to_all", nbytes, links)
    else:
        declined["ulysses"] = reason
    return SplitAttentionEstimate(seconds, declined)


def _spec(arrays: Any, options: Options) -> AttentionSpec:
    return make_spec(array_specs(Operands(*arrays)), "default", *options)


def _compute(chip: TpuChip, spec: AttentionSpec) -> float:
    return spec.flops / chip.peak_per_device(spec.operands.query.dtype.name)


def _around(spec: AttentionSpec, links: AxisLinks, *, zigzag: bool) -> float:
    """Of a ring of devices that have `spec` each: each hop's slowest device, or the transfer that it hides."""
    ring = Ring(("axis",), links.chips, spec, zigzag, None, None)
    nbytes = sum(x.nbytes for x in (spec.operands.key, spec.operands.value))

    def part_of(part: Part | None) -> float:
        if part is None:
            return 0.0
        mask = {"causal": part.causal, "causal_offset": part.causal_offset, "window": part.window}
        halves = (part.rows is not None) + (part.columns is not None)
        return _compute(links.chip, dataclasses.replace(spec, **mask)) / 2**halves

    total = 0.0
    for step, following in zip(ring.steps, [*ring.steps[1:], None]):
        transfer = 0.0
        if following is not None:
            transfer = (following - step) * estimate_collective("permute", nbytes, links)
        total += max(transfer, *map(part_of, ring.parts(step)))
    return total
