"""The plan of ring attention: which hops there are, what travels between them, and what a device computes in each.

The keys that are with a device in hop s come from the device s places before it, or, around the end of the ring, from
one behind it. Both distances are known when the program is traced, and so is what a causal mask and a window leave of
the hop on either side of the end: the whole, a band, or nothing, in which case it is not made. A block mask leaves each
device a part of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import dims, dropout
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.block_mask import WHOLE, BlockMask
from vishwamai.ops.attention.spec import AttentionSpec, Operands

_DIMS = dims.declared(Operands)._asdict()
TRAVEL = ("key", "value", "kv_segment_ids")


class Part(NamedTuple):
    """What of one hop is computed.

    Attributes:
      causal, causal_offset, window: remaining static mask, as in `AttentionSpec`.
      rows, columns: the half of the device's queries, or of the keys; None for all.
      blocks: the block mask of the device's queries and the keys; None for all of them.
    """

    causal: bool = False
    causal_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    rows: int | None = None
    columns: int | None = None
    blocks: BlockMask | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is static about a call.

    Attributes:
      axes: the mesh axes around which the keys travel.
      size: how many devices they have.
      spec: the options; its operands are those of a device, but `bias` and `mask` have the keys of all.
      zigzag: the sequence lies in zig-zag order, and something asks for it: a causal mask, or dropout.
      config, implementation: choice for the attention of one hop.
    """

    axes: tuple[str, ...]
    size: int
    spec: AttentionSpec
    zigzag: bool
    config: object
    implementation: str | None

    def parts(self, step: int) -> tuple[Part | None, ...]:
        """What each device computes in a hop; None for nothing."""
        return self._plan[step]

    @functools.cached_property
    def _plan(self) -> list[tuple[Part | None, ...]]:
        plan = []
        for step in range(self.size):
            if self.zigzag and self.spec.causal and step:
                near, far = Part(columns=0), Part(rows=1)
            else:  # of devices that have their keys from before them, and of those around the end of the ring
                near = self._part(step * self.spec.kv_len)
                far = self._part((step - self.size) * self.spec.kv_len) if step else near
            plan.append(tuple(self._seen(near if j >= step else far, j, step) for j in range(self.size)))
        return plan

    def _seen(self, part: Part | None, device: int, step: int) -> Part | None:
        """What the block mask leaves of a part. The first hop is made always: sinks enter in it."""
        if part is None or self.spec.blocks is None:
            return part
        (q_len, kv_len), source = (self.spec.q_len, self.spec.kv_len), (device - step) % self.size
        rows, columns = range(device * q_len, (device + 1) * q_len), range(source * kv_len, (source + 1) * kv_len)
        blocks = self.spec.blocks.part(rows, columns)
        if step and not blocks.codes.any():
            return None
        return part if (blocks.codes == WHOLE).all() else part._replace(blocks=blocks)

    def _part(self, distance: int) -> Part | None:
        """Of keys that stand `distance` before the queries."""
        spec = self.spec
        if spec.operands.q_positions is not None:
            return Part(spec.causal, 0, spec.window)
        shifted = dataclasses.replace(spec, causal_offset=distance)
        low, high = shifted.band
        last_row, last_key = spec.q_len - 1, spec.kv_len - 1
        if (low is not None and low > last_key) or (high is not None and last_row + high < 0):
            return None
        if (low is None or last_row + low <= 0) and (high is None or high >= last_key):
            return Part()
        return Part(spec.causal, distance, spec.window)

    def pieces(self, part: Part) -> list[Part]:
        """The part, or where dropout draws by position the quarters of it whose rows and keys are consecutive."""
        if not (self.zigzag and self.spec.dropout_rate):
            return [part]
        rows, columns = ((0, 1) if half is None else (half,) for half in (part.rows, part.columns))
        quarters = [(row, column) for row in rows for column in columns if not (part.causal and row < column)]
        return [Part(part.causal and r == c, rows=r, columns=c) for r, c in quarters]

    def start(self, device: Any, half: int | None, length: int) -> PyTree:
        """Where a device's rows or keys begin in the whole sequence, or a half of them in zig-zag order."""
        if not self.zigzag or half is None:
            return device * length
        return (device if half == 0 else 2 * self.size - 1 - device) * (length // 2)

    @functools.cached_property
    def steps(self) -> list[int]:
        """The hops that some device has something to compute in."""
        return [step for step in range(self.size) if any(part is not None for part in self.parts(step))]

    @functools.cached_property
    def holders(self) -> list[set[int]]:
        """The devices that need keys in each of `steps`: to use them, or to pass them on."""
        devices: list[set[int]] = []
        later: set[int] = set()
        for i in reversed(range(len(self.steps))):
            users = {j for j, part in enumerate(self.parts(self.steps[i])) if part is not None}
            devices.append(users | later)
            way = self.steps[i] - self.steps[i - 1] if i else 0
            later = {(j - way) % self.size for j in devices[-1]}
        return devices[::-1]

    def shift(self, arrays: object, way: int, holders: Any = None) -> PyTree:
        """Every array from the device `way` places before, to those of `holders`."""
        if way % self.size == 0:
            return arrays
        to = range(self.size) if holders is None else sorted(holders)
        axes, index = _in_mesh_order(self.axes)
        pairs = [(index[(j - way) % self.size], index[j]) for j in to]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), arrays)

    def next_keys(self, keys: object, i: int) -> PyTree:
        """The keys of the hop after the i-th of `steps`; after the last one those that are there."""
        if i + 1 == len(self.steps):
            return keys
        return self.shift(keys, self.steps[i + 1] - self.steps[i], self.holders[i + 1])

    def operands(self, local: Operands, keys: Any, step: int, part: Part) -> Operands:
        """The operands of a part of a hop."""
        length = self.spec.kv_len
        source = (jax.lax.axis_index(self.axes) - step) % self.size
        arrays = local._replace(**dict(zip(TRAVEL, keys, strict=True)))
        for name in ("bias", "mask"):
            x = getattr(local, name)
            if x is not None and x.shape[3] != 1:
                x = jax.lax.dynamic_slice_in_dim(x, source * length, length, 3)
            arrays = arrays._replace(**{name: x})
        if local.q_positions is not None:
            arrays = arrays._replace(q_positions=local.q_positions - source.astype(jnp.int32) * length)
        if step or part.columns:
            arrays = arrays._replace(sinks=None)  # they enter the denominator once
        if local.dropout_seed is not None:
            rows = self.start(jax.lax.axis_index(self.axes), part.rows, self.spec.q_len)
            columns = self.start(source, part.columns, length)
            arrays = arrays._replace(dropout_seed=dropout.offset_seeds(local.dropout_seed, rows, columns))
        return type(arrays)(*(self.cut(name, x, part) for name, x in arrays._asdict().items()))

    def cut(self, name: str, x: AnyArray, part: Part) -> PyTree:
        """The halves of an operand that the part has."""
        for word, half, length in self._halves(part):
            axis = _axis(name, word)
            if x is not None and axis is not None and x.shape[axis] == length:
                x = jax.lax.slice_in_dim(x, half * length // 2, (half + 1) * length // 2, axis=axis)
        return x

    def place(self, name: str, total: Any, x: AnyArray, part: Part, start: Any = 0) -> PyTree:
        """`total` plus `x`, where the part cut it from; `start` is its first key in `total`."""
        starts: list[Any] = [0] * total.ndim
        columns = _axis(name, "kv_len")
        for word, half, length in self._halves(part):
            axis = _axis(name, word)
            if axis is not None and x.shape[axis] * 2 == length:
                starts[axis] = half * length // 2
        if columns is not None and total.shape[columns] != 1:
            starts[columns] += start
        if x.shape == total.shape:
            return total + x.astype(total.dtype)
        previous = jax.lax.dynamic_slice(total, starts, x.shape)
        return jax.lax.dynamic_update_slice(total, previous + x.astype(total.dtype), starts)

    def _halves(self, part: Part) -> list[tuple[str, int, int]]:
        """(dim, half, length) of what the part does not take whole."""
        halves = (("q_len", part.rows, self.spec.q_len), ("kv_len", part.columns, self.spec.kv_len))
        return [(word, half, length) for word, half, length in halves if half is not None]

    def by_place(self, step: int, run: Any, *values: Any) -> PyTree:
        """`run(part, *values)` for the part that this device has in a hop; where it has none, the first value."""
        parts = self.parts(step)
        kinds = list(dict.fromkeys(parts))

        def branch(part: Part | None) -> PyTree:
            return (lambda *values: values[0]) if part is None else functools.partial(run, part)

        if len(kinds) == 1:
            return branch(kinds[0])(*values)
        device = jax.lax.axis_index(self.axes)
        if parts == (parts[0],) * step + (parts[-1],) * (self.size - step):
            return jax.lax.cond(device >= step, branch(parts[-1]), branch(parts[0]), *values)
        numbers = jnp.array([kinds.index(part) for part in parts])
        return jax.lax.switch(numbers[device], [branch(part) for part in kinds], *values)


def _in_mesh_order(axes: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """The axes in the order of the mesh, by which `ppermute` counts devices whatever order it is given; and the number
    there of the i-th device of `axes`.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    ordered = tuple(sorted(axes, key=names.index))
    sizes = [jax.lax.axis_size(axis) for axis in ordered]
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose([ordered.index(axis) for axis in axes])
    return ordered, numbers.reshape(-1).tolist()


def _axis(name: str, word: str) -> int | None:
    """The axis of an operand that is of a dim."""
    names = [dim.name for dim in dims.parse(_DIMS[name])]
    return names.index(word) if word in names else None


MOST_PARTS = 64
"""Of a block mask: each part that differs from the others is a program of its own."""


def why_not_ring(local_spec: AttentionSpec, size: int) -> str | None:
    """Why a ring of `size` devices cannot serve a call, where `local_spec` is of a device's part; None if it can."""
    if local_spec.operands.slopes is not None:
        return "`alibi_slopes` are given, and a hop does not know how far its keys are."
    if local_spec.operands.q_positions is None and (local_spec.causal or local_spec.window is not None):
        if local_spec.causal_offset:
            return "`q_offset` and `causal_align` that are static move the diagonal off the devices' own keys."
        if local_spec.q_len != local_spec.kv_len:
            return (
                "`causal` and `window` need as many queries as keys, and there are "
                f"{local_spec.q_len} and {local_spec.kv_len}."
            )
    if local_spec.blocks is not None:
        rows, columns = local_spec.blocks.block_size
        if local_spec.q_len % rows or local_spec.kv_len % columns:
            return (
                f"blocks of {rows} x {columns} do not divide the {local_spec.q_len} queries and "
                f"{local_spec.kv_len} keys of a device."
            )
        plan = Ring((), size, local_spec, False, None, None)
        parts = len({part for step in range(size) for part in plan.parts(step)})
        if parts > MOST_PARTS:
            return f"the block mask has {parts} different parts on {size} devices, and may have {MOST_PARTS}."
    return None


def why_not_zigzag(local_spec: AttentionSpec) -> str | None:
    """Why a ring that can serve a call cannot do so in zig-zag order, where `local_spec` is of a device's part."""
    if local_spec.blocks is not None:
        return "a block mask is of the sequence in order."
    if local_spec.window is not None:
        return "`window` needs the sequence in order."
    if local_spec.operands.q_positions is not None:
        return "`q_offset` is an array, which places queries in order."
    if local_spec.q_len % 2:
        return f"zig-zag order cuts the {local_spec.q_len} rows of a device into two."
    return None
