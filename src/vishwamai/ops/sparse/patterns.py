"""Block masks of the known sparse attention patterns: bool `[q_blocks, kv_blocks]`, True = attend, in blocks of any
size.

They are NumPy arrays, so they combine with `|` and `&`, and serve `block_sparse_attention` as they are and
`block_sparse_matmul` by `block_indices`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vishwamai.core.errors import ShapeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def _counts(name: str, blocks: int, kv_blocks: int | None, **counts: int) -> tuple[int, int]:
    for label, count in {"blocks": blocks, "kv_blocks": blocks if kv_blocks is None else kv_blocks, **counts}.items():
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise ShapeError(f"{name}: `{label}` is {count!r}; pass a number of blocks, zero or more.")
    return int(blocks), int(blocks if kv_blocks is None else kv_blocks)


def local(
    blocks: int, left: int, right: int = 0, kv_blocks: int | None = None
) -> Bool[np.ndarray, "q_blocks kv_blocks"]:
    """A sliding window: query block i sees key blocks i - left ... i + right.

    Beltagy, Peters, Cohan, "Longformer" (2020).

    >>> local(4, 1).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    q, kv = _counts("local", blocks, kv_blocks, left=left, right=right)
    distance = np.arange(kv)[None, :] - np.arange(q)[:, None]
    return (distance >= -left) & (distance <= right)


def strided(
    blocks: int, stride: int, causal: bool = True, kv_blocks: int | None = None
) -> Bool[np.ndarray, "q_blocks kv_blocks"]:
    """The last `stride` blocks and, before them, every block that is the last of its stride.

    The "fixed" pattern of Child et al., "Generating Long Sequences with Sparse Transformers" (2019), in blocks.

    Args:
      stride: blocks between two that everybody after them sees; 1 or more.
      causal: see no block after one's own; else the same to both sides.

    >>> strided(6, 3).astype(int).tolist()[5]
    [0, 0, 1, 1, 1, 1]
    """
    q, kv = _counts("strided", blocks, kv_blocks, stride=stride)
    if stride < 1:
        raise ShapeError(f"strided: `stride` is {stride}; pass 1 block or more.")
    i, j = np.arange(q)[:, None], np.arange(kv)[None, :]
    near = np.abs(i - j) < stride
    seen = near | (j % stride == stride - 1)
    return seen & (j <= i) if causal else seen


def bigbird(
    blocks: int,
    window: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    *,
    seed: int = 0,
    heads: int | None = None,
    kv_blocks: int | None = None,
) -> Bool[np.ndarray, "*heads q_blocks kv_blocks"]:
    """A window around the diagonal, some global blocks in front that see and are seen by all, and some random blocks
    for every query block.

    Zaheer et al., "Big Bird: Transformers for Longer Sequences" (2020).

    Args:
      window: blocks of the window, odd: the own block and (window - 1) / 2 to each side.
      global_blocks: leading blocks that are rows and columns without a gap.
      random_blocks: number for every query block, sampled from those that it would not see.
      seed: integer seed of the random blocks.
      heads: draw them for each head on its own: `[heads, q_blocks, kv_blocks]`; None for one mask without that axis.

    >>> bigbird(16).sum(1).tolist()[1:4]
    [6, 7, 7]
    >>> bigbird(16, heads=4).shape
    (4, 16, 16)
    """
    q, kv = _counts("bigbird", blocks, kv_blocks, global_blocks=global_blocks, random_blocks=random_blocks)
    if window % 2 != 1 or window < 1:
        raise ShapeError(f"bigbird: `window` is {window}; pass an odd number of blocks, such as 3.")
    base = local(q, window // 2, window // 2, kv)
    base[:global_blocks, :] = True
    base[:, :global_blocks] = True
    rng = np.random.default_rng(seed)
    masks = []
    for _ in range(1 if heads is None else heads):
        mask = base.copy()
        for row in mask:
            rest = np.flatnonzero(~row)
            row[rng.permutation(rest)[:random_blocks]] = True
        masks.append(mask)
    return masks[0] if heads is None else np.stack(masks)


def document(
    lengths: object, block_size: int, causal: bool = False, kv_block_size: int | None = None
) -> Bool[np.ndarray, "q_blocks kv_blocks"]:
    """Packed documents: the blocks in which a query can meet a key of its own document.

    Blocks at the ends of documents hold two of them: pass `segment_ids` too, or start documents at multiples of the
    block size, where they must not see one another.

    Args:
      lengths: tokens of each document, in order.
      block_size: tokens of a block of queries; `kv_block_size`: of keys, the same if None.

    >>> document([256, 128], 128).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.ndim != 1 or (lengths < 0).any():
        raise ShapeError(f"document: `lengths` is {lengths.tolist()}; pass the number of tokens of each document.")
    kv_size = block_size if kv_block_size is None else kv_block_size
    _counts("document", 0, None, block_size=block_size, kv_block_size=kv_size)
    if min(block_size, kv_size) < 1:
        raise ShapeError(f"document: `block_size` is {block_size} and {kv_size} for keys; pass 1 token or more.")
    ids = np.repeat(np.arange(len(lengths)), lengths)
    total = len(ids)

    def ends(size: int) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(0, total, size)
        return ids[starts], ids[np.minimum(starts + size, total) - 1]

    (q_first, q_last), (kv_first, kv_last) = ends(block_size), ends(kv_size)
    mask = (q_first[:, None] <= kv_last[None, :]) & (kv_first[None, :] <= q_last[:, None])
    if causal:
        last_row = np.minimum((np.arange(len(q_first)) + 1) * block_size, total) - 1
        mask &= np.arange(len(kv_first))[None, :] * kv_size <= last_row[:, None]
    return mask


def block_indices(mask: Bool[np.ndarray, "rows columns"]) -> Int[np.ndarray, "blocks 2"]:
    """(block row, block column) of every True, rows first: the `indices` of `block_sparse_matmul`.

    >>> block_indices(local(3, 1)).tolist()
    [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]
    """
    array = np.asarray(mask)
    if array.ndim != 2 or array.dtype != np.bool_:
        raise ShapeError(
            f"block_indices: `mask` has shape {array.shape} and dtype {array.dtype}; pass bool [rows, columns]."
        )
    return np.argwhere(array).astype(np.int32)
