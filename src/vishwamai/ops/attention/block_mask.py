"""A static mask in blocks: which blocks of the score matrix exist, and which positions inside those that are there in
part.

Everything here is numpy on the host, at trace time. Kernels cut the score matrix into tiles of their own; `tile_masks`
says for any such cut which tiles are empty, which are whole, and what the others look like, each different tile mask
once.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable

import numpy as np

from vishwamai.core.arguments import checked

EMPTY, WHOLE = 0, 1


@checked
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """Which keys every query may see, block by block; hashable by its contents.

    Attributes:
      block_size: (queries, keys) of a block.
      codes: int32 `[heads or 1, q_blocks, kv_blocks]`: 0 = empty, 1 = whole, n + 2 = as `patterns[n]` shows.
      patterns: bool `[count, block_q, block_kv]`, True = attend; the blocks that are there in part, each different one
        once.

    >>> blocks = BlockMask.from_function(lambda q, k: q >= k, 256, 256, (64, 64))
    >>> blocks
    BlockMask(64 x 64, heads 1, 4 x 4 blocks, live 10)
    >>> len(blocks.patterns), BlockMask(blocks.block_size, blocks.codes, blocks.patterns) == blocks
    (1, True)
    """

    block_size: tuple[int, int]
    codes: np.ndarray
    patterns: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.codes, self.patterns):
            array.setflags(write=False)
        parts = (str((self.block_size, self.codes.shape)).encode(), self.codes.tobytes(), self.patterns.tobytes())
        object.__setattr__(self, "_digest", hashlib.sha256(b"|".join(parts)).hexdigest())

    @property
    def digest(self) -> str:
        """Names the contents; equal masks have equal digests."""
        return self._digest  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMask) and other.digest == self.digest

    def __repr__(self) -> str:
        (rows, columns), (heads, q_blocks, kv_blocks) = self.block_size, self.codes.shape
        live = np.count_nonzero(self.codes)
        return f"BlockMask({rows} x {columns}, heads {heads}, {q_blocks} x {kv_blocks} blocks, live {live})"

    def to_text(self) -> str:
        """The mask as a text, for those who cannot pass arrays on.

        >>> blocks = BlockMask.from_blocks(np.eye(4, dtype=bool), (64, 64))
        >>> BlockMask.from_text(blocks.to_text()) == blocks
        True
        """
        return _described(self)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def from_text(text: str) -> BlockMask:
        """The mask that `to_text` wrote."""
        stored = np.load(io.BytesIO(base64.b64decode(text)))
        rows, columns = stored["size"].tolist()
        return BlockMask((rows, columns), stored["codes"], stored["patterns"])

    @property
    def heads(self) -> int:
        """Heads with a mask of their own; 1 where all share it."""
        return self.codes.shape[0]

    @classmethod
    def from_blocks(cls, live: np.ndarray, block_size: tuple[int, int]) -> BlockMask:
        """From bool `[q_blocks, kv_blocks]` or `[heads, q_blocks, kv_blocks]`: every block is empty or whole."""
        codes = np.asarray(live, np.int32).reshape((-1, *np.shape(live)[-2:]))
        if (codes == codes[:1]).all():
            codes = codes[:1]
        return cls(block_size, np.ascontiguousarray(codes), np.zeros((0, *block_size), bool))

    @classmethod
    def from_function(
        cls, function: Callable[[np.ndarray, np.ndarray], object], q_len: int, kv_len: int, block_size: tuple[int, int]
    ) -> BlockMask:
        """From `function(q_index [rows, 1], kv_index [1, columns]) -> bool [rows, columns]`, called on the host for one
        row of blocks at a time.
        """
        block_q, block_kv = block_size
        q_blocks, kv_blocks = -(-q_len // block_q), -(-kv_len // block_kv)
        codes = np.zeros((1, q_blocks, kv_blocks), np.int32)
        numbers: dict[bytes, int] = {}
        # Past an end the last position stands for what is not there, so that a block that is whole up to it stays
        # whole.
        columns = np.minimum(np.arange(kv_blocks * block_kv), kv_len - 1)[None, :]
        for i in range(q_blocks):
            rows = np.minimum(np.arange(i * block_q, (i + 1) * block_q), q_len - 1)[:, None]
            seen = np.broadcast_to(np.asarray(function(rows, columns), bool), (block_q, columns.size))
            cut = seen.reshape(block_q, kv_blocks, block_kv).transpose(1, 0, 2)
            codes[0, i] = cut.all((1, 2))
            for j in np.flatnonzero(cut.any((1, 2)) & (codes[0, i] == EMPTY)):
                codes[0, i, j] = 2 + numbers.setdefault(cut[j].tobytes(), len(numbers))
        patterns = [np.frombuffer(bits, bool).reshape(block_size) for bits in numbers]
        return cls(block_size, codes, np.array(patterns, bool).reshape(-1, *block_size))

    def part(self, rows: range, columns: range) -> BlockMask:
        """The mask of some queries and some keys, both of whole blocks; equal parts of a mask are equal."""
        (block_q, block_kv), codes = self.block_size, self.codes
        codes = codes[
            :, rows.start // block_q : rows.stop // block_q, columns.start // block_kv : columns.stop // block_kv
        ]
        used = np.unique(codes[codes > WHOLE])
        numbers = np.arange(len(self.patterns) + 2, dtype=np.int32)
        numbers[used] = np.arange(len(used)) + 2
        codes = numbers[codes]
        if (codes == codes[:1]).all():
            codes = codes[:1]
        return BlockMask(self.block_size, np.ascontiguousarray(codes), np.ascontiguousarray(self.patterns[used - 2]))

    def positions(self, q_len: int, kv_len: int) -> np.ndarray:
        """The mask of every position, bool `[heads or 1, q_len, kv_len]`."""
        block_q, block_kv = self.block_size
        heads, q_blocks, kv_blocks = self.codes.shape
        kinds = np.concatenate(
            [np.zeros((1, *self.block_size), bool), np.ones((1, *self.block_size), bool), self.patterns]
        )
        seen = np.zeros((heads, q_len, kv_len), bool)
        for i in range(q_blocks):
            row = kinds[self.codes[:, i]].transpose(0, 2, 1, 3).reshape(heads, block_q, kv_blocks * block_kv)
            seen[:, i * block_q : (i + 1) * block_q] = row[:, : q_len - i * block_q, :kv_len]
        return seen

    def columns(self, kv_len: int) -> np.ndarray:
        """Which keys some block shows to some query, bool `[heads or 1, kv_len]`."""
        size = self.block_size[1]
        kinds = np.concatenate([np.zeros((1, size), bool), np.ones((1, size), bool), np.any(self.patterns, axis=1)])
        visible = np.any(kinds[self.codes], axis=1)  # [heads, kv_blocks, block_kv]
        block = np.minimum(np.arange(kv_len) // size, visible.shape[1] - 1)
        return visible[:, block, np.minimum(np.arange(kv_len) - block * size, size - 1)]


@functools.lru_cache(maxsize=64)
def _described(mask: BlockMask) -> str:
    packed = io.BytesIO()
    np.savez_compressed(packed, size=mask.block_size, codes=mask.codes, patterns=mask.patterns)
    return base64.b64encode(packed.getvalue()).decode()


@functools.lru_cache(maxsize=64)
def visible_pairs(mask: BlockMask, q_len: int, kv_len: int, low: int | None, high: int | None) -> int:
    """(query, key) pairs that the mask and the band leave, summed over the mask's heads."""
    block_q, block_kv = mask.block_size
    _, q_blocks, kv_blocks = mask.codes.shape
    total = 0
    firsts = np.arange(kv_blocks) * block_kv
    for i in range(q_blocks):
        rows = np.arange(i * block_q, min((i + 1) * block_q, q_len))[:, None]
        start = firsts if low is None else np.maximum(firsts, rows + low)
        stop = np.minimum(firsts + block_kv, kv_len)
        stop = stop if high is None else np.minimum(stop, rows + high + 1)
        inside = np.broadcast_to(np.maximum(0, stop - start), (rows.size, kv_blocks)).sum(0)  # of each block of the row
        codes = mask.codes[:, i]
        total += int((inside * (codes == WHOLE)).sum())
        for head, j in np.argwhere(codes > WHOLE):
            columns = np.arange(j * block_kv, min((j + 1) * block_kv, kv_len))[None, :]
            seen = mask.patterns[codes[head, j] - 2][: rows.size, : columns.size]
            if low is not None:
                seen = seen & (columns - rows >= low)
            if high is not None:
                seen = seen & (columns - rows <= high)
            total += int(np.count_nonzero(seen))
    return total


