"""Where attention's Triton kernels read and write: rows of heads, packed sequences, and the blocks that a query block
or a segment sees.
"""

import triton
import triton.language as tl

from vishwamai.ops.attention import places
from vishwamai.ops.attention.gpu_arguments import Extents, Rows, Terms, Walk

NOWHERE = tl.constexpr(places.NOWHERE)


@triton.jit
def source_of(rows: Rows, batch, heads, length, CUT: tl.constexpr):
    """What `load_rows` reads `[batch, heads, length, DIM]` through: a tensor descriptor, or the pointer itself."""
    if CUT.TMA:
        return tl.make_tensor_descriptor(
            rows.ptr,
            [batch, heads, length, CUT.DIM],
            [rows.batch, rows.head, rows.seq, 1],
            # The copy engine fills what lies outside with zeros, so its loads need no mask.
            [1, 1, CUT.ROWS, CUT.COLUMNS],
        )
    else:
        return rows.ptr


@triton.jit
def load_rows(source, rows: Rows, b, h, first, length, CUT: tl.constexpr):
    """Rows `first ...` of a batch element's head, `[ROWS, COLUMNS]`; zero beyond `length` and beyond DIM."""
    if CUT.TMA:
        return source.load([b, h, first, 0]).reshape(CUT.ROWS, CUT.COLUMNS)  # the box has leading axes of 1
    else:
        row = first + tl.arange(0, CUT.ROWS)
        column = tl.arange(0, CUT.COLUMNS)
        base = b.to(tl.int64) * rows.batch + h.to(tl.int64) * rows.head  # a batch's offset passes 2^31
        offsets = base + row.to(tl.int64)[:, None] * rows.seq + column[None, :]
        return tl.load(source + offsets, mask=(row < length)[:, None] & (column < CUT.DIM)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, x, b, h, heads, first, length, CUT: tl.constexpr, SEQ_FIRST: tl.constexpr):
    """Writes `[ROWS, COLUMNS]` to rows `first ...` of a head of `[batch, heads, length, DIM]`, or of
    `[batch, length, heads, DIM]` with SEQ_FIRST.
    """
    D: tl.constexpr = CUT.DIM
    row = first + tl.arange(0, CUT.ROWS)
    column = tl.arange(0, CUT.COLUMNS)
    if SEQ_FIRST:
        offsets = (b.to(tl.int64) * length + row)[:, None] * (heads * D) + h * D + column[None, :]
    else:
        offsets = ((b.to(tl.int64) * heads + h) * length + row)[:, None] * D + column[None, :]
    tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=(row < length)[:, None] & (column < D)[None, :])


@triton.jit
def shifted(rows: Rows, first):
    """The rows from position `first` on."""
    return Rows(rows.ptr + first.to(tl.int64) * rows.seq, rows.batch, rows.head, rows.seq)


@triton.jit
def of_sequence(sizes: Extents, q_len, kv_len, BOTTOM_RIGHT: tl.constexpr):
    """The sizes of one packed sequence."""
    # the band is stated for equal lengths: the last query sees the last key
    shift = kv_len - q_len if BOTTOM_RIGHT else 0
    return Extents(
        sizes.batch, sizes.q_heads, sizes.kv_heads, q_len, kv_len, sizes.q_total, sizes.kv_total,
        sizes.low + shift, sizes.high + shift, sizes.offset + shift,
    )  # fmt: skip


@triton.jit
def packed(starts_ptr, b, batch, total):
    """(first position, length) of packed sequence b; for b == batch, of what lies between the last one's end and
    `total`.
    """
    first = tl.load(starts_ptr + b)
    end = tl.load(starts_ptr + tl.minimum(b + 1, batch))  # starts has batch + 1 entries: none is read behind them
    return first, tl.maximum(tl.where(b == batch, total, end) - first, 0)


@triton.jit
def fill_behind(ptr, h, heads, first, length, step, value, CUT: tl.constexpr):
    """Fills rows `first + step, first + 2 step ...` of a packed sequence, which no program computes, with `value`."""
    ROWS: tl.constexpr = CUT.ROWS
    COLUMNS: tl.constexpr = CUT.COLUMNS
    x = tl.zeros([ROWS, COLUMNS], tl.float32) + value  # value is a tensor: `full` takes constants alone
    for row in tl.range(first + step, length, step):
        store_rows(ptr, x, h * 0, h, heads, row, length, CUT, True)


@triton.jit
def fill_statistics(lse_ptr, first, length, step, ROWS: tl.constexpr):
    """The same for the logsumexp: -inf."""
    for row in tl.range(first + step, length, step):
        positions = row + tl.arange(0, ROWS)
        tl.store(lse_ptr + positions, tl.full([ROWS], float("-inf"), tl.float32), mask=positions < length)


@triton.jit
def behind(b, batch):
    """What such rows hold: 0 behind the last sequence; NaN in one that is longer than the longest was said to be, so
    that it shows.
    """
    return tl.where(b == batch, 0.0, float("nan"))


