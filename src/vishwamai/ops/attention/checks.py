"""The checks of an attention call, shared by all platforms: from the caller's arguments to an `AttentionSpec`, or to an error."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.attention.block_mask import BlockMask
from vishwamai.ops.attention.spec import AttentionSpec, Operands

NAME = "flash_attention"
LAYOUTS = {"bhsd": "[batch, heads, seq, head_dim]", "bshd": "[batch, seq, heads, head_dim]"}
ALIGNMENTS = ("top_left", "bottom_right")


def _fail(text: str) -> NoReturn:
    raise ShapeError(f"{NAME}: {text}")


def make_spec(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    causal: bool = False,
    causal_align: str = "top_left",
    window: Any = None,
    segment_ids: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    scale: Any = None,
    return_lse: bool = False,
    layout: str | None = None,
    precision: str = "default",
    block_mask: Any = None,
    block_size: Any = None,
) -> AttentionSpec:
    """Checks the caller's arguments (arrays of any framework, in the caller's layout) and describes them in the op's own layout.

    Raises:
      ShapeError: an argument is not legal or does not fit the others; the text names it, its value and the mend.
    """
    q, k, v = check_arrays(query, key, value, layout)
    batch, heads, q_len, qk_dim = q.shape
    kv_len = k.shape[2]
    if not isinstance(causal, (bool, np.bool_)):
        _fail(f"`causal` is {causal!r}; pass True or False.")
    if causal_align not in ALIGNMENTS:
        _fail(f"`causal_align` is {causal_align!r}; pass 'top_left' or 'bottom_right'.")
    window = check_window(window)
    scores = (batch, heads, q_len, kv_len)
    hint = _layout_hint(query, key, layout)
    q_ids, kv_ids = check_segments(segment_ids, batch, q_len, kv_len)
    operands = Operands(
        q,
        k,
        v,
        _check_broadcast("bias", bias, scores, hint),
        _check_broadcast("mask", mask, scores, hint),
        q_ids,
        kv_ids,
        _check_sinks(sinks, heads),
        _check_dropout(dropout_rate, dropout_key, batch, heads),
    )
    offset = kv_len - q_len if causal_align == "bottom_right" and (causal or window is not None) else 0
    return AttentionSpec(
        operands,
        bool(causal),
        offset,
        window,
        None
        if softcap is None
        else _positive("softcap", softcap, "the bound of the logits, such as 50.0, or None for no cap"),
        1.0 / math.sqrt(qk_dim) if scale is None else _number("scale", scale, "a number, or None for 1/sqrt(head_dim)"),
        float(dropout_rate),
        bool(return_lse),
        precision,
        check_blocks(block_mask, block_size, heads, q_len, kv_len),
    )


# --- query, key, value -----------------------------------------------------------------------------------------------------------------------------


def check_arrays(query: Any, key: Any, value: Any, layout: str | None) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
    """Checks the three arrays against each other and returns them as `[batch, heads, seq, head_dim]`."""
    if layout not in (None, *LAYOUTS):
        _fail(f"`layout` is {layout!r}; pass 'bhsd' ({LAYOUTS['bhsd']}) or 'bshd' ({LAYOUTS['bshd']}).")
    arrays = {"query": array_spec(query), "key": array_spec(key), "value": array_spec(value)}
    for name, array in arrays.items():
        if len(array.shape) != 4:
            _fail(f"`{name}` has shape {array.shape}; pass four axes, {LAYOUTS[layout or 'bhsd']}.")
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
            _fail(f"`{name}` has dtype {array.dtype.name}; pass bfloat16, float16, float32 or float64.")
        if array.dtype != arrays["query"].dtype:
            _fail(
                f"`{name}` has dtype {array.dtype.name}, but `query` has {arrays['query'].dtype.name}; cast them to one dtype."
            )
    q, k, v = arrays.values() if layout != "bshd" else map(_swapped, arrays.values())
    hint = _layout_hint(query, key, layout)
    if k.shape[0] != q.shape[0]:
        _fail(f"`key` has batch {k.shape[0]}, but `query` has {q.shape[0]} ({_both(query, key)}); pass the same batch.")
    if k.shape[3] != q.shape[3]:
        _fail(
            f"`key` has head_dim {k.shape[3]}, but `query` has {q.shape[3]} ({_both(query, key)}); pass the same head_dim."
        )
    if v.shape[:3] != k.shape[:3]:
        _fail(
            f"`value` has shape {tuple(value.shape)}, but `key` has {tuple(key.shape)}; pass a `value` with the key's batch, heads and "
            "length (its head_dim may differ)."
        )
    if not q.shape[1] or not k.shape[1]:
        _fail(
            f"`query` has {q.shape[1]} heads and `key` {k.shape[1]} ({_both(query, key)}); pass at least one head of each."
        )
    if not q.shape[3] or not v.shape[3]:
        _fail(f"head_dim is {q.shape[3]} in `query` and {v.shape[3]} in `value`; pass at least one element.")
    if q.shape[1] % k.shape[1]:
        _fail(
            f"`query` has {q.shape[1]} heads, which is no multiple of the {k.shape[1]} heads of `key` ({_both(query, key)}); pass a `key` and "
            f"`value` whose heads divide the query's.{hint}"
        )
    if layout is None and _looks_swapped(q.shape, k.shape):
        _fail(
            f"the sizes look swapped: `query` {tuple(query.shape)} and `key` {tuple(key.shape)} read as {q.shape[1]} heads over sequences of "
            f"{q.shape[2]} and {k.shape[2]}, but would be grouped-query attention as {LAYOUTS['bshd']}; pass layout='bshd', or layout='bhsd' "
            "if they are meant as they stand."
        )
    return q, k, v


def _swapped(array: ArraySpec) -> ArraySpec:
    batch, seq, heads, dim = array.shape
    return ArraySpec((batch, heads, seq, dim), array.dtype)


def _both(query: Any, key: Any) -> str:
    return f"shapes {tuple(query.shape)} and {tuple(key.shape)}"


def _looks_swapped(q: Sequence[int], k: Sequence[int]) -> bool:
    """Equal "heads", more of them than any model has and far more than the sequences are long, and "lengths" that divide as grouped heads do."""
    return q[1] == k[1] >= 256 and q[1] >= 4 * q[2] and q[2] > k[2] > 0 and q[2] % k[2] == 0


def _layout_hint(query: Any, key: Any, layout: str | None) -> str:
    """A sentence for an error's end, where the other layout would make the query and the key agree."""
    if len(query.shape) != 4 or len(key.shape) != 4:
        return ""
    other = "bhsd" if layout == "bshd" else "bshd"
    axis = 1 if other == "bhsd" else 2
    heads, kv_heads = query.shape[axis], key.shape[axis]
    if kv_heads and heads % kv_heads == 0 and query.shape[3 - axis] >= heads:
        return f" The sizes would fit {LAYOUTS[other]}: if that is what they are, pass layout={other!r}."
    return ""


