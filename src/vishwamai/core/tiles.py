"""How a kernel cuts its arrays: the fields of a config say what they are, and block sizes, tuning tables and searches
go by that.

A config is a frozen dataclass that derives from `Tiles`; a part of it, such as `forward`, may be `Tiles` of its own. A
field made by `size` or `sizes` is searched; any other is a flag or a plan of memory, which `planned` makes anew for
other tiles.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from vishwamai.core.errors import KernelError

if TYPE_CHECKING:
    from vishwamai.core.spec import OpSpec
    from vishwamai.core.target import Target


UNLIMITED = 1 << 20
"""Sizes from here on stand for "no limit"; no search changes them."""

Resize = Callable[[Any, int], Any]
"""`(tiles, block_size) -> value` of a field under the ambient `block_size`."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What a field of a config counts.

    Attributes:
      axis: "rows", "keys", "depth", "warps", "stages" ... A search exchanges two sizes of one axis for one another
        before it tries others.
      of: the pass that it serves, "forward" or "backward"; for a field of a part, the part's name says it.
      least, most: the smallest and the largest that a search tries.
      additive: a search changes it by one, not by a factor of two.
    """

    axis: str
    of: str = "forward"
    least: int = 1
    most: int = UNLIMITED
    additive: bool = False


def size(
    axis: str,
    default: object = dataclasses.MISSING,
    *,
    of: str = "forward",
    least: int = 1,
    most: int = UNLIMITED,
    additive: bool = False,
    block_size: Resize | None = None,
) -> Any:
    """A field that holds one size, see `Size`; `block_size`: what it becomes under the ambient block size, None keeps
    it.
    """
    return _field(default, {"sizes": (Size(axis, of, least, most, additive),), "block_size": block_size})


def sizes(axes: Iterable[str], default: object = dataclasses.MISSING, *, block_size: Resize | None = None) -> Any:
    """A field that holds a tuple of sizes, or None."""
    return _field(default, {"sizes": tuple(map(Size, axes)), "block_size": block_size})


def warp_count(default: object = dataclasses.MISSING, *, of: str = "forward", block_size: Resize | None = None) -> Any:
    """A field that holds the warps of a GPU's program."""
    return size("warps", default, of=of, most=16, block_size=block_size)


def stage_count(default: object = dataclasses.MISSING, *, of: str = "forward") -> Any:
    """A field that holds how many blocks of a GPU's program are in flight."""
    return size("stages", default, of=of, most=6, additive=True)


def part(kind: type[Tiles], default: object = dataclasses.MISSING) -> Any:
    """A field that holds `Tiles` of their own."""
    return _field(default, {"part": kind})


def option(default: object = dataclasses.MISSING, *, block_size: Resize | None = None) -> Any:
    """A field that no search changes."""
    return _field(default, {"block_size": block_size})


def _field(default: object, metadata: Mapping[str, object]) -> Any:
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The base of configs and of their parts.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Rows(Tiles):
    ...     block_rows: int = size("rows", block_size=lambda tiles, n: n)
    ...     backward_rows: int = size("rows", 8, of="backward")
    ...     vmem_bytes: int = 0
    >>> Rows(16).with_block_size(64)
    Rows(block_rows=64, backward_rows=8, vmem_bytes=0)
    >>> {path: (what.of, value) for path, (what, value) in Rows(16).sizes().items()}
    {'block_rows': ('forward', 16), 'backward_rows': ('backward', 8)}
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, declared = getattr(self, field.name), field.metadata.get("sizes", ())
            least = 0 if field.default == 0 else 1  # a default of 0 stands for "without"
            if not declared or value is None:
                continue
            for size in value if isinstance(value, tuple) else (value,):
                if isinstance(size, bool) or not isinstance(size, numbers.Integral) or int(size) < least:
                    raise KernelError(
                        f"{type(self).__name__}: `{field.name}` is {value!r}; pass a positive integer, it counts "
                        f"{declared[0].axis}."
                    )

    def sizes(self) -> dict[str, tuple[Size, int]]:
        """Every size by its path ("block_q", "forward.block_q", "grad_a.0"), except those that stand for "no limit"."""
        by_path: dict[str, tuple[Size, int]] = {}
        for field in dataclasses.fields(self):
            value, declared = getattr(self, field.name), field.metadata.get("sizes", ())
            if isinstance(value, Tiles):
                of = "backward" if field.name == "backward" else "forward"
                by_path |= {
                    f"{field.name}.{path}": (dataclasses.replace(size, of=of), n)
                    for path, (size, n) in value.sizes().items()
                }
            elif isinstance(value, tuple):
                by_path |= {f"{field.name}.{i}": pair for i, pair in enumerate(zip(declared, value))}
            elif declared and value is not None and value < UNLIMITED:
                by_path[field.name] = (declared[0], value)
        return by_path

    def with_sizes(self, changed: Mapping[str, int]) -> Self:
        """The same with other sizes, by path.

        Raises:
          KernelError: the kernel does not take such tiles.
        """
        values: dict[str, Any] = {}
        inner: dict[str, dict[str, int]] = {}
        for path, value in changed.items():
            name, _, rest = path.partition(".")
            if rest:
                inner.setdefault(name, {})[rest] = value
            else:
                values[name] = value
        for name, rest in inner.items():
            now = getattr(self, name)
            if isinstance(now, Tiles):
                values[name] = now.with_sizes(rest)
            else:
                values[name] = tuple(rest.get(str(i), old) for i, old in enumerate(now))
        return dataclasses.replace(self, **values)

    def with_block_size(self, block_size: int) -> Self:
        """The same with tiles of about `block_size`; memory is not planned for them, see `planned`."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            now, resize = getattr(self, field.name), field.metadata.get("block_size")
            if resize is not None:
                values[field.name] = resize(self, block_size)
            elif isinstance(now, Tiles):
                values[field.name] = now.with_block_size(block_size)
        return dataclasses.replace(self, **values)

    def planned(self, spec: OpSpec, target: Target) -> Self:
        """The same with memory planned for its tiles: a config that plans memory says how."""
        del spec, target
        return self

    def resized(self, block_size: int, spec: OpSpec, target: Target) -> Self:
        """The same with tiles of about `block_size`, memory planned for them; a config that knows what memory its tiles
        need takes smaller ones where tiles of `block_size` do not fit.
        """
        return self.with_block_size(block_size).planned(spec, target)

    def shortage(self, spec: OpSpec, target: Target) -> str | None:
        """What the tiles need beyond the memory of the target, in words; None where they fit or nothing is known."""
        del spec, target
        return None

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """The config that `dataclasses.asdict` wrote to a table.

        Raises:
          TypeError: a field is missing, or unknown.
        """
        parts = {field.name: field.metadata["part"] for field in dataclasses.fields(cls) if "part" in field.metadata}
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for name, kind in parts.items():
            if isinstance(fields.get(name), Mapping):
                fields[name] = kind.from_json(fields[name])
        return cls(**fields)