@triton.jit
def segment_span(own_ptr, positions, own_len, other_ptr, other_len, SPAN: tl.constexpr = 2048):
    """(start, stop): outside of these positions of the other side no segment id lies between the least and the largest
    of positions `positions`.

    Where segments lie one behind the other, this leaves out all that is not of the block's own segments.
    """
    inside = positions < own_len
    ids = tl.load(own_ptr + positions, mask=inside, other=0)
    least = tl.min(tl.where(inside, ids, 2147483647), 0)  # rows past the end bound nothing
    largest = tl.max(tl.where(inside, ids, -2147483648), 0)
    # Bounds lane by lane: one reduction at the end instead of one for each stretch.
    starts = tl.full([SPAN], 2147483647, tl.int32)
    stops = tl.zeros([SPAN], tl.int32)
    for n in tl.range(0, other_len, SPAN):  # ids alone are read, 4 bytes a position: cheap beside the tiles
        offsets = n + tl.arange(0, SPAN)
        other_ids = tl.load(other_ptr + offsets, mask=offsets < other_len, other=0)
        near = (offsets < other_len) & (other_ids >= least) & (other_ids <= largest)
        starts = tl.minimum(starts, tl.where(near, offsets, 2147483647))
        stops = tl.maximum(stops, tl.where(near, offsets + 1, 0))
    return tl.minimum(tl.min(starts, 0), other_len), tl.max(stops, 0)  # nothing near: start = other_len, stop = 0


@triton.jit
def position_span(
    positions_ptr,
    q_len,
    column,
    sizes: Extents,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPAN: tl.constexpr = 2048,
):
    """(start, stop, largest): the rows outside of start ... stop see none of the keys `column ...`; the largest
    position of all.
    """
    starts = tl.full([SPAN], 2147483647, tl.int32)
    stops = tl.zeros([SPAN], tl.int32)
    most = tl.full([SPAN], -2147483648, tl.int32)
    for n in tl.range(0, q_len, SPAN):
        offsets = n + tl.arange(0, SPAN)
        near = offsets < q_len
        # the least int32 never is the largest
        position = tl.load(positions_ptr + offsets, mask=near, other=-2147483648)
        most = tl.maximum(most, position)
        if HIGH:
            near = near & (position >= column - sizes.high)
        if LOW:
            near = near & (position <= column + COLUMNS - 1 - sizes.low)
        starts = tl.minimum(starts, tl.where(near, offsets, 2147483647))
        stops = tl.maximum(stops, tl.where(near, offsets + 1, 0))
    return tl.minimum(tl.min(starts, 0), q_len), tl.max(stops, 0), tl.max(most, 0)


@triton.jit
def key_blocks(
    row,
    b,
    sizes: Extents,
    terms: Terms,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """(lo, full_lo, full_hi, hi): keys [lo, full_lo) and [full_hi, hi) are partly hidden from the rows row ...,
    [full_lo, full_hi) are in reach of all.
    """
    first = row
    last = row + ROWS - 1
    end = tl.minimum(row + ROWS, sizes.q_len)
    if terms.positions_ptr is not None:
        rows = row + tl.arange(0, ROWS)
        positions = tl.load(
            terms.positions_ptr + b.to(tl.int64) * terms.positions_b + rows, mask=rows < sizes.q_len, other=0
        )
        first = tl.min(tl.where(rows < sizes.q_len, positions, 2147483647), 0)
        last = tl.max(tl.where(rows < sizes.q_len, positions, -2147483648), 0)
        end = last + 1  # positions may repeat or jump: bounds come from their extremes
    # A tensor of int32, as the branches below assign: Triton gives a variable one type.
    lo = 0 * row
    hi = lo + sizes.kv_len
    full_lo = lo
    full_hi = lo + sizes.kv_len // COLUMNS * COLUMNS  # a ragged last block is partial
    if HIGH:
        hi = tl.maximum(0, tl.minimum(sizes.kv_len, end + sizes.high))
        # the first row sees the fewest keys
        full_hi = tl.minimum(full_hi, tl.maximum(first + sizes.high + 1, 0) // COLUMNS * COLUMNS)
    if LOW:
        lo = tl.maximum(0, first + sizes.low) // COLUMNS * COLUMNS
        full_lo = tl.cdiv(tl.maximum(0, last + sizes.low), COLUMNS) * COLUMNS  # the last row's window begins last
    # the two partial ranges must not overlap: no key counts twice
    full_lo = tl.maximum(tl.minimum(full_lo, full_hi), lo)
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi


@triton.jit
def place(walk: Walk, n, SIZE: tl.constexpr):
    """Where the block of step n begins: at n, or, of a walk (see `gpu_blocks.py`), where its n-th pair says, in blocks
    of SIZE.
    """
    if walk.ptr is not None:
        return tl.load(walk.ptr + 2 * n) * SIZE
    else:
        return n


@triton.jit
def masked_logits(s, number, patterns_ptr, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The logits s of a tile, -inf where its pattern hides them; query i and key j of the tile broadcast to s, in
    either order.
    """
    offsets = number.to(tl.int64) * (ROWS * COLUMNS) + i * COLUMNS + j
    seen = tl.load(
        patterns_ptr + offsets, mask=(number > 0) & (i + j >= 0), other=1
    )  # pattern 0 is a whole tile, and not read
    return tl.where(seen != 0, s, float("-inf"))
