"""The attention of Hugging Face's models by `flash_attention`, under a name that they ask for.

transformers asks two functions for an attention by name: one makes the mask of a batch (`AttentionMaskInterface`), the
other attends in each layer (`AttentionInterface`). Ours recognises the masks that a kernel knows by itself: causal, a
sliding window, padding, packed sequences. For them no mask of `[q_len, kv_len]` is made; padding and packing become
segment ids, whose empty blocks the kernels pass over. Every other mask is made by transformers' own function and handed
on as it is, so a mask that is not recognised costs time and no answer. Written for transformers 5.24.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.torch.attention import flash_attention
from vishwamai.torch.varlen import flash_attention_varlen

NAME = "vishwamai"


def register(name: str = NAME) -> None:
    """See `vishwamai.patch.register_attention`."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedError(
            f"patch.register_attention: {error}; pip install 'transformers>=5.0', whose attention and masks can be "
            "registered."
        ) from error
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)


@functools.cache
def _codes() -> dict[str, Any]:
    """The code of the functions that transformers builds its masks of; None for one that this version has not, which is
    then not recognised.
    """
    from transformers import masking_utils as masks

    def inner(make: str, *arguments: Any) -> Any:
        function = getattr(masks, make, None)
        return None if function is None else function(*arguments).__code__

    return {
        "causal": getattr(masks.causal_mask_function, "__code__", None),
        "both": inner("and_masks", masks.causal_mask_function),
        "window": inner("sliding_window_overlay", 1),
        "packed": inner("packed_sequence_mask_function", torch.zeros(1, 1)),
        "remapped": inner("remap_positions_for_packed_sequence", masks.causal_mask_function, torch.zeros(1, 1)),
    }


def _kind(function: Callable[..., object]) -> str | None:
    code = getattr(function, "__code__", None)
    return next((name for name, code_of_kind in _codes().items() if code is not None and code is code_of_kind), None)


