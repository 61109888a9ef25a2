"""The checks of an attention call, shared by all platforms: from the caller's arguments to an `AttentionSpec`, or to an
error.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.core.precision import FLOATS
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import ArraySpec
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.block_mask import BlockMask
from vishwamai.ops.attention.spec import BSHD, SIGNATURE, AttentionSpec, Operands

NAME = "flash_attention"
LAYOUTS = {"bhsd": "[batch, heads, seq, head_dim]", "bshd": "[batch, seq, heads, head_dim]"}
ALIGNMENTS = ("top_left", "bottom_right")


def _fail(text: str) -> NoReturn:
    raise ShapeError(f"{NAME}: {text}")


class Options(NamedTuple):
    """What a caller of attention may state besides the arrays, as `flash_attention` documents it."""

    causal: Any = False
    causal_align: Any = "top_left"
    window: Any = None
    softcap: Any = None
    bias_after_softcap: Any = False
    dropout_rate: Any = 0.0
    scale: Any = None
    return_lse: Any = False
    layout: Any = None
    q_offset: int | None = None


@described
def make_spec(arrays: Operands, precision: str, *options: Any) -> AttentionSpec:
    """Checks the caller's arrays (their `ArraySpec`s, in the caller's layout, without the seeds of dropout) and the
    `Options`, and describes them in the op's own layout.

    Raises:
      ShapeError: an argument is not legal or does not fit the others; the text names it, its value and the fix.
    """
    call_options = Options(*options)
    signature = signature_of(call_options.layout)
    check_arrays(arrays, call_options.layout)
    if not isinstance(call_options.causal, (bool, np.bool_)):
        _fail(f"`causal` is {call_options.causal!r}; pass True or False.")
    if not isinstance(call_options.bias_after_softcap, (bool, np.bool_)):
        _fail(f"`bias_after_softcap` is {call_options.bias_after_softcap!r}; pass True or False.")
    if call_options.causal_align not in ALIGNMENTS:
        _fail(f"`causal_align` is {call_options.causal_align!r}; pass 'top_left' or 'bottom_right'.")
    window = check_window(call_options.window)
    check_rate(call_options.dropout_rate)
    if call_options.causal_align == "bottom_right" and (
        call_options.q_offset is not None or arrays.q_positions is not None
    ):
        _fail("`causal_align` is 'bottom_right', but `q_offset` says where the queries stand; pass one of them.")
    operands = signature.specs(arrays)
    batch, heads, q_len, qk_dim = operands.query.shape
    q_ids, kv_ids = (x and ArraySpec(x.shape, jnp.dtype(jnp.int32)) for x in operands[5:7])
    seed = ArraySpec((batch, heads, 2), jnp.dtype(jnp.uint32)) if call_options.dropout_rate else None
    operands = operands._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids, dropout_seed=seed)
    offset = 0
    if call_options.causal or window is not None or arrays.slopes is not None:
        aligned = operands.key.shape[2] - q_len if call_options.causal_align == "bottom_right" else 0
        offset = aligned if call_options.q_offset is None else call_options.q_offset
    else:
        operands = operands._replace(q_positions=None)  # nothing asks where a row stands
    cap, scale = call_options.softcap, call_options.scale
    if cap is not None:
        cap = _positive("softcap", cap, "the bound of the logits, such as 50.0, or None for no cap")
    if scale is not None:
        scale = _number("scale", scale, "a number, or None for 1/sqrt(head_dim)")
    return AttentionSpec(
        operands,
        causal=bool(call_options.causal),
        causal_offset=offset,
        window=window,
        softcap=cap,
        bias_after_softcap=bool(call_options.bias_after_softcap) and cap is not None and operands.bias is not None,
        scale=1.0 / math.sqrt(qk_dim) if scale is None else scale,
        dropout_rate=float(call_options.dropout_rate),
        return_lse=bool(call_options.return_lse),
        precision=precision,
    )


def signature_of(layout: str | None) -> Signature:
    """The caller's layout.

    Raises:
      ShapeError: there is none of that name.
    """
    if layout not in (None, *LAYOUTS):
        _fail(f"`layout` is {layout!r}; pass 'bhsd' ({LAYOUTS['bhsd']}) or 'bshd' ({LAYOUTS['bshd']}).")
    return BSHD if layout == "bshd" else SIGNATURE


def check_arrays(arrays: Operands, layout: str | None) -> None:
    """Checks the arrays against one another.

    Raises:
      ShapeError: a dtype or a shape is not legal, or sizes look swapped.
    """
    _check_dtypes(arrays)
    try:
        signature_of(layout).check(NAME, arrays)
    except ShapeError as error:
        raise ShapeError(f"{error}{_layout_hint(arrays, layout)}") from None
    q, k, v = (array.shape for array in arrays[:3])
    heads, length = (2, 1) if layout == "bshd" else (1, 2)
    for name, axis, unit in (("query", heads, "heads"), ("query", 3, "features"), ("value", 3, "features")):
        shape = getattr(arrays, name).shape
        if not shape[axis]:
            _fail(f"`{name}` has shape {shape}, which has no {unit}; pass at least one.")
    if layout is None and _looks_swapped(q, k):
        _fail(
            f"the sizes look swapped: `query` {q} and `key` {k} read as {q[heads]} heads over sequences of {q[length]} "
            f"and {k[length]}, but would be grouped-query attention as {LAYOUTS['bshd']}; pass layout='bshd', or "
            "layout='bhsd' if they are meant as they stand."
        )


def _check_dtypes(arrays: Operands) -> None:
    for name, array in zip(arrays._fields[:3], arrays[:3], strict=True):
        check_float(NAME, name, array.dtype)
        if array.dtype != arrays.query.dtype:
            _fail(
                f"`{name}` has dtype {array.dtype.name}, but `query` has {arrays.query.dtype.name}; cast them "
                "and pass arrays of one dtype."
            )
    mask, bias = arrays.mask, arrays.bias
    if mask is not None and mask.dtype != jnp.bool_:
        _fail(f"`mask` has dtype {mask.dtype.name}; pass bool (True = attend), or add numbers to the logits by `bias`.")
    if bias is not None and bias.dtype not in FLOATS:
        fix = "pass it as `mask`" if bias.dtype == jnp.bool_ else "pass a floating-point array"
        _fail(f"`bias` has dtype {bias.dtype.name}; {fix}.")
    for name, array in (("sinks", arrays.sinks), ("alibi_slopes", arrays.slopes)):
        if array is not None and array.dtype not in FLOATS:
            _fail(f"`{name}` has dtype {array.dtype.name}; pass a floating-point array.")
    for name, ids in (("q_ids", arrays.q_segment_ids), ("kv_ids", arrays.kv_segment_ids)):
        if ids is not None and not jnp.issubdtype(ids.dtype, jnp.integer):
            _fail(f"`segment_ids` has {name} of dtype {ids.dtype.name}; pass integers.")


def _looks_swapped(q: Sequence[int], k: Sequence[int]) -> bool:
    """Equal "heads", more of them than any model has and far more than the sequences are long, and "lengths" that
    divide as grouped heads do.
    """
    return q[1] == k[1] >= 256 and q[1] >= 4 * q[2] and q[2] > k[2] > 0 and q[2] % k[2] == 0


def _layout_hint(arrays: Operands, layout: str | None) -> str:
    """A sentence for an error's end, where the arrays fit one another in the other layout."""
    alternative = "bhsd" if layout == "bshd" else "bshd"
    try:
        signature_of(alternative).check(NAME, arrays)
    except ShapeError:
        return ""
    return f" The sizes would fit {LAYOUTS[alternative]}: if that is what they are, pass layout={alternative!r}."


