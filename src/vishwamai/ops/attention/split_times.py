"""How long attention over a split sequence takes each way, by the model of the links and the chip's peak."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from vishwamai.core.arguments import checks_its_own, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.links import AxisLinks, estimate_collective
from vishwamai.core.signature import array_specs
from vishwamai.core.spec import ArraySpec
from vishwamai.ops.attention.checks import Options, make_spec
from vishwamai.ops.attention.ring_plan import Part, Ring, why_not_ring, why_not_zigzag
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.ulysses_exchange import why_not_ulysses


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

    `flash_attention` chooses among "ring", "ulysses" and "gather" by it where it knows the chip. A ring hides its
    transfers behind its products, but in order a causal mask leaves its first devices idle. Ulysses hides nothing, and
    shares the work evenly. In the gathered form every device computes everything. A product takes as long as its
    operations at the chip's peak, or as its operands from HBM.

    Args:
      query: array, or `jax.ShapeDtypeStruct`, of the whole sequence: `[batch, heads, seq, dim]`, of the batch elements
        and heads of one device. key: as many heads or fewer.
      value: as key. links: of `axis_links(mesh, axis)`.
      causal: as in `flash_attention`.
      window: as in `flash_attention`.

    Raises:
      ShapeError: an argument is not legal, or the devices do not divide the sequence.

    >>> import jax
    >>> from vishwamai.core.hardware import TPUS
    >>> query, key = (jax.ShapeDtypeStruct((1, heads, 32768, 128), "bfloat16") for heads in (8, 2))
    >>> found = estimate_split_attention(query, key, key, AxisLinks(TPUS["v5p"], (8,), (True,)), causal=True)
    >>> found.best, found.seconds["ring"] > 1.5 * found.seconds["zigzag"]
    ('zigzag', True)
    """
    name, size = "estimate_split_attention", links.chips
    for label, x in (("query", query), ("key", key), ("value", value)):
        if not hasattr(x, "shape") or not isinstance(getattr(x, "dtype", None), np.dtype):
            raise ShapeError(f"{name}: `{label}` is {described(x)}; pass an array or a jax.ShapeDtypeStruct.")
    options = Options(causal=causal, window=window, layout="bhsd")
    whole = _spec((query, key, value), options)
    for label, length in (("query", whole.q_len), ("key", whole.kv_len)):
        if length % size:
            raise ShapeError(f"{name}: the {size} chips do not divide the {length} rows of `{label}`; pad them.")
    return split_times(whole, links, size)


def split_times(whole: AttentionSpec, links: AxisLinks, size: int) -> SplitAttentionEstimate:
    """`estimate_split_attention` of a spec.

    Args:
      whole: of the whole sequence, for the batch elements and heads of one device.
      links: of the mesh axes over which the sequence is split. size: how many devices they have.
    """
    chip, given = links.chip, whole.operands
    q, k, v = given[:3]
    moved = sum(x.nbytes for x in (q, k, v))
    rows = [x for x in (given.bias, given.mask) if x is not None and x.shape[2] > 1]
    lines = [x for x in (given.q_segment_ids, given.kv_segment_ids, given.q_positions) if x is not None]
    own = of_part(whole, size)
    gathered = estimate_collective("all_gather", moved + sum(x.nbytes for x in [*rows, *lines]), links)
    seconds, declined = {"gather": _compute(chip, whole) + gathered}, {}
    reason = why_not_ring(own, size)
    if reason is None:
        seconds["ring"] = _around(own, links, size, zigzag=False)
    else:
        declined["ring"] = reason
    if reason is None and why_not_zigzag(own) is None and whole.causal:
        seconds["zigzag"] = _around(own, links, size, zigzag=True)
    reason = why_not_ulysses(whole, whole.q_heads, size)
    if reason is None:
        copies = math.lcm(whole.kv_heads, size) // whole.kv_heads
        out = whole.batch * whole.q_heads * whole.q_len * whole.v_dim * q.dtype.itemsize
        exchanged = q.nbytes + copies * (k.nbytes + v.nbytes) + sum(x.nbytes for x in rows if x.shape[1] > 1)
        shared = sum(x.nbytes for x in [*lines, *(x for x in rows if x.shape[1] == 1)])
        seconds["ulysses"] = (
            _compute(chip, whole) / size
            + estimate_collective("all_to_all", exchanged, links)
            + (estimate_collective("all_gather", shared, links) if shared else 0.0)
            + estimate_collective("all_to_all", out, links)
        )
    else:
        declined["ulysses"] = reason
    return SplitAttentionEstimate(seconds, declined)


def _spec(arrays: Any, options: Options) -> AttentionSpec:
    return make_spec(array_specs(Operands(*arrays)), "default", *options)


def of_part(whole: AttentionSpec, size: int) -> AttentionSpec:
    """The spec of one device's rows and keys, of `size`; without what all ways read alike."""

    def part(x: ArraySpec, axis: int) -> ArraySpec:
        return ArraySpec((*x.shape[:axis], x.shape[axis] // size, *x.shape[axis + 1 :]), x.dtype)

    given = whole.operands
    positions = None if given.q_positions is None else part(given.q_positions, 1)
    operands = Operands(*(part(x, 2) for x in given[:3]), q_positions=positions, slopes=given.slopes)
    return dataclasses.replace(whole, operands=operands)


def _compute(chip: TpuChip, spec: AttentionSpec) -> float:
    """Seconds of the products, or of what they read and write, by the figures of one device of the chip."""
    dtype = spec.operands.query.dtype.name
    return max(spec.flops / chip.peak_per_device(dtype), spec.bytes_moved / chip.hbm_bandwidth_per_device)


def _around(spec: AttentionSpec, links: AxisLinks, size: int, *, zigzag: bool) -> float:
    """Of a ring of devices that have `spec` each: each hop's slowest device, or the transfer that it hides."""
    closed = len(links.sides) > 1 or any(links.wraps)
    ring = Ring(("axis",), size, spec, zigzag, None, None)
    nbytes = sum(x.nbytes for x in (spec.operands.key, spec.operands.value))

    def part_of(part: Part | None) -> float:
        if part is None:
            return 0.0
        causal, offset, window, *_, blocks = part
        mask = {"causal": causal, "causal_offset": offset, "window": window, "blocks": blocks}
        halves = (part.rows is not None) + (part.columns is not None)
        return _compute(links.chip, dataclasses.replace(spec, **mask)) / 2**halves

    total = 0.0
    for step, following in zip(ring.steps, [*ring.steps[1:], None]):
        transfer = 0.0
        if following is not None:
            transfer = (following - step) * estimate_collective("permute", nbytes, links)
            if not closed and ring.parts(following)[0] is not None:  # from the end of the line to its start
                transfer = max(transfer, links.chip.ici_latency * links.hops)
        total += max(transfer, *map(part_of, set(ring.parts(step))))
    return total