# --- masks, bias, segments, sinks, dropout ---------------------------------------------------------------------------------------------------------


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    """(left, right) as integers or None; None where both are unbounded."""
    if window is None:
        return None
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        _fail(
            f"`window` is {window!r}; pass a pair (left, right) of key counts, None for an unbounded side, such as (1023, 0)."
        )
    for side, width in zip(("left", "right"), window, strict=True):
        if width is not None and (isinstance(width, bool) or not isinstance(width, numbers.Integral) or width < 0):
            _fail(
                f"`window` is {tuple(window)}, and its {side} side is {width!r}; pass an integer of zero or more, or None for no bound."
            )
    left, right = (None if width is None else int(width) for width in window)
    return None if left is None and right is None else (left, right)


def _check_broadcast(name: str, array: Any, scores: tuple[int, ...], hint: str) -> ArraySpec | None:
    """`bias` or `mask` with its leading axes filled up to four."""
    if array is None:
        return None
    given = array_spec(array)
    if name == "mask" and given.dtype != jnp.bool_:
        _fail(
            f"`mask` has dtype {given.dtype.name}; pass bool (True = attend), or add numbers to the logits by `bias`."
        )
    if name == "bias" and (not jnp.issubdtype(given.dtype, jnp.floating) or given.dtype.itemsize < 2):
        mend = "pass it as `mask`" if given.dtype == jnp.bool_ else "pass a floating-point array"
        _fail(f"`bias` has dtype {given.dtype.name}; {mend}.")
    shape = (1,) * (4 - len(given.shape)) + given.shape
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, scores, strict=True)):
        _fail(
            f"`{name}` has shape {given.shape}, which does not broadcast to [batch, heads, q_len, kv_len] = {list(scores)}; pass a shape whose "
            f"axes, counted from the last, are those sizes or 1.{hint}"
        )
    return ArraySpec(shape, given.dtype)


