"""Configs a step away from a config: what the tuners try. A tile is doubled or halved, alone or against another one;
memory is planned for it where the config plans memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from vishwamai.core.errors import KernelError
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles

__all__ = ["abreast", "adopt", "single_changes", "kernels", "neighbours", "passes"]

T = TypeVar("T", bound=Tiles)


def neighbours(config: T, paths: Iterable[str], spec: Any, target: Target) -> Iterator[T]:
    """Configs that differ from `config` by a factor of two in one of its sizes, or in two against one another; `paths`
    as `Tiles.sizes` names them.

    First come those that cut one axis otherwise (`block_q` against `panel_q`) and need no more memory, so that a small
    budget tells most. Those that the config's own rules reject (a `KernelError` of its constructor) are left out.

    Example:
        >>> import dataclasses
        >>> from vishwamai.core.tiles import size
        >>> @dataclasses.dataclass(frozen=True)
        ... class Blocks(Tiles):
        ...     block: int = size("rows")
        ...     unroll: int = size("unroll")
        >>> sorted((t.block, t.unroll) for t in neighbours(Blocks(256, 1), ["block", "unroll"], None, Target("tpu")))
        [(128, 1), (128, 2), (256, 2), (512, 1)]
    """
    sizes = config.sizes()
    now, names = {path: value for path, (_, value) in sizes.items()}, list(paths)
    axis = {path: (size.axis, size.of) for path, (size, _) in sizes.items()}
    pairs = [(a, b) for a in names for b in names if a != b]
    of_one_axis = [(a, b) for a, b in pairs if axis[a] == axis[b]]
    steps = [{a: now[a] * 2, b: now[b] // 2} for a, b in of_one_axis]
    steps += [{name: value} for name in reversed(names) for value in (now[name] // 2, now[name] * 2)]
    steps += [{a: now[a] * 2, b: now[b] // 2} for a, b in pairs if (a, b) not in of_one_axis]
    for step in steps:
        if all(step.values()):
            try:
                yield config.with_sizes(step).planned(spec, target)
            except KernelError:
                continue


def single_changes(config: T, paths: Iterable[str]) -> Iterator[T]:
    """Configs that differ in one of the sizes that `paths` names, within the limits that the size states: doubled or
    halved; stages by one.

    Example:
        >>> import dataclasses
        >>> from vishwamai.core.tiles import size, stage_count, warp_count
        >>> @dataclasses.dataclass(frozen=True)
        ... class Rows(Tiles):
        ...     rows: int = size("rows")
        ...     warps: int = warp_count()
        ...     stages: int = stage_count()
        ...     backward_rows: int = size("rows", 16, of="backward")
        ...     deterministic: bool = True
        >>> start = Rows(1, 16, 2)
        >>> [dataclasses.astuple(t)[:3] for t in single_changes(start, passes(start)["forward"])]
        [(2, 16, 2), (1, 8, 2), (1, 16, 3), (1, 16, 1)]
    """
    sizes = config.sizes()
    for path in paths:
        tile, now = sizes[path]
        for size in (now + 1, now - 1) if tile.additive else (now * 2, now // 2):
            if tile.least <= size <= tile.most:
                yield config.with_sizes({path: size})


def passes(config: Tiles) -> dict[str, list[str]]:
    """The paths of a config's sizes by the pass that they serve, "forward" before "backward"."""
    fields: dict[str, list[str]] = {"forward": [], "backward": []}
    for path, (size, _) in config.sizes().items():
        fields[size.of].append(path)
    return {of: paths for of, paths in fields.items() if paths}


def kernels(config: Tiles) -> tuple[str, ...]:
    """The parts of a config that are the tiles of a kernel each, where all of its sizes are in such parts and serve one
    pass together.
    """
    sizes = config.sizes()
    parts = {path: path.partition(".") for path in sizes}
    if not all(rest for _, _, rest in parts.values()) or len(passes(config)) > 1:
        return ()
    return tuple(dict.fromkeys(head for head, _, _ in parts.values()))


def adopt(config: T, winner: T, kernel: str, spec: Any, target: Target) -> T:
    """`config` with the other's tiles for one kernel, and memory planned for them."""
    paths = [path for path in winner.sizes() if path.startswith(f"{kernel}.")]
    return config.with_sizes({path: winner.sizes()[path][1] for path in paths}).planned(spec, target)


def abreast(config: T, names: Sequence[str], spec: object, target: Target) -> Iterator[T]:
    """`neighbours` of every part in `names`, the n-th of each in one config: as many configs as the part with the most
    has neighbours.

    The leading sizes of a part, those of its blocks, come first.

    Example:
        >>> import dataclasses
        >>> from vishwamai.core.tiles import part, size
        >>> @dataclasses.dataclass(frozen=True)
        ... class Block(Tiles):
        ...     rows: int = size("rows")
        ...     unroll: int = size("unroll")
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config(Tiles):
        ...     forward: Block = part(Block)
        ...     grad_lhs: Block = part(Block)
        >>> next(abreast(Config(Block(256, 1), Block(512, 2)), ["forward", "grad_lhs"], None, Target("tpu")))
        Config(forward=Block(rows=128, unroll=1), grad_lhs=Block(rows=256, unroll=2))
    """
    paths = {kernel: [path for path in config.sizes() if path.startswith(f"{kernel}.")] for kernel in names}
    moves = [neighbours(config, reversed(paths[kernel]), spec, target) for kernel in names]
    for row in itertools.zip_longest(*moves):
        step = config
        for kernel, neighbour in zip(names, row):
            if neighbour is not None:
                step = adopt(step, neighbour, kernel, spec, target)
        yield step