@dataclasses.dataclass(frozen=True, eq=False)
class TileMasks:
    """A block mask seen through a cut of the score matrix into tiles.

    Attributes:
      ids: int32 `[heads or 1, q_tiles, kv_tiles]`: -1 = empty, 0 = whole, n = as `patterns[n]` shows.
      patterns: bool `[count + 1, block_q, block_kv]`; the first is all True.
    """

    ids: np.ndarray
    patterns: np.ndarray

    @property
    def partial(self) -> bool:
        """Whether any tile is there in part."""
        return len(self.patterns) > 1


@functools.lru_cache(maxsize=128)
def tile_masks(mask: BlockMask, block_q: int, block_kv: int, q_tiles: int, kv_tiles: int) -> TileMasks:
    """The tiles of `block_q` queries by `block_kv` keys; past the mask's end its last block goes on."""
    heads, q_blocks, kv_blocks = mask.codes.shape
    size_q, size_kv = mask.block_size
    rows, columns = np.arange(block_q)[:, None], np.arange(block_kv)[None, :]

    def span(tile: int, tile_size: int, size: int, count: int) -> tuple[int, int, int]:
        """Blocks [first, last] under a tile, and where in the first it starts."""
        first = min(tile * tile_size // size, count - 1)
        last = min(((tile + 1) * tile_size - 1) // size, count - 1)
        return first, last, tile * tile_size - first * size

    def tile_mask(under: np.ndarray, row: int, column: int) -> np.ndarray:
        i, j = (
            np.minimum((rows + row) // size_q, len(under) - 1),
            np.minimum((columns + column) // size_kv, under.shape[1] - 1),
        )
        codes = under[i, j]
        seen = codes == WHOLE
        if (under > WHOLE).any():
            offsets = (
                np.minimum(rows + row - i * size_q, size_q - 1),
                np.minimum(columns + column - j * size_kv, size_kv - 1),
            )
            seen = np.where(codes > WHOLE, mask.patterns[np.maximum(codes - 2, 0), offsets[0], offsets[1]], seen)
        return seen

    ids = np.full((heads, q_tiles, kv_tiles), -1, np.int32)
    patterns = [np.ones((block_q, block_kv), bool)]
    numbers: dict[bytes, int] = {patterns[0].tobytes(): 0, np.zeros((block_q, block_kv), bool).tobytes(): -1}
    seen_before: dict[object, int] = {}
    across = [span(j, block_kv, size_kv, kv_blocks) for j in range(kv_tiles)]
    for i in range(q_tiles):
        top, bottom, row = span(i, block_q, size_q, q_blocks)
        strip = mask.codes[:, top : bottom + 1]
        for j, (left, right, column) in enumerate(across):
            under_all = strip[:, :, left : right + 1]
            if not under_all.any():
                continue
            for head in range(heads):
                under = under_all[head]
                key = (under.tobytes(), under.shape, row, column)
                if key not in seen_before:
                    seen = tile_mask(under, row, column)
                    bits = seen.tobytes()
                    if bits not in numbers:
                        numbers[bits] = len(patterns)
                        patterns.append(seen)
                    seen_before[key] = numbers[bits]
                ids[head, i, j] = seen_before[key]
    return TileMasks(ids, np.array(patterns))


def live_tiles(mask: BlockMask, block_q: int, block_kv: int, q_tiles: int, kv_tiles: int) -> np.ndarray:
    """Which tiles lie over a block that is not empty, bool `[heads or 1, q_tiles, kv_tiles]`; quicker than
    `tile_masks`, to choose a cut by.
    """
    heads, q_blocks, kv_blocks = mask.codes.shape
    sums = np.zeros((heads, q_blocks + 1, kv_blocks + 1), np.int64)
    sums[:, 1:, 1:] = (mask.codes != EMPTY).cumsum(1).cumsum(2)

    def spans(tiles: int, tile: int, size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        n = np.arange(tiles)
        return np.minimum(n * tile // size, count - 1), np.minimum(((n + 1) * tile - 1) // size, count - 1) + 1

    top, bottom = (x[:, None] for x in spans(q_tiles, block_q, mask.block_size[0], q_blocks))
    left, right = spans(kv_tiles, block_kv, mask.block_size[1], kv_blocks)
    return (sums[:, bottom, right] - sums[:, top, right] - sums[:, bottom, left] + sums[:, top, left]) > 0
