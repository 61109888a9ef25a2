"""Where the arrays of a tree lie: a table of what each device holds, and a check of one array."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.core.hardware import tpu_for
from vishwamai.core.numbers import human
from vishwamai.core.pallas import LANES, round_up
from vishwamai.core.types import PyTree
from vishwamai.parallel.rules import path_text

_COLUMNS = ("array", "shape", "split", "per device", "copies", "padding")
_WIDE = 80


@dataclasses.dataclass(frozen=True)
class ArrayPlace:
    """What each device holds of arrays that lie alike, such as the same parameter of several layers.

    Attributes:
      path: place in the tree; "*" stands for the numbers of layers that lie alike.
      count: arrays of that path.
      shape: one array's shape. dtype: its name.
      split: the mesh axes that split each axis, "fsdp, tensor"; "-" for an axis that is whole.
      bytes_per_device: size of all of them, padding included.
      copies: devices that hold the same part.
      padding: bytes of `bytes_per_device` that hold no values: on a TPU, XLA fills the last two axes of a part up to
        whole tiles, in the order that pads less.
      devices: number of devices that hold them.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    split: str
    bytes_per_device: int
    copies: int
    padding: int
    devices: int


@dataclasses.dataclass(frozen=True)
class ShardingTable:
    """`explain_sharding`'s answer; printing it gives the table, 80 columns wide."""

    rows: tuple[ArrayPlace, ...]

    @property
    def bytes_per_device(self) -> int:
        """Of all arrays together, padding included."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def padding(self) -> int:
        """Bytes of `bytes_per_device` that hold no values."""
        return sum(row.padding for row in self.rows)

    @property
    def replicated(self) -> int:
        """Bytes of `bytes_per_device` that another device holds, too."""
        return sum(row.bytes_per_device for row in self.rows if row.copies > 1)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        cells = [_COLUMNS] + [
            (
                row.path if row.count == 1 else f"{row.path} x{row.count}",
                f"{row.dtype.replace('float', 'f')}[{','.join(map(str, row.shape))}]",
                row.split,
                human(row.bytes_per_device),
                str(row.copies),
                f"{row.padding / row.bytes_per_device:.0%}" if row.bytes_per_device else "0%",
            )
            for row in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
        gaps = 2 * (len(widths) - 1)
        for i in (0, 2, 1):  # texts give way: the path first
            over = sum(widths) + gaps - _WIDE
            widths[i] = min(widths[i], max(12, widths[i] - over))
        for row in cells:
            texts = [_cut(text, width) for text, width in zip(row, widths)]
            line = [f"{t:<{w}}" if i < 3 else f"{t:>{w}}" for i, (t, w) in enumerate(zip(texts, widths))]
            yield "  ".join(line).rstrip()
        total, devices = self.bytes_per_device, max((row.devices for row in self.rows), default=0)
        share = (self.replicated / total, self.padding / total) if total else (0.0, 0.0)
        yield (f"{human(total)} on each of {devices} devices: {share[0]:.0%} on others, too; {share[1]:.0%} padding")


def explain_sharding(tree: PyTree) -> ShardingTable:
    """What each device holds of every array of a tree: bytes, copies, padding. Print it for the table.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`s with shardings, as `shard` makes them for devices that you do not have.

    Raises:
      ShapeError: a leaf is not an array with a sharding, or does not divide over its devices.

    >>> from vishwamai.parallel import LogicalRules, make_mesh, shard
    >>> mesh = make_mesh("tensor=1", devices=jax.devices()[:1])
    >>> weights = [{"up": jnp.ones((256, 512))}, {"up": jnp.ones((256, 512))}]
    >>> placed = shard(weights, mesh, LogicalRules({"embed": None, "mlp": "tensor"}), {"up": ("embed", "mlp")})
    >>> print(explain_sharding(placed))
    array    shape         split      per device  copies  padding
    */up x2  f32[256,512]  -, tensor     1.0 MiB       1       0%
    1.0 MiB on each of 1 devices: 0% on others, too; 0% padding
    """
    groups: dict[tuple[str, *tuple[object, ...]], list[ArrayPlace]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        row = _place(path_text(path), leaf)
        # layers differ in a number of their path: equal rows are shown once
        alike = re.sub(r"(?<![^/])\d+(?![^/])", "*", row.path)
        groups.setdefault((alike, row.shape, row.dtype, row.split, row.devices), []).append(row)
    return ShardingTable(tuple(_merged(key[0], rows) for key, rows in groups.items()))


def _merged(path: str, rows: list[ArrayPlace]) -> ArrayPlace:
    return dataclasses.replace(
        rows[0],
        path=path if len(rows) > 1 else rows[0].path,
        count=len(rows),
        bytes_per_device=sum(row.bytes_per_device for row in rows),
        padding=sum(row.padding for row in rows),
    )


def _place(path: str, leaf: PyTree) -> ArrayPlace:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or not isinstance(sharding, jax.sharding.Sharding):
        raise ShapeError(
            f"explain_sharding: {path or 'the tree'} is {described(leaf)}, without a sharding; pass arrays, or what "
            "`shard` gives for shapes."
        )
    try:
        part = sharding.shard_shape(leaf.shape)
    except ValueError as error:
        raise ShapeError(f"explain_sharding: {path} does not divide over its devices: {error}") from error
    # a key of the default generator is two uint32
    item = jnp.dtype(leaf.dtype).itemsize if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else 8
    plain = math.prod(part) * item
    device = next(iter(sharding.device_set))  # tiles are a TPU's; other memories hold arrays plain
    nbytes = tiled(part, item) if tpu_for(device.device_kind) and plain else plain
    # devices beyond these hold copies
    parts = math.prod(size // part_size for size, part_size in zip(leaf.shape, part) if part_size)
    devices = len(sharding.device_set)
    if isinstance(sharding, NamedSharding):
        entries = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
        split = ", ".join("-" if e is None else e if isinstance(e, str) else "+".join(e) for e in entries)
    else:
        split = ", ".join("-" if a == b else str(a // b) for a, b in zip(leaf.shape, part) if b)
    return ArrayPlace(
        path=path or "array",
        count=1,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        split=split or "-",
        bytes_per_device=nbytes,
        copies=devices // parts,
        padding=nbytes - plain,
        devices=devices,
    )


def tiled(shape: tuple[int, ...], item: int) -> int:
    """Bytes in a TPU's memory, as XLA lays parameters out: tiles of 128 lanes by up to 32 bytes of rows, fewer for few
    rows; the last two axes in the order that takes less.

    >>> tiled((100, 64), 2), tiled((3, 128), 4), tiled((1000,), 4)
    (16384, 2048, 4096)
    """
    if len(shape) < 2:
        return round_up(math.prod(shape), LANES) * item

    def padded(rows: int, lanes: int) -> int:
        # 32 bytes of rows: 8 of float32, 16 of bfloat16, 32 of int8
        return round_up(rows, min(8 * max(1, 4 // item), 1 << (rows - 1).bit_length())) * round_up(lanes, LANES)

    return math.prod(shape[:-2]) * min(padded(*shape[-2:]), padded(*shape[:-3:-1])) * item


def _cut(text: str, width: int) -> str:
    """The text, or its end after three dots."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"


def _own_spec(array: jax.Array, mesh: Mesh) -> PartitionSpec:
    """The array's own spec.

    Raises:
      ShapeError: it is on another mesh, or on none.
    """
    sharding = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else array.sharding
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ShapeError(
            f"validate_sharding: the array of shape {array.shape} lies as {sharding}, not on the mesh "
            f"{dict(mesh.shape)}; move it by `jax.device_put(array, NamedSharding(mesh, spec))`."
        )
    return sharding.spec


@checked
def validate_sharding(array: Any, mesh: Mesh, spec: PartitionSpec | None = None) -> None:
    """Checks that an array lies on `mesh` as `spec` says; returns nothing where it does.

    Args:
      array: a `jax.Array`, or a tracer inside a function on explicit mesh axes.
      mesh: the mesh that it should lie on.
      spec: which mesh axes split which of its dimensions; None checks the mesh only.

    Raises:
      KernelError: `spec` names an axis that `mesh` has not.
      ShapeError: `spec` has more entries than the array dimensions, a dimension does not divide evenly, or the array
        lies otherwise; the text says how, and the line that fixes it.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("data")))
    >>> validate_sharding(x, mesh, PartitionSpec("data"))
    >>> validate_sharding(x, mesh)
    >>> validate_sharding(x, mesh, PartitionSpec("model"))
    Traceback (most recent call last):
    vishwamai.core.errors.KernelError: validate_sharding: `spec` splits by 'model', but the mesh has the axes data.
    """
    if not isinstance(array, jax.Array):
        raise ShapeError(f"validate_sharding: `array` is {described(array)}; pass an array of JAX.")
    shape = jnp.shape(array)
    if not isinstance(mesh, Mesh):
        raise ShapeError(f"validate_sharding: `mesh` is {described(mesh)}; pass a jax.sharding.Mesh.")
    if spec is None:
        spec = _own_spec(array, mesh)
    if not isinstance(spec, PartitionSpec):
        raise ShapeError(f"validate_sharding: `spec` is {described(spec)}; pass a PartitionSpec, or None.")
    if len(spec) > len(shape):
        raise ShapeError(f"validate_sharding: `spec` {spec} has {len(spec)} entries, but the array has shape {shape}.")
    for size, entry in zip(shape, spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        ways = 1
        for axis in axes:
            if axis not in mesh.shape:
                raise KernelError(
                    f"validate_sharding: `spec` splits by {axis!r}, but the mesh has the axes "
                    f"{', '.join(mesh.axis_names)}."
                )
            ways *= mesh.shape[axis]
        if size % ways:
            raise ShapeError(
                f"validate_sharding: a dimension of {size} elements (shape {shape}) does not divide over the {ways} "
                f"devices of {axes}; pad it."
            )
    actual: Any = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else array.sharding
    expected = NamedSharding(mesh, spec)
    if isinstance(array, jax.core.Tracer):
        # a tracer's mesh is abstract: its spec is all there is to compare
        same = tuple(actual.spec) == tuple(spec) + (None,) * (len(shape) - len(spec))
    else:
        same = actual.is_equivalent_to(expected, len(shape))
    if not same:
        raise ShapeError(
            f"validate_sharding: the array of shape {shape} lies as {actual}, not as {spec} on the mesh "
            f"{dict(mesh.shape)}; move it by `jax.device_put(array, NamedSharding(mesh, spec))`, or inside a function "
            "by `jax.sharding.reshard`."
        )