def check_window(window: object) -> tuple[int | None, int | None] | None:
    """(left, right) as integers or None; None where both are unbounded."""
    if window is None:
        return None
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        _fail(
            f"`window` is {window!r}; pass a pair (left, right) of key counts, None for an unbounded side, such as "
            "(1023, 0)."
        )
    for side, width in zip(("left", "right"), window, strict=True):
        if width is not None and (isinstance(width, bool) or not isinstance(width, numbers.Integral) or width < 0):
            _fail(
                f"`window` is {tuple(window)}, and its {side} side is {width!r}; pass an integer of zero or more, or "
                "None for no bound."
            )
    # Wider than any sequence is as good as that wide, and stays within int32.
    left, right = (None if width is None else min(int(width), (1 << 30) - 1) for width in window)
    return None if left is None and right is None else (left, right)


def segment_pair(segment_ids: PyTree) -> tuple[AnyArray, AnyArray]:
    """(q_ids, kv_ids), both None where there are none.

    Raises:
      ShapeError: it is not a pair of arrays.
    """
    if segment_ids is None:
        return None, None
    pair = isinstance(segment_ids, (tuple, list))
    if pair and len(segment_ids) == 2 and all(ids is not None for ids in segment_ids):
        return tuple(segment_ids)
    description = f"{len(segment_ids)} entries" if pair else type(segment_ids).__name__
    _fail(
        f"`segment_ids` is {description}; pass a pair (q_ids, kv_ids) of integer arrays "
        "[batch, q_len] and [batch, kv_len]."
    )


