"""How long grouped products take with the exchange of their rows, one after the other and in pieces, by the model of
the links and the chip's peak."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.links import LINKS_UNKNOWN, AxisLinks, estimate_collective, links_known
from vishwamai.core.spec import as_jax_dtype


@dataclasses.dataclass(frozen=True)
class ExchangeEstimate:
    """Seconds of grouped products with their all-to-all, both ways: lower bounds, not measurements.

    Attributes:
      product: the products of all rows of one device, and the sorting of what travels.
      exchange: XLA's all-to-all.
      piece: the products of one piece, and the copy of what travels.
      transfers: seconds of each step until the pieces of the devices so many places away have arrived.
      pieces: how many pieces.
    """

    product: float
    exchange: float
    piece: float
    transfers: tuple[float, ...]
    pieces: int

    @property
    def plain(self) -> float:
        """The all-to-all, and the products after it or before it."""
        return self.product + self.exchange

    @property
    def overlapped(self) -> float:
        """The products in pieces, and the transfers that they do not hide."""
        arrived, done, left = 0.0, self.piece, self.pieces - 1
        for transfer in self.transfers:
            arrived += transfer
            done = max(done, arrived) + min(2, left) * self.piece
            left -= min(2, left)
        return done

    @property
    def exposed(self) -> float:
        """The share of the transfers that no product hides."""
        return self.overlapped - self.pieces * self.piece

    @property
    def pays(self) -> bool:
        """Whether the pieces take less time."""
        return self.overlapped < self.plain

    def __str__(self) -> str:
        return estimate_text([self])


def estimate_text(parts: Sequence[ExchangeEstimate]) -> str:
    """The two times of some exchanges, one after the other, and which is less."""

    def micro(name: str) -> str:
        return f"{1e6 * sum(getattr(part, name) for part in parts):.1f} us"

    return (
        f"{'pieces' if pays(parts) else 'plain'}: all-to-all and products one after the other take {micro('plain')} "
        f"(products {micro('product')}, all-to-all {micro('exchange')}); {parts[0].pieces} pieces take "
        f"{micro('overlapped')}, {micro('exposed')} of it not hidden."
    )


def pays(parts: Sequence[ExchangeEstimate]) -> bool:
    """Whether the pieces take less time in some exchanges together."""
    return sum(part.overlapped for part in parts) < sum(part.plain for part in parts)


@checked
def estimate_exchange(
    room: int,
    k: int,
    n: int,
    experts: int,
    dtype: str,
    links: AxisLinks,
    *,
    rows: float | None = None,
    results: bool = False,
) -> ExchangeEstimate:
    """The times of `all_to_all_grouped_gemm` or `grouped_gemm_all_to_all` in the forward pass, in pieces and plain.

    The pieces of devices `s` places away, on and back, take their share of the time of the all-to-all by `s`: the same
    bytes cross the same links. Each piece reads the weights of all experts of the device.

    Args:
      room: rows of the buffer that one device sends to another. k, n: of the products.
      experts: number of experts of one device.
      dtype: dtype of operands and result. links: `AxisLinks` of `axis_links(mesh, axis)`.
      rows: mean number of a buffer's rows in use; None for all.
      results: the products' results travel, and not their rows.

    Raises:
      ShapeError: an argument is not legal.

    >>> from vishwamai.core.hardware import TPUS
    >>> ring = AxisLinks(TPUS["v5p"], (4,), (True,))
    >>> found = estimate_exchange(8192, 8192, 7168, 2, "bfloat16", ring)
    >>> found.pays, round(found.plain / found.overlapped, 2)
    (True, 1.34)
    """
    rows = room if rows is None else rows
    if min(room, k, n, experts) < 1 or not 0 <= rows <= room:
        raise ShapeError(
            f"estimate_exchange: `room`, `k`, `n`, `experts` are {room}, {k}, {n}, {experts} and `rows` {rows}; pass "
            "sizes of at least 1, and as many rows as the room, or fewer."
        )
    width, chip, size = as_jax_dtype("estimate_exchange", "dtype", dtype).itemsize, links.chip, links.devices
    travels = room * (n if results else k) * width

    def products(pieces: int) -> float:
        """Of so many pieces at once."""
        count = pieces * rows
        elements = (count * (k + n) + experts * k * n) * width
        copied = 2 * pieces * travels / chip.hbm_bandwidth_per_device
        return _roofline(chip, 2 * count * k * n, elements, dtype) + copied

    transfer = estimate_collective("all_to_all", size * size * travels, links)
    # The last step of an even number has one device, those before it two.
    shares = [step if 2 * step < size else step / 2 for step in range(1, size // 2 + 1)]
    transfers = tuple(
        0.0 if links.chips == 1 else max(transfer * share / math.fsum(shares), chip.ici_latency * min(step, links.hops))
        for step, share in enumerate(shares, 1)
    )
    return ExchangeEstimate(products(size), transfer, products(1), transfers, size)


def _roofline(chip: TpuChip, flops: float, nbytes: float, dtype: str) -> float:
    return max(flops / chip.peak_per_device(dtype), nbytes / chip.hbm_bandwidth_per_device)


def decide(
    name: str,
    axis: str,
    size: int,
    overlap: bool | None,
    links: AxisLinks | None,
    estimates: Callable[[AxisLinks], Sequence[ExchangeEstimate]],
) -> tuple[bool, str]:
    """Whether an exchange is made in pieces, and why in words.

    Args:
      name: the public function's name. axis: the mesh axis. size: number of its devices.
      overlap, links: its arguments. estimates: of its exchanges.

    Raises:
      ShapeError: the links are those of another number of devices.
    """
    if links is not None and links.devices != size:
        raise ShapeError(
            f"{name}: `links` are those of {links.devices} devices ({links}), but {axis!r} has {size}; pass "
            f"axis_links(mesh, {axis!r})."
        )
    if overlap is not None:
        return overlap and size > 1, f"{'pieces' if overlap else 'plain'}: `overlap` says so."
    links = links or links_known(jax.sharding.get_abstract_mesh(), (axis,))
    if links is None:
        return False, f"plain: the links of {axis!r} are not known ({LINKS_UNKNOWN}); overlap=True asks for pieces."
    parts = estimates(links)
    return pays(parts), estimate_text(parts)
