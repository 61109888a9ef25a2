"""Whether a product gains from a ring: the times of both ways by the model of the links and the chip's roofline."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from vishwamai.aot.schedule.roofline import roofline
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.links import LINKS_UNKNOWN, AxisLinks, estimate_collective, links_known
from vishwamai.core.spec import as_jax_dtype


@dataclasses.dataclass(frozen=True)
class OverlapEstimate:
    """Seconds of a product with its collective, both ways: lower bounds, not measurements.

    Attributes:
      kind: "all_gather" (before the product) or "reduce_scatter" (after it).
      product: the whole product on one device, by the roofline.
      collective: XLA's collective, by `estimate_collective`.
      piece: one of the ring's products, with what moves its result.
      transfer: one step of the ring.
      steps: how many steps the ring has; each hides behind two pieces.
      pieces: how many pieces.
    """

    kind: str
    product: float
    collective: float
    piece: float
    transfer: float
    steps: int
    pieces: int

    @property
    def plain(self) -> float:
        """The collective, and the product after it or before it."""
        return self.product + self.collective

    @property
    def ring(self) -> float:
        """The products in pieces, and the transfers that they do not hide."""
        return self.pieces * self.piece + self.exposed

    @property
    def exposed(self) -> float:
        """The share of the ring's transfers that no product hides."""
        # The first (last) step has the device's own piece next to it, every other step has two pieces.
        # never negative: a hidden transfer takes no time
        first, rest = max(0.0, self.transfer - self.piece), max(0.0, self.transfer - 2 * self.piece)
        return first + (self.steps - 1) * rest if self.steps else 0.0

    @property
    def pays(self) -> bool:
        """Whether the ring takes less time."""
        return self.ring < self.plain

    def __str__(self) -> str:
        kind, way = self.kind.replace("_", "-"), "ring" if self.pays else "plain"
        return (
            f"{way}: {kind} and product one after the other take {_micro(self.plain)} (product {_micro(self.product)}, "
            f"{kind} {_micro(self.collective)}); a ring of {self.pieces} pieces takes {_micro(self.ring)}, "
            f"{_micro(self.exposed)} of it not hidden."
        )


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"


@checked
def estimate_overlap(
    kind: Literal["all_gather", "reduce_scatter"], m: int, k: int, n: int, dtype: str, links: AxisLinks
) -> OverlapEstimate:
    """The times of `all_gather_gemm` or `gemm_reduce_scatter` in the forward pass, as a ring and plain.

    A line of chips has no link from its end to its start: there a piece that goes around the end crosses every link of
    the way back, so a step takes twice as long.

    Args:
      kind: which collective.
      m: rows of all devices together. k, n: of the product of one device.
      dtype: dtype of operands and result. links: `AxisLinks` of `axis_links(mesh, axis)`.

    Raises:
      ShapeError: an argument is not legal, or the devices do not divide the rows.

    >>> from vishwamai.core.hardware import TPUS
    >>> ring = AxisLinks(TPUS["v5p"], (4,), (True,))
    >>> found = estimate_overlap("all_gather", 8192, 8192, 7168, "bfloat16", ring)
    >>> found.pays, round(found.plain / found.ring, 2)
    (True, 1.27)
    """
    if kind not in ("all_gather", "reduce_scatter"):
        raise ShapeError(f"estimate_overlap: `kind` is {kind!r}; pass 'all_gather' or 'reduce_scatter'.")
    if min(m, k, n) < 1:
        raise ShapeError(f"estimate_overlap: `m`, `k`, `n` are {m}, {k}, {n}; pass sizes of at least 1.")
    size = links.devices
    if m % size:
        raise ShapeError(f"estimate_overlap: the {size} devices do not divide the {m} rows of `m`; pad them.")
    width, chip, rows = as_jax_dtype("estimate_overlap", "dtype", dtype).itemsize, links.chip, m // size
    product = _product(chip, m, k, n, dtype, (m * k + k * n + m * n) * width)
    travels = rows * (k if kind == "all_gather" else n) * width
    nbytes = (rows * k + k * n + rows * n) * width
    if kind == "all_gather":  # the result of a piece is copied to its rows
        nbytes += 2 * rows * n * width
    else:  # the float32 result of a piece is read again, with what has arrived
        # written and read as float32 in place of once in its dtype, and the arriving sum read and written
        nbytes += rows * n * (8 - width + 2 * width)
    closed = len(links.sides) > 1 or any(links.wraps)  # a box has a ring through it, and a side that wraps is one
    hop = estimate_collective("permute", travels * (1 if closed else 2), links)
    transfer = hop if closed else max(hop, chip.ici_latency * links.hops)
    return OverlapEstimate(
        kind,
        product,
        estimate_collective(kind, m * (k if kind == "all_gather" else n) * width, links),
        _product(chip, rows, k, n, dtype, nbytes),
        transfer if size > 1 else 0.0,
        size // 2,  # pieces go both ways, so the farthest one is half around
        size,
    )


def _product(chip: TpuChip, m: int, k: int, n: int, dtype: str, nbytes: float) -> float:
    return roofline(chip, 2 * m * k * n, nbytes, dtype).seconds


def decide(
    kind: Literal["all_gather", "reduce_scatter"],
    m: int,
    k: int,
    n: int,
    dtype: jnp.dtype,
    axis: str,
    links: AxisLinks | None,
) -> tuple[bool, str]:
    """Whether a ring pays, and why in words."""
    links = links or links_known(jax.sharding.get_abstract_mesh(), (axis,))
    if links is None:
        return False, f"plain: the links of {axis!r} are not known ({LINKS_UNKNOWN}); overlap=True asks for the ring."
    if m % links.devices:
        return False, f"plain: the {links.devices} devices of the axis do not divide the {m} rows."
    estimate = estimate_overlap(kind, m, k, n, dtype.name, links)
    return estimate.pays, str(estimate)