def _fail_blocks(text: str) -> NoReturn:
    raise ShapeError(f"block_sparse_attention: {text}")


def check_blocks(block_mask: PyTree, block_size: Any, heads: int, q_len: int, kv_len: int) -> BlockMask | None:
    """The static block mask, from an array, a function or a `BlockMask`; None where there is none or nothing to
    mask.
    """
    if block_mask is None:
        return None
    sizes = (block_size, block_size) if block_size is None or isinstance(block_size, numbers.Integral) else block_size
    legal = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) == 2
    if not legal or any(
        n is not None and (isinstance(n, bool) or not isinstance(n, numbers.Integral) or not 1 <= int(n) < 2**31)
        for n in sizes
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
                "`block_mask` is traced, and the blocks are part of the compiled program; pass a NumPy array or a "
                "function, or use flash_attention's `mask`."
            )
        if callable(block_mask):
            if 0 in (q_len, kv_len):
                return None
            with jax.ensure_compile_time_eval():  # so that the function may use jax.numpy, also inside jit
                mask = BlockMask.from_function(block_mask, q_len, kv_len, size)
            shape = mask.codes.shape
        else:
            if isinstance(block_mask, jax.Array) and not isinstance(block_mask.dtype, np.dtype):
                _fail_blocks(f"`block_mask` has dtype {block_mask.dtype}; pass bool [q_blocks, kv_blocks].")
            array = np.asarray(block_mask)
            if array.dtype != np.bool_ or array.ndim not in (2, 3):
                _fail_blocks(
                    f"`block_mask` has dtype {array.dtype} and shape {array.shape}; pass bool [q_blocks, kv_blocks] or "
                    "[heads, q_blocks, kv_blocks], or a function of the indices."
                )
            shape, mask = (1, *array.shape)[-3:], None
            if 0 not in array.shape:
                mask = BlockMask.from_blocks(array, size)
    expected = -(-q_len // size[0]), -(-kv_len // size[1])
    if tuple(shape[1:]) != expected:
        _fail_blocks(
            f"`block_mask` has {shape[1]} x {shape[2]} blocks, but {q_len} queries and {kv_len} keys have "
            f"{expected[0]} x {expected[1]} of `block_size` {size}; pass one entry for each block."
        )
    if shape[0] not in (1, heads):
        _fail_blocks(
            f"`block_mask` has {shape[0]} heads, but `query` has {heads}; pass one mask for each head, or one for all."
        )
    return None if 0 in (q_len, kv_len) else mask


def check_rate(rate: Any) -> None:
    """Rejects what is not a share of probabilities to drop."""
    if not _is_number(rate) or not 0 <= rate < 1:
        _fail(f"`dropout_rate` is {rate!r}; pass a number in [0, 1), such as 0.1.")


def check_dropout_key(rate: object, key: AnyArray) -> None:
    """Rejects what is not the one key that a rate above 0 needs."""
    if not rate:
        return
    if key is None:
        _fail(
            f"`dropout_rate` is {rate}, but `dropout_key` is None; pass a key, such as jax.random.key(0), or a rate of "
            "0."
        )
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if tuple(key.shape) != (() if typed else (2,)) or not (typed or key.dtype == jnp.uint32):
        _fail(
            f"`dropout_key` has shape {tuple(key.shape)} and dtype {key.dtype}; pass one key: jax.random.key(0), or "
            "the uint32 data of jax.random.PRNGKey(0), shape (2,)."
        )


def _is_number(x: PyTree) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _number(name: str, x: PyTree, fix: str) -> float:
    if not _is_number(x) or not math.isfinite(x):
        kind = "" if isinstance(x, (numbers.Real, str)) else f" of type {type(x).__name__}"
        _fail(f"`{name}` is {x!r}{kind}; pass {fix} (a Python number: it is part of the compiled program).")
    return float(x)


def _positive(name: str, x: Any, fix: str) -> float:
    if _number(name, x, fix) <= 0:
        _fail(f"`{name}` is {x!r}; pass {fix}, more than 0.")
    return float(x)


def one_request(block_size: int | None, config: object) -> Any:
    """The caller's tiles, from the two ways to state them.

    Raises:
      KernelError: both are given, or the block size is not one.
    """
    if block_size is None:
        return config
    if config is not None:
        raise KernelError(
            f"flash_attention: `block_size` is {block_size} and `config` is {config}; pass one of them, since a config "
            "names its own blocks."
        )
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise KernelError(
            f"flash_attention: `block_size` is {block_size!r}; pass a positive number of elements, such as 128, or "
            "None."
        )
    return block_size