def check_segments(segment_ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[ArraySpec | None, ArraySpec | None]:
    """Both id arrays as `[batch or 1, length]`, or (None, None)."""
    if segment_ids is None:
        return None, None
    if not isinstance(segment_ids, (tuple, list)) or len(segment_ids) != 2 or any(ids is None for ids in segment_ids):
        what = f"{len(segment_ids)} entries" if isinstance(segment_ids, (tuple, list)) else type(segment_ids).__name__
        _fail(
            f"`segment_ids` is {what}; pass a pair (q_ids, kv_ids) of integer arrays [batch, q_len] and [batch, kv_len]."
        )
    specs = []
    for name, ids, length in zip(("q_ids", "kv_ids"), map(array_spec, segment_ids), (q_len, kv_len), strict=True):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            _fail(f"`segment_ids` has {name} of dtype {ids.dtype.name}; pass integers.")
        shape = (1,) * (2 - len(ids.shape)) + ids.shape
        if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != length:
            _fail(
                f"`segment_ids` has {name} of shape {ids.shape}; pass ({batch}, {length}), or ({length},) to share them over the batch."
            )
        specs.append(ArraySpec(shape, jnp.dtype(jnp.int32)))
    return specs[0], specs[1]


def _fail_blocks(text: str) -> NoReturn:
    raise ShapeError(f"block_sparse_attention: {text}")


def check_blocks(block_mask: Any, block_size: Any, heads: int, q_len: int, kv_len: int) -> BlockMask | None:
    """The static block mask, from an array, a function or a `BlockMask`; None where there is none or nothing to mask."""
    if block_mask is None:
        return None
    sizes = (block_size, block_size) if block_size is None or isinstance(block_size, numbers.Integral) else block_size
    legal = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) == 2
    if not legal or any(
        n is not None and (isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1) for n in sizes
    ):
        _fail_blocks(
            f"`block_size` is {block_size!r}; pass a positive number of positions, or a pair (queries, keys) of them."
        )
    if isinstance(block_mask, BlockMask):
        if block_size is not None and tuple(sizes) != block_mask.block_size:
            _fail_blocks(
                f"`block_size` is {block_size}, but `block_mask` has blocks of {block_mask.block_size}; leave it out."
            )
        shape, mask, size = block_mask.codes.shape, block_mask, block_mask.block_size
    else:
        rows, columns = (128 if n is None else int(n) for n in sizes)
        size = rows, columns
        if isinstance(block_mask, Tracer):
            _fail_blocks(
                "`block_mask` is traced, and the blocks are part of the compiled program; pass a NumPy array or a function, or use "
                "flash_attention's `mask`."
            )
        if callable(block_mask):
            if 0 in (q_len, kv_len):
                return None
            with jax.ensure_compile_time_eval():  # so that the function may use jax.numpy, also inside jit
                mask = BlockMask.from_function(block_mask, q_len, kv_len, size)
            shape = mask.codes.shape
        else:
            array = np.asarray(block_mask)
            if array.dtype != np.bool_ or array.ndim not in (2, 3):
                _fail_blocks(
                    f"`block_mask` has dtype {array.dtype} and shape {array.shape}; pass bool [q_blocks, kv_blocks] or [heads, q_blocks, kv_blocks], "
                    "or a function of the indices."
                )
            shape, mask = (1, *array.shape)[-3:], None
            if 0 not in array.shape:
                mask = BlockMask.from_blocks(array, size)
    wanted = -(-q_len // size[0]), -(-kv_len // size[1])
    if tuple(shape[1:]) != wanted:
        _fail_blocks(
            f"`block_mask` has {shape[1]} x {shape[2]} blocks, but {q_len} queries and {kv_len} keys have {wanted[0]} x {wanted[1]} of `block_size` "
            f"{size}; pass one entry for each block."
        )
    if shape[0] not in (1, heads):
        _fail_blocks(
            f"`block_mask` has {shape[0]} heads, but `query` has {heads}; pass one mask for each head, or one for all."
        )
    return None if 0 in (q_len, kv_len) else mask


def _check_sinks(sinks: Any, heads: int) -> ArraySpec | None:
    if sinks is None:
        return None
    given = array_spec(sinks)
    if given.shape != (heads,):
        _fail(
            f"`sinks` has shape {given.shape}, but `query` has {heads} heads; pass one logit for each, shape ({heads},)."
        )
    if not jnp.issubdtype(given.dtype, jnp.floating) or given.dtype.itemsize < 2:
        _fail(f"`sinks` has dtype {given.dtype.name}; pass a floating-point array.")
    return ArraySpec((1, heads), given.dtype)


def check_rate(rate: Any) -> None:
    """Refuses what is no share of probabilities to drop."""
    if not _is_number(rate) or not 0 <= rate < 1:
        _fail(f"`dropout_rate` is {rate!r}; pass a number in [0, 1), such as 0.1.")


def _check_dropout(rate: Any, key: Any, batch: int, heads: int) -> ArraySpec | None:
    check_rate(rate)
    if not rate:
        return None
    if key is None:
        _fail(
            f"`dropout_rate` is {rate}, but `dropout_key` is None; pass a key, such as jax.random.key(0), or a rate of 0."
        )
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if tuple(key.shape) != (() if typed else (2,)) or not (typed or key.dtype == jnp.uint32):
        _fail(
            f"`dropout_key` has shape {tuple(key.shape)} and dtype {key.dtype}; pass one key: jax.random.key(0), or the uint32 data of "
            "jax.random.PRNGKey(0), shape (2,)."
        )
    return ArraySpec((batch, heads, 2), jnp.dtype(jnp.uint32))


# --- numbers ---------------------------------------------------------------------------------------------------------------------------------------


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _number(name: str, x: Any, mend: str) -> float:
    if not _is_number(x) or not math.isfinite(x):
        kind = "" if isinstance(x, (numbers.Real, str)) else f" of type {type(x).__name__}"
        _fail(f"`{name}` is {x!r}{kind}; pass {mend} (a Python number: it is part of the compiled program).")
    return float(x)


def _positive(name: str, x: Any, mend: str) -> float:
    if _number(name, x, mend) <= 0:
        _fail(f"`{name}` is {x!r}; pass {mend}, more than 0.")
    return float(x)
