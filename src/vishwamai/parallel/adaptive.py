"""The split of weights over one mesh axis by cost: each array whole, by rows or by columns, and why.

A product `x @ weight`, with `x` whole on every device of the axis, costs:

- whole: the whole product on every device;
- by columns: a share of it, and an all-gather of the results, unless the next product is split by the same logical name
  and takes the parts as they are;
- by rows: a share of it, and an all-reduce of the results.

So the choice is one for each logical name that arrays share ("mlp" of `up` and `down`), as in Megatron-LM (Shoeybi et
al., 2019). All choices of the names that arrays connect are tried.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.aot.schedule.roofline import roofline
from vishwamai.core.arguments import check_instances, checked
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.links import AxisLinks, axis_links, estimate_collective
from vishwamai.core.types import PyTree
from vishwamai.measure import timing
from vishwamai.parallel.rules import LogicalRules, Names, names_of, shardings

Kind = Literal["whole", "columns", "rows"]
Collective = Literal["", "all_gather", "all_reduce"]
Cost = Callable[[tuple[int, int], jnp.dtype, Kind, Collective], float]
"""`(shape of a weight, its dtype, split, collective after it) -> seconds` of a product with it."""

KINDS: tuple[Kind, ...] = ("whole", "columns", "rows")
_MOST_NAMES = 12


@dataclasses.dataclass(frozen=True)
class ArrayChoice:
    """What was chosen for one array, and the times it was chosen by.

    Attributes:
      path: place in the tree. shape: the array's shape.
      kind: "whole", "columns" or "rows".
      seconds: time of its products in a step, by kind; without the kinds that the mesh axis does not divide.
      reason: why, in words.
    """

    path: str
    shape: tuple[int, ...]
    kind: Kind
    seconds: dict[str, float]
    reason: str


@dataclasses.dataclass(frozen=True)
class AdaptiveSharding:
    """The answer of `adaptive_sharding`; printing it gives a line for each array.

    Attributes:
      mesh: the mesh. axis: its axis that arrays were split over.
      choices: choice for every array of two axes or more.
      rules: the rules with the chosen names on `axis`.
      shardings: sharding of every array, a tree like the arrays.
      cost: "planned" or "measured".
    """

    mesh: Mesh
    axis: str
    choices: tuple[ArrayChoice, ...]
    rules: LogicalRules
    shardings: PyTree
    cost: str

    def __str__(self) -> str:
        head = f"over {self.axis}={self.mesh.shape[self.axis]}, by {self.cost} times:"
        return "\n".join([head, *(f"  {c.path} {c.shape}: {c.kind}: {c.reason}" for c in self.choices)])


@checked
def adaptive_sharding(
    tree: PyTree,
    mesh: Mesh,
    rules: LogicalRules | None = None,
    axes: Mapping[str, Names] | None = None,
    *,
    axis: str | None = None,
    rows: int = 1024,
    cost: str | None = None,
) -> AdaptiveSharding:
    """Chooses for every weight of a tree whether it lies whole, by rows or by columns over a mesh axis.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`s; axes before the last two (layers, experts) count as many products.
      mesh: mesh, for example of `make_mesh`.
      rules: names that already have their mesh axes, which they keep. None: none has.
      axes: names of the arrays' last axes, as of `shard`; an array without names is chosen for by itself.
      axis: the mesh axis to split over; by default the last one that `rules` do not use.
      rows: rows of x in each product: tokens of a step on the devices of the axis.
      cost: "planned" (the roofline of the chip and its links: TPUs, also described ones), "measured" (every kind of
        product runs on the devices of the axis), or None: planned where the links are known, else measured.

    Raises:
      ShapeError: an argument is not one of those above.
      UnsupportedError: `cost` is "planned", and the links of the axis are not known.

    >>> from vishwamai.parallel import make_mesh
    >>> mesh = make_mesh("tensor=4", topology="v5e:2x2")  # doctest: +SKIP
    >>> layer = {"up": jax.ShapeDtypeStruct((4096, 14336), "bfloat16")}
    >>> print(adaptive_sharding(layer, mesh, axes={"up": ("embed", "mlp")}, rows=8))  # doctest: +SKIP
    over tensor=4, by planned times:
      up (4096, 14336): columns: 41 us, and 144 us whole, 47 us by rows
    """
    check_instances("adaptive_sharding", {"rules": LogicalRules, "axes": Mapping}, {"rules": rules, "axes": axes})
    rules = LogicalRules({}) if rules is None else rules
    occupied = {name for used in rules.values() for name in used}
    free = [name for name in mesh.axis_names if name not in occupied]
    if axis is None and not free:
        raise ShapeError(f"adaptive_sharding: `rules` use every axis of the mesh ({', '.join(mesh.axis_names)}).")
    chosen = free[-1] if axis is None else axis
    if chosen not in free:
        raise ShapeError(f"adaptive_sharding: `axis` is {chosen!r}; pass one of {', '.join(free) or 'no axis'}.")
    if rows < 1:
        raise ShapeError(f"adaptive_sharding: `rows` is {rows}; pass the rows of a product, 1 or more.")
    if cost not in (None, "planned", "measured"):
        raise ShapeError(f"adaptive_sharding: `cost` is {cost!r}; pass 'planned', 'measured' or None.")
    links = None
    if cost != "measured":
        try:
            links = axis_links(mesh, chosen)
        except (ShapeError, UnsupportedError) as error:
            if cost == "planned":
                raise UnsupportedError(f"adaptive_sharding: `cost` is 'planned', but {error}") from error
    seconds = measured(mesh, chosen, rows) if links is None else planned(links, rows)
    return choose(tree, mesh, rules, axes, chosen, seconds, "measured" if links is None else "planned")


def choose(
    tree: PyTree,
    mesh: Mesh,
    rules: LogicalRules,
    axes: Mapping[str, Names] | None,
    axis: str,
    seconds: Cost,
    cost: str,
) -> AdaptiveSharding:
    """`adaptive_sharding` by a cost of one's own."""
    named: Mapping[str, Names] = getattr(tree, "logical_axes", {}) if axes is None else axes
    leaves = [
        (path, leaf, _last_names(path, leaf, named))
        for path, leaf in ((path, leaf) for path, leaf in names_of(tree) if np.ndim(leaf) >= 2)
    ]
    size = mesh.shape[axis]
    locked = {name for name in rules if rules[name]}  # mapped by the caller: neither tried nor changed
    split: set[str] = set()
    # Names that no array connects are chosen apart: the search is exponential in a group's names alone.
    for group in _connected([names for _, _, names in leaves]):
        members = [leaf for leaf in leaves if set(leaf[2]) & group]
        names = sorted(name for name in group if name not in locked and _divides(name, members, size))
        split |= _best(members, names, size, seconds)
    mapping = dict(rules) | {
        name: (axis,) if name in split else () for _, _, names in leaves for name in names if name not in locked
    }
    extended = LogicalRules(mapping)
    by_path = {path: names for path, _, names in leaves}
    rest = {path: _names_of_vector(path, leaf, named, mapping) for path, leaf in names_of(tree) if path not in by_path}
    layout = shardings(tree, mesh, extended, {**{k: v for k, v in rest.items() if v is not None}, **by_path})
    choices = tuple(_described(leaf, leaves, split, size, seconds) for leaf in leaves)
    return AdaptiveSharding(mesh, axis, choices, extended, layout, cost)


def _last_names(path: str, leaf: object, named: Mapping[str, Names]) -> tuple[str, str]:
    """The logical names of an array's last two axes; of its own where it has none."""
    parts = path.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    names = next((named[end] for end in ends if end in named), (None, None))
    pair = (None, None, *names)[-2:]
    return tuple(f"{path}:{i}" if name is None else name for i, name in enumerate(pair))  # type: ignore[return-value]


def _names_of_vector(
    path: str, leaf: jax.Array, named: Mapping[str, Names], rules: Mapping[str, object]
) -> Names | None:
    """Names of an array of one axis, as far as the rules have them."""
    if not np.ndim(leaf):
        return None
    name = _last_names(path, leaf, named)[1]
    return (name if name in rules else None,)


Leaf = tuple[str, jax.Array, tuple[str, str]]


def _connected(pairs: Sequence[tuple[str, str]]) -> list[set[str]]:
    """Names that arrays connect."""
    groups: list[set[str]] = []
    for pair in pairs:
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return groups


def _divides(name: str, leaves: Sequence[Leaf], size: int) -> bool:
    return (
        all(leaf.shape[i - 2] % size == 0 for _, leaf, names in leaves for i in range(2) if names[i] == name)
        and size > 1
    )


def _best(leaves: Sequence[Leaf], names: Sequence[str], size: int, seconds: Cost) -> set[str]:
    """The names to split, with the least time of all products."""

    def total(split: set[str]) -> float:
        if any(set(pair) <= split for _, _, pair in leaves):  # one axis cannot split both sides of an array
            return float("inf")
        return sum(_seconds(leaf, leaves, split, seconds) for leaf in leaves)

    if len(names) <= _MOST_NAMES:
        ways = (set(way) for count in range(len(names) + 1) for way in itertools.combinations(names, count))
        return min(ways, key=total)
    split: set[str] = set()
    while True:
        ways = [split ^ {name} for name in names]  # too many names for all ways: one is flipped at a time
        nearest = min(ways, key=total)
        if total(nearest) >= total(split):
            return split
        split = nearest


def _kind(pair: tuple[str, str], split: set[str]) -> Kind:
    return "rows" if pair[0] in split else "columns" if pair[1] in split else "whole"


def _collective(pair: tuple[str, str], leaves: Sequence[Leaf], split: set[str]) -> Collective:
    """What follows a product: its parts stay where they are if a product takes them so."""
    kind = _kind(pair, split)
    if kind == "rows":
        return "all_reduce"
    # Megatron's pair: columns, then rows, with one collective after both
    if kind == "columns" and not any(names[0] == pair[1] for _, _, names in leaves):
        return "all_gather"
    return ""


def _seconds(leaf: Leaf, leaves: Sequence[Leaf], split: set[str], seconds: Cost) -> float:
    _, array, pair = leaf
    *lead, k, n = array.shape
    dtype = jnp.dtype(array.dtype)
    return int(np.prod(lead, initial=1)) * seconds((k, n), dtype, _kind(pair, split), _collective(pair, leaves, split))


def _described(leaf: Leaf, leaves: Sequence[Leaf], split: set[str], size: int, seconds: Cost) -> ArrayChoice:
    path, array, pair = leaf
    times: dict[str, float] = {}
    for kind in KINDS:
        place = {"rows": 0, "columns": 1}.get(kind)
        if place is None or (array.shape[place - 2] % size == 0 and size > 1):
            changed = (split - set(pair)) | ({pair[place]} if place is not None else set())
            times[kind] = _seconds(leaf, leaves, changed, seconds)
    kind = _kind(pair, split)
    others = ", ".join(
        f"{1e6 * times[k]:.0f} us {'whole' if k == 'whole' else f'by {k}'}" for k in KINDS if k != kind and k in times
    )
    reason = f"{1e6 * times[kind]:.0f} us" + (f", and {others}" if others else "; the axis divides neither side")
    readers = [p for p, _, names in leaves if names[0] == pair[1]]
    writers = [p for p, _, names in leaves if names[1] == pair[0]]
    if kind == "columns" and readers:
        reason += f"; its parts go to {', '.join(readers)} as they are"
    if kind == "rows" and writers:
        reason += f"; it takes the parts of {', '.join(writers)} as they are"
    return ArrayChoice(path, tuple(array.shape), kind, times, reason)


def planned(links: AxisLinks, rows: int) -> Cost:
    """The roofline of the chip, and the least times of its links."""

    def seconds(shape: tuple[int, int], dtype: jnp.dtype, kind: Kind, collective: Collective) -> float:
        k, n = shape
        size = links.devices
        k, out = (k // size if kind == "rows" else k), (n // size if kind == "columns" else n)
        nbytes = (rows * k + k * out + rows * out) * dtype.itemsize  # operands and result, each moved once
        time = roofline(links.chip, 2 * rows * k * out, nbytes, dtype.name).seconds
        return time + (estimate_collective(collective, rows * n * dtype.itemsize, links) if collective else 0.0)

    return seconds


def measured(mesh: Mesh, axis: str, rows: int) -> Cost:
    """Products on the devices of the axis; each is timed once."""
    # one line of the mesh: other lines would do the same work
    places = [slice(None) if name == axis else slice(1) for name in mesh.axis_names]
    line = Mesh(mesh.devices[tuple(places)].reshape(-1), (axis,))
    times: dict[object, float] = {}

    def seconds(shape: tuple[int, int], dtype: jnp.dtype, kind: Kind, collective: Collective) -> float:
        key = (shape, dtype, kind, collective)
        if key not in times:
            call = _call(line, axis, rows, shape, dtype, kind, collective)
            times[key] = timing.side_by_side({"product": call}, rounds=5, pause=lambda _: None)["product"].median
        return times[key]

    return seconds


def _call(
    mesh: Mesh, axis: str, rows: int, shape: tuple[int, int], dtype: jnp.dtype, kind: Kind, collective: Collective
) -> Callable[[], object]:
    spec = {"whole": PartitionSpec(), "columns": PartitionSpec(None, axis), "rows": PartitionSpec(axis)}[kind]
    of_x = PartitionSpec(None, axis) if kind == "rows" else PartitionSpec()
    of_result = PartitionSpec(None, axis) if kind == "columns" and not collective else PartitionSpec()

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        out = jnp.matmul(x, weight)
        if collective == "all_gather":
            return jax.lax.all_gather(out, axis, axis=1, tiled=True)
        return jax.lax.psum(out, axis) if collective else out

    mapped = jax.shard_map(product, mesh=mesh, in_specs=(of_x, spec), out_specs=of_result, check_vma=False)
    x = jax.device_put(jnp.ones((rows, shape[0]), dtype), NamedSharding(mesh, of_x))
    weight = jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, spec))
    compiled = jax.jit(mapped).lower(x, weight).compile()
    jax.block_until_ready(compiled(x, weight))
    return lambda: jax.block_until_ready(compiled(x, weight))