def _enclosed(function: Any, name: str) -> Any:
    """What a function keeps under `name`."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


class _Known(NamedTuple):
    """A mask that the kernels form by themselves."""

    causal: bool = False
    window: int | None = None  # a query sees as many keys, itself the last
    sequences: Tensor | None = None  # [batch, kv_length], the number of each key's sequence


def _recognised(function: Callable[..., object]) -> _Known | None:
    """What a mask function says, or None where it is not one of those."""
    kind = _kind(function)
    if kind == "causal":
        return _Known(True)
    if kind == "window":
        return _Known(window=_enclosed(function, "sliding_window"))
    if kind == "remapped":  # positions within each sequence: the same distances as between absolute ones
        return _recognised(_enclosed(function, "mask_function"))
    if kind == "packed":
        return _Known(sequences=_enclosed(function, "packed_sequence_mask"))
    if kind == "both":
        parts = [_recognised(part) for part in _enclosed(function, "mask_functions")]
        recognised = [part for part in parts if part is not None]
        windows = [part.window for part in recognised if part.window is not None]
        sequences = [part.sequences for part in recognised if part.sequences is not None]
        if len(recognised) == len(parts) and len(sequences) <= 1:
            return _Known(
                any(part.causal for part in recognised), min(windows, default=None), sequences[0] if sequences else None
            )
    return None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask of a batch, as `attend` reads it.

    Returns:
      Bool `[batch, 1, q_length, kv_length]`, transformers' own: all there is to say.
      None: what the layer's `is_causal` and `sliding_window` say, the last query at the last key.
      Integers `[batch, n, 1, kv_length]`: that, and a query sees the keys of its own number (keys of a negative one are
      seen by none) and, where n is more than 1, no more than the last n - 1 keys; that axis repeats, in no memory. With
      batch 0 there are no numbers to compare. There are four axes, since transformers takes a mask of two, where it
      meets it again, for one of padding.
    """
    from transformers import masking_utils

    sdpa_mask: Any = masking_utils.sdpa_mask
    mask_function = mask_function or masking_utils.causal_mask_function
    recognised = _recognised(mask_function)
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    # What is not to be left out is to be joined with another mask.
    skippable = options.get("allow_is_causal_skip", True) or (
        recognised is not None and recognised.sequences is not None
    )
    if recognised is None or not recognised.causal or not aligned or not skippable:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, **options
        )
    numbers = recognised.sequences
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if padding.shape[1] < kv_length:
            padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
        if torch.compiler.is_compiling() or not bool(padding.all()):
            numbers = torch.where(padding, 0 if numbers is None else numbers, -1)
    window = recognised.window if recognised.window is not None and recognised.window < kv_length else None
    if numbers is None and window is None:
        return None
    if numbers is None:
        numbers = torch.empty((0, kv_length), dtype=torch.int64, device=options.get("device", "cpu"))
    return numbers[:, None, None, :].expand(-1, 1 if window is None else window + 1, -1, -1)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, `[batch, heads, seq, head_dim]` in and `[batch, seq, heads, head_dim]` out.

    Raises:
      UnsupportedError: the layer wants what no blocked attention has: its weights, a mask over heads, a paged cache.
    """
    for option in ("output_attentions", "head_mask", "cache"):
        if options.get(option) is not None and options.get(option) is not False:
            raise UnsupportedError(
                f"attn_implementation={NAME!r}: `{option}` is {type(options[option]).__name__}, and blocked attention "
                "has no such thing; use attn_implementation='eager'."
            )
    # As views of the order in which the result is wanted, which the kernels read where they lie.
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    how: dict[str, Any] = dict(softcap=softcap, scale=scaling, sinks=s_aux, dropout_rate=float(dropout))
    starts: list[Any] = [
        options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    ]
    if attention_mask is not None and (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
        mask, bias = (attention_mask, None) if attention_mask.dtype == torch.bool else (None, attention_mask)
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        if mask is not None:
            mask = mask[..., : key.shape[1]]
        return flash_attention(query, key, value, bias, mask, layout="bshd", **how), None
    window = sliding_window if causal else None
    if attention_mask is not None:
        window, how["segment_ids"] = _read(attention_mask, window, query.shape[1], key.shape[1])
    if causal:
        how |= dict(causal=True, window=None if window is None else (window - 1, 0))
    if starts[0] is not None and how.get("segment_ids") is None:  # the flattened batches of FlashAttention's users
        if position_bias is not None:
            raise UnsupportedError(f"attn_implementation={NAME!r}: `position_bias` with packed sequences; use 'eager'.")
        how.pop("segment_ids", None)
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        q_starts, kv_starts, q_longest, kv_longest = starts
        out = flash_attention_varlen(q, k, v, q_starts, kv_starts, int(q_longest), int(kv_longest), **how)
        return out.unflatten(0, query.shape[:2]), None
    out = flash_attention(
        query, key, value, position_bias, layout="bshd", causal_align="bottom_right" if causal else "top_left", **how
    )
    return out, None


def _read(mask: Tensor, window: int | None, q_len: int, kv_len: int) -> tuple[int | None, tuple[Tensor, Tensor] | None]:
    """(window, segment ids or None) of `make_mask`'s integers and the layer's own window."""
    if mask.dim() != 4 or tuple(mask.shape[2:]) != (1, kv_len):
        raise ShapeError(
            f"attn_implementation={NAME!r}: the mask has shape {tuple(mask.shape)}, and there are {kv_len} keys; pass "
            "the model a mask of padding, [batch, kv_len], or a bool one [batch, 1, q_len, kv_len]."
        )
    if mask.shape[1] > 1:
        window = mask.shape[1] - 1 if window is None else min(window, mask.shape[1] - 1)
    if mask.shape[0] == 0:
        return window, None
    numbers = mask[:, 0, 0]
    # A query that is padding sees what the first sequence sees: nobody reads it, and its gradient is that of what
    # nobody reads.
    return window, (numbers[:, kv_len - q_len :].clamp(min=0), numbers)
