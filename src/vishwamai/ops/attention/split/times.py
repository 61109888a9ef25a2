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
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.split.ring_plan import Part, Ring, why_not_ring, why_not_zigzag
from vishwamai.ops.attention.split.ulysses_exchange import why_not_ulysses


@dataclasses.dataclass(frozen=True)
class SplitAttentionEstimate:
    """Seconds of a forward pass each way: lower bounds, not measurements.

    Attributes:
      seconds: time by the names of `KernelConfig(split_sequence=...)`; without the methods that cannot serve the call.
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
    query: object,
    key: object,
    value: object,
    links: AxisLinks,
    *,
    causal: bool = False,
    window: object = None,
    hybrid: tuple[AxisLinks, AxisLinks] | None = None,
) -> SplitAttentionEstimate:
    """The times of `flash_attention` whose sequence is split over mesh axes: ring, zig-zag ring, Ulysses, hybrid,
    gathered.

    `flash_attention` chooses among "ring", "ulysses", "hybrid" and "gather" by it where it knows the chip. A ring
    hides its transfers behind its products, but in order a causal mask leaves its first devices idle. Ulysses hides
    nothing, and shares the work evenly. A hybrid does both, each over axes of its own. In the gathered form every
    device computes everything. A product takes as long as its operations at the chip's peak, or as its operands from
    HBM.

    Args:
      query: array, or `jax.ShapeDtypeStruct`, of the whole sequence: `[batch, heads, seq, dim]`, of the batch elements
        and heads of one device. key: as many heads or fewer.
      value: array like `key`. links: of `axis_links(mesh, axis)`.
      causal: argument of `flash_attention`.
      window: argument of `flash_attention`.
      hybrid: the links of the axes of a ring, and of the axis that exchanges heads, for a sequence that is split over
        both; None for one axis.

    Raises:
      ShapeError: an argument is not legal, the devices do not divide the sequence, or the links of `hybrid` are not of
        as many devices as `links`.

    >>> import jax
    >>> from vishwamai.core.hardware import TPUS
    >>> query, key = (jax.ShapeDtypeStruct((1, heads, 32768, 128), "bfloat16") for heads in (8, 2))
    >>> found = estimate_split_attention(query, key, key, AxisLinks(TPUS["v5p"], (8,), (True,)), causal=True)
    >>> found.best, found.seconds["ring"] > 1.5 * found.seconds["zigzag"]
    ('zigzag', True)
    """
    name, size = "estimate_split_attention", links.devices
    for label, x in (("query", query), ("key", key), ("value", value)):
        if not hasattr(x, "shape") or not isinstance(getattr(x, "dtype", None), np.dtype):
            raise ShapeError(f"{name}: `{label}` is {described(x)}; pass an array or a jax.ShapeDtypeStruct.")
    options = Options(causal=causal, window=window, layout="bhsd")
    spec = _spec((query, key, value), options)
    for label, length in (("query", spec.q_len), ("key", spec.kv_len)):
        if length % size:
            raise ShapeError(f"{name}: the {size} devices do not divide the {length} rows of `{label}`; pad them.")
    if hybrid is not None and hybrid[0].devices * hybrid[1].devices != size:
        counts = " x ".join(str(axis_links.devices) for axis_links in hybrid)
        raise ShapeError(
            f"{name}: `hybrid` has {counts} devices, but `links` has {size}; pass the links of the axes of the ring "
            "and of the axis that exchanges heads, and those of both together."
        )
    return split_times(spec, links, size, hybrid)


def split_times(
    spec: AttentionSpec, links: AxisLinks, size: int, hybrid: tuple[AxisLinks, AxisLinks] | None = None
) -> SplitAttentionEstimate:
    """`estimate_split_attention` of a spec.

    Args:
      spec: spec of the global sequence, for the batch elements and heads of one device.
      links: `AxisLinks` of the mesh axes over which the sequence is split. size: number of their devices.
      hybrid: `AxisLinks` of the ring's axes, and of the axis that exchanges heads.
    """
    chip, local_spec = links.chip, of_part(spec, size)
    nbytes = sum(x.nbytes for x in [*spec.operands[:3], *_rows(spec), *_lines(spec)])
    gathered = estimate_collective("all_gather", nbytes, links)
    seconds, declined = {"gather": _compute(chip, spec) + gathered}, {}
    reason = why_not_ring(local_spec, size)
    if reason is None:
        seconds["ring"] = _around(local_spec, links, size, zigzag=False)
    else:
        declined["ring"] = reason
    if reason is None and why_not_zigzag(local_spec) is None and spec.causal:
        seconds["zigzag"] = _around(local_spec, links, size, zigzag=True)
    reason = why_not_ulysses(spec, spec.q_heads, size)
    if reason is None:
        seconds["ulysses"] = _compute(chip, spec) / size + _exchange(spec, links)
    else:
        declined["ulysses"] = reason
    if hybrid is not None:
        around, exchanged = hybrid
        places = around.devices
        reason = why_not_hybrid(spec, places, exchanged.devices)
        if reason is None:
            local_spec = _of_heads(of_part(spec, places), exchanged.devices)
            hops = _around(local_spec, around, places, zigzag=False)
            seconds["hybrid"] = hops + _exchange(spec, exchanged, places)
        else:
            declined["hybrid"] = reason
    return SplitAttentionEstimate(seconds, declined)


def why_not_hybrid(spec: AttentionSpec, places: int, exchanged: int) -> str | None:
    """Why a ring of `places` groups of `exchanged` devices, which exchange heads, cannot serve a call; None if it
    can.
    """
    return why_not_ring(of_part(spec, places), places) or why_not_ulysses(spec, spec.q_heads, exchanged)


def _rows(spec: AttentionSpec) -> list[ArraySpec]:
    """What has a row for each query."""
    return [x for x in (spec.operands.bias, spec.operands.mask) if x is not None and x.shape[2] > 1]


def _lines(spec: AttentionSpec) -> list[ArraySpec]:
    """What has a number for each query or key."""
    operands = spec.operands
    return [x for x in (operands.q_segment_ids, operands.kv_segment_ids, operands.q_positions) if x is not None]


def _exchange(spec: AttentionSpec, links: AxisLinks, places: int = 1) -> float:
    """Seconds in which the devices of `links` change a part of the sequence for a part of the heads, and back.

    Args:
      spec: spec of the global sequence. places: number of such groups of devices that share it.
    """
    q, k, v = spec.operands[:3]
    rows = _rows(spec)
    copies = math.lcm(spec.kv_heads, links.devices) // spec.kv_heads
    out = spec.batch * spec.q_heads * spec.q_len * spec.v_dim * q.dtype.itemsize
    exchanged = q.nbytes + copies * (k.nbytes + v.nbytes) + sum(x.nbytes for x in rows if x.shape[1] > 1)
    shared = sum(x.nbytes for x in [*_lines(spec), *(x for x in rows if x.shape[1] == 1)])
    return (
        estimate_collective("all_to_all", exchanged / places, links)
        + (estimate_collective("all_gather", shared / places, links) if shared else 0.0)
        + estimate_collective("all_to_all", out / places, links)
    )


def _of_heads(spec: AttentionSpec, size: int) -> AttentionSpec:
    """The spec of one device's heads, of `size` that exchange them."""
    copies = math.lcm(spec.kv_heads, size) // spec.kv_heads

    def part(x: ArraySpec, copies: int) -> ArraySpec:
        return ArraySpec((x.shape[0], copies * x.shape[1] // size, *x.shape[2:]), x.dtype)

    query, key, value = spec.operands[:3]
    operands = spec.operands._replace(query=part(query, 1), key=part(key, copies), value=part(value, copies))
    return dataclasses.replace(spec, operands=operands)


def _spec(arrays: Any, options: Options) -> AttentionSpec:
    return make_spec(array_specs(Operands(*arrays)), "default", *options)


def of_part(spec: AttentionSpec, size: int) -> AttentionSpec:
    """The spec of one device's rows and keys, of `size`; without what all ways read alike."""

    def part(x: ArraySpec, axis: int) -> ArraySpec:
        return ArraySpec((*x.shape[:axis], x.shape[axis] // size, *x.shape[axis + 1 :]), x.dtype)

    operands_of_spec = spec.operands
    positions = None if operands_of_spec.q_positions is None else part(operands_of_spec.q_positions, 1)
    operands = Operands(
        *(part(x, 2) for x in operands_of_spec[:3]), q_positions=positions, slopes=operands_of_spec.slopes
    )
    return dataclasses.replace(spec, operands=operands)


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
