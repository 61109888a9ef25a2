"""Where attention's Triton kernels read and write: rows of heads, packed sequences, and the blocks that a query block or a segment sees."""

import triton
import triton.language as tl


@triton.jit
def rows_of(
    ptr,
    batch,
    heads,
    length,
    stride_b,
    stride_h,
    stride_s,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """What `load_rows` reads `[batch, heads, length, D]` of any strides through: a tensor descriptor, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(
            ptr, [batch, heads, length, D], [stride_b, stride_h, stride_s, 1], [1, 1, ROWS, COLUMNS]
        )
    else:
        return ptr


@triton.jit
def load_rows(
    source,
    b,
    h,
    first,
    length,
    stride_b,
    stride_h,
    stride_s,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows `first ...` of a batch element's head, `[ROWS, COLUMNS]`; zero beyond `length` and beyond D."""
    if TMA:
        return source.load([b, h, first, 0]).reshape(ROWS, COLUMNS)
    else:
        row = first + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        base = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        at = base + row.to(tl.int64)[:, None] * stride_s + column[None, :]
        return tl.load(source + at, mask=(row < length)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def store_rows(
    ptr,
    x,
    b,
    h,
    heads,
    first,
    length,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQ_FIRST: tl.constexpr,
):
    """Writes `[ROWS, COLUMNS]` to rows `first ...` of a head of `[batch, heads, length, D]`, or of `[batch, length, heads, D]` with SEQ_FIRST."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    if SEQ_FIRST:
        at = (b.to(tl.int64) * length + row)[:, None] * (heads * D) + h * D + column[None, :]
    else:
        at = ((b.to(tl.int64) * heads + h) * length + row)[:, None] * D + column[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=(row < length)[:, None] & (column < D)[None, :])


@triton.jit
def packed(starts_ptr, b, batch, total):
    """(first position, length) of packed sequence b; for b == batch, of what lies between the last one's end and `total`."""
    first = tl.load(starts_ptr + b)
    end = tl.load(starts_ptr + tl.minimum(b + 1, batch))
    return first, tl.maximum(tl.where(b == batch, total, end) - first, 0)


@triton.jit
def fill_behind(ptr, h, heads, first, length, step, value, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Fills rows `first + step, first + 2 step ...` of a packed sequence, which no program computes, with `value`."""
    x = tl.zeros([ROWS, COLUMNS], tl.float32) + value
    for row in tl.range(first + step, length, step):
        store_rows(ptr, x, h * 0, h, heads, row, length, D, ROWS, COLUMNS, True)


@triton.jit
def behind(b, batch):
    """What such rows hold: 0 behind the last sequence; NaN in one that is longer than the longest was said to be, so that it shows."""
    return tl.where(b == batch, 0.0, float("nan"))


@triton.jit
def segment_span(own_ptr, own, own_len, other_ptr, other_len, SPAN: tl.constexpr):
    """(start, stop): outside of these positions of the other side no segment id lies between the least and the largest of positions `own`.

    Where segments lie one behind the other, this leaves out all that is not of the block's own segments.
    """
    inside = own < own_len
    ids = tl.load(own_ptr + own, mask=inside, other=0)
    least = tl.min(tl.where(inside, ids, 2147483647), 0)
    largest = tl.max(tl.where(inside, ids, -2147483648), 0)
    starts = tl.full([SPAN], 2147483647, tl.int32)
    stops = tl.zeros([SPAN], tl.int32)
    for n in tl.range(0, other_len, SPAN):
        at = n + tl.arange(0, SPAN)
        other = tl.load(other_ptr + at, mask=at < other_len, other=0)
        near = (at < other_len) & (other >= least) & (other <= largest)
        starts = tl.minimum(starts, tl.where(near, at, 2147483647))
        stops = tl.maximum(stops, tl.where(near, at + 1, 0))
    return tl.minimum(tl.min(starts, 0), other_len), tl.max(stops, 0)


@triton.jit
def key_blocks(
    row, q_len, kv_len, low, high, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """(lo, full_lo, full_hi, hi): keys [lo, full_lo) and [full_hi, hi) are partly hidden from the rows row ..., [full_lo, full_hi) are in reach of all."""
    lo = 0 * row
    hi = lo + kv_len
    full_lo = lo
    full_hi = lo + kv_len // COLUMNS * COLUMNS
    if HIGH:
        hi = tl.maximum(0, tl.minimum(kv_len, tl.minimum(row + ROWS, q_len) + high))
        full_hi = tl.minimum(full_hi, tl.maximum(row + high + 1, 0) // COLUMNS * COLUMNS)
    if LOW:
        lo = tl.maximum(0, row + low) // COLUMNS * COLUMNS
        full_lo = tl.cdiv(tl.maximum(0, row + ROWS - 1 + low), COLUMNS) * COLUMNS
    full_lo = tl.maximum(tl.minimum(full_lo, full_hi), lo)
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi


@triton.jit
def place(walk_ptr, n, SIZE: tl.constexpr):
    """Where the block of step n begins: at n, or, of a walk (see `gpu_blocks.py`), where its n-th pair says, in blocks of SIZE."""
    if walk_ptr is not None:
        return tl.load(walk_ptr + 2 * n) * SIZE
    else:
        return n


@triton.jit
def shown(s, number, patterns_ptr, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The logits s of a tile, -inf where its pattern hides them; query i and key j of the tile broadcast to s, in either order."""
    at = number.to(tl.int64) * (ROWS * COLUMNS) + i * COLUMNS + j
    seen = tl.load(
        patterns_ptr + at, mask=(number > 0) & (i + j >= 0), other=1
    )  # pattern 0 is a whole tile, and not read
    return tl.where(seen != 0, s, float("-inf"))
