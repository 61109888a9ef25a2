"""Configs a step away from a config: what the tuner tries. A tile is doubled or halved, alone or against another one, and memory is planned for it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import Chip

__all__ = ["BACKWARD", "abreast", "adopt", "kernels", "neighbours", "tiles"]

BACKWARD = "backward_"
_NO_TILES = ("vmem_bytes", "buffers", "cores", "block_vocab")
"""Ends of the names of integers that are no tiles: plans of memory, of VMEM and (the words whose logits are held) of HBM, counts of buffers, of which
the compiler takes one or two, and the chip's cores."""
_VMEM = _NO_TILES[0]
_UNLIMITED = 1 << 20


def tiles(config: Any) -> dict[str, int]:
    """The tile sizes of a config by field; those in a tuple as `field.index`. Not a tile: flags, `_NO_TILES`, and what stands for "no limit"."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            found |= {f"{field.name}.{index}": part for index, part in enumerate(value)}
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and not field.name.endswith(_NO_TILES)
            and value < _UNLIMITED
        ):
            found[field.name] = value
    return found


def _resized(config: Any, sizes: dict[str, int], one: Chip) -> Any:
    """The config with other tiles, and memory planned for them: no buffer grows faster than a tile does."""
    before = tiles(config)
    values: dict[str, Any] = {}
    for name, size in sizes.items():
        field, _, index = name.partition(".")
        if index:
            old = values.get(field, getattr(config, field))
            values[field] = tuple(size if i == int(index) else part for i, part in enumerate(old))
        else:
            values[field] = size
    for field in dataclasses.fields(config):
        if _VMEM in field.name:
            mine = [n for n in sizes if n.startswith(BACKWARD) == field.name.startswith(BACKWARD)]
            growth = math.prod(max(1.0, sizes[name] / before[name]) for name in mine)
            values[field.name] = min(
                int(getattr(config, field.name) * growth), max(one.vmem_bytes * 3 // 4, getattr(config, field.name))
            )
    return dataclasses.replace(config, **values)


def neighbours(config: Any, fields: Iterable[str], one: Chip) -> Iterator[Any]:
    """Configs that differ from `config` by a factor of two in one of `fields` (as `tiles` names them), or in two against one another.

    First come those that cut one axis otherwise (`block_q` against `panel_q`) and need no more memory, so that a small budget tells most. Those that
    the config's own rules refuse (a `KernelError` of its constructor) are left out.

    Example:
        >>> from vishwamai.core.hardware import chip
        >>> @dataclasses.dataclass(frozen=True)
        ... class Tiles:
        ...     block: int
        ...     unroll: int
        >>> sorted((t.block, t.unroll) for t in neighbours(Tiles(256, 1), ["block", "unroll"], chip("v5e")))
        [(128, 1), (128, 2), (256, 2), (512, 1)]
    """
    now, names = tiles(config), list(fields)
    pairs = [(a, b) for a in names for b in names if a != b]
    of_one_axis = [(a, b) for a, b in pairs if a.rpartition("_")[2] == b.rpartition("_")[2]]
    steps = [{a: now[a] * 2, b: now[b] // 2} for a, b in of_one_axis]
    steps += [{name: size} for name in reversed(names) for size in (now[name] // 2, now[name] * 2)]
    steps += [{a: now[a] * 2, b: now[b] // 2} for a, b in pairs if (a, b) not in of_one_axis]
    for step in steps:
        if all(step.values()):
            try:
                yield _resized(config, step, one)
            except KernelError:
                continue


def kernels(config: Any) -> tuple[str, ...]:
    """The fields that hold a tuple of tiles for a kernel each, where all tiles of the config are in such fields."""
    named = {name: name.partition(".") for name in tiles(config)}
    return (
        tuple(dict.fromkeys(head for head, _, _ in named.values()))
        if all(tail for _, _, tail in named.values())
        else ()
    )


def adopt(config: Any, other: Any, kernel: str) -> Any:
    """`config` with the other's tiles for one kernel, and the larger plan of memory."""
    memory = {
        f.name: max(getattr(config, f.name), getattr(other, f.name))
        for f in dataclasses.fields(config)
        if _VMEM in f.name
    }
    return dataclasses.replace(config, **{kernel: getattr(other, kernel)}, **memory)


def abreast(config: Any, names: Sequence[str], one: Chip) -> Iterator[Any]:
    """`neighbours` of every tuple of tiles in `names`, the n-th of each in one config: as many configs as the tuple with the most has neighbours.

    The leading sizes of a tuple, those of its blocks, come first.

    Example:
        >>> from vishwamai.core.hardware import chip
        >>> @dataclasses.dataclass(frozen=True)
        ... class Tiles:
        ...     forward: tuple[int, int]
        ...     backward: tuple[int, int]
        >>> next(abreast(Tiles((256, 1), (512, 2)), ["forward", "backward"], chip("v5e")))
        Tiles(forward=(128, 1), backward=(256, 2))
    """
    fields = {kernel: [name for name in tiles(config) if name.startswith(f"{kernel}.")] for kernel in names}
    moves = [neighbours(config, reversed(fields[kernel]), one) for kernel in names]
    for row in itertools.zip_longest(*moves):
        step = config
        for kernel, neighbour in zip(names, row):
            if neighbour is not None:
                step = adopt(step, neighbour, kernel)
        yield step
