"""`flash_attention` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.core.op import Choice
from vishwamai.core.precision import resolve_precision
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.attention import gpu
from vishwamai.ops.attention.api import ATTENTION
from vishwamai.ops.attention.checks import check_rate, check_window, make_spec
from vishwamai.ops.attention.gpu import Memory
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.torch import bridge

_TENSORS = 9
"""query, key, value, bias, mask, q_segment_ids, kv_segment_ids, sinks, dropout_seed."""


@functools.lru_cache(maxsize=4096)
def described(
    arrays: tuple[ArraySpec | None, ...],
    causal: bool,
    bottom_right: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    dropout_rate: float,
    layout: str,
    precision: str,
) -> AttentionSpec:
    """The spec of a call, which checks it. `arrays` are the operator's tensors."""
    query, key, value, bias, mask, q_ids, kv_ids, sinks, seed = arrays
    assert query is not None
    spec = make_spec(
        query,
        key,
        value,
        bias,
        mask,
        causal=causal,
        causal_align="bottom_right" if bottom_right else "top_left",
        window=None if left is None and right is None else (left, right),
        segment_ids=None if q_ids is None and kv_ids is None else (q_ids, kv_ids),
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        layout=layout or None,
        precision=resolve_precision(precision, current_config().precision, query.dtype),
    )
    if seed is None:
        return spec
    check_rate(dropout_rate)
    wanted = (spec.batch, spec.q_heads, 2)
    if seed.shape != wanted:
        raise ShapeError(
            f"flash_attention: `dropout_seed` has shape {seed.shape}; pass integers [batch, heads, 2], here {wanted}."
        )
    operands = spec.operands._replace(dropout_seed=ArraySpec(wanted, _UINT32))
    return dataclasses.replace(spec, operands=operands, dropout_rate=float(dropout_rate))


_UINT32 = array_spec(torch.empty(0, dtype=torch.uint32)).dtype


def chosen(spec: AttentionSpec, tensor: Tensor, implementation: str, block_size: int, config: Sequence[int]) -> Choice:
    """What runs; `config` holds the fields of an `AttentionGpuConfig`, or nothing."""
    wanted: Any = block_size or None
    if len(config):
        fields: Any = [bool(n) if f.type == "bool" else n for n, f in zip(config, _FIELDS, strict=True)]
        wanted = AttentionGpuConfig(*fields)
    return bridge.choose(ATTENTION, spec, tensor, config=wanted, implementation=implementation or None)


_FIELDS = dataclasses.fields(AttentionGpuConfig)


def rows(x: Tensor) -> Tensor:
    """A tensor whose rows (its last axis) the kernels can read where they are; a copy where they cannot."""
    whole = x.stride(-1) == 1 or x.shape[-1] == 1
    apart = all(step > 0 or extent == 1 for step, extent in zip(x.stride(), x.shape, strict=True))
    return x if whole and apart and x.data_ptr() % 16 == 0 else x.contiguous()


def unexpanded(x: Tensor) -> Tensor:
    """The tensor with one element along the axes that `expand` has made."""
    for axis, (step, extent) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if step == 0 and extent > 1:
            x = x.narrow(axis, 0, 1)
    return x


def _filled(x: Tensor, axes: int) -> Tensor:
    return x.contiguous().reshape((1,) * (axes - x.dim()) + x.shape)


def _operands(tensors: tuple[Tensor | None, ...], layout: str, of_bias: bool) -> tuple[Operands, Operands]:
    """(the tensors in the op's own layout, the same as the operator got them but for what `expand` repeats)."""
    query, key, value, bias, mask, q_ids, kv_ids, sinks, seed = tensors
    bias = bias if bias is None or of_bias else unexpanded(bias)
    mask = None if mask is None else unexpanded(mask)
    given = Operands(query, key, value, bias, mask, q_ids, kv_ids, sinks, seed)

    def inner(x: Tensor | None) -> Any:
        assert x is not None
        return rows(x).transpose(1, 2) if layout == "bshd" else rows(x)

    if query is None or any(x is None or x.dim() != 4 for x in tensors[:3]):
        return given, given  # which the checks will refuse
    laid = Operands(
        inner(query),
        inner(key),
        inner(value),
        None if bias is None else _filled(bias, 4),
        None if mask is None else _filled(mask, 4),
        None if q_ids is None else _filled(q_ids.to(torch.int32), 2),
        None if kv_ids is None else _filled(kv_ids.to(torch.int32), 2),
        None if sinks is None else _filled(sinks, 2),
        None if seed is None else seed.contiguous().view(torch.uint32),
    )
    return laid, given


def _specs(given: Operands) -> tuple[ArraySpec | None, ...]:
    return tuple(None if x is None else array_spec(x) for x in given)


@torch.library.custom_op("vishwamai::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    q_segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    causal: bool,
    bottom_right: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    dropout_rate: float,
    layout: str,
    precision: str,
    implementation: str,
    block_size: int,
    config: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp `[batch, heads, q_len]`); `dropout_seed` is int32 `[batch, heads, 2]`. See `flash_attention`."""
    tensors = (query, key, value, bias, mask, q_segment_ids, kv_segment_ids, sinks, dropout_seed)
    operands, given = _operands(tensors, layout, False)
    spec = described(_specs(given), causal, bottom_right, left, right, softcap, scale, dropout_rate, layout, precision)
    choice = chosen(spec, query, implementation, block_size, config)
    if choice.platform == "cuda":
        return gpu.attend(spec, choice.config, operands, True, Memory(seq_first=layout == "bshd"))
    outputs, logsumexp = bridge.forward(choice, spec, operands, True)
    return _outer(outputs.out, layout), logsumexp


def _outer(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2).contiguous() if layout == "bshd" else x


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    layout = rest[_TENSORS - 3 + 7]
    heads, seq = (query.shape[2], query.shape[1]) if layout == "bshd" else query.shape[1:3]
    return query.new_empty((*query.shape[:3], value.shape[3])), _statistics(query, (query.shape[0], heads, seq))


def _statistics(query: Tensor, shape: tuple[int, ...]) -> Tensor:
    return query.new_empty(shape, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("vishwamai::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlogsumexp: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    of_bias: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    q_segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    causal: bool,
    bottom_right: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    dropout_rate: float,
    layout: str,
    precision: str,
    implementation: str,
    block_size: int,
    config: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, bias and sinks; empty for one that is absent, and for the bias unless `of_bias`."""
    tensors = (query, key, value, bias, mask, q_segment_ids, kv_segment_ids, sinks, dropout_seed)
    operands, given = _operands(tensors, layout, of_bias)
    spec = described(_specs(given), causal, bottom_right, left, right, softcap, scale, dropout_rate, layout, precision)
    choice = chosen(spec, query, implementation, block_size, config)

    def inner(x: Tensor) -> Tensor:
        return rows(x).transpose(1, 2) if layout == "bshd" else rows(x)

    spec = dataclasses.replace(spec, return_lse=dlogsumexp is not None)
    outputs = Outputs(inner(out), None if dlogsumexp is None else logsumexp)
    cotangents = Outputs(inner(dout), None if dlogsumexp is None else dlogsumexp.contiguous())
    if choice.platform == "cuda":
        memory = Memory(seq_first=layout == "bshd")
        found = gpu.gradients(
            spec, choice.config, operands, outputs, logsumexp.contiguous(), cotangents, memory, of_bias
        )
        dq, dk, dv = (g.contiguous() for g in found[:3])
    else:
        unwanted = () if of_bias else ("bias",)
        found = bridge.backward(choice, spec, operands, outputs, logsumexp, cotangents, unwanted)
        dq, dk, dv = (_outer(g, layout) for g in found[:3])

    def like(gradient: Any, x: Tensor | None, wanted: bool = True) -> Tensor:
        return query.new_empty(0) if x is None or not wanted else gradient.reshape(x.shape)

    return dq, dk, dv, like(found.bias, bias, of_bias), like(found.sinks, sinks)


@attention_backward.register_fake
def _(dout: Any, dlogsumexp: Any, out: Any, logsumexp: Any, of_bias: bool, *arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, bias, *_ = arguments
    sinks = arguments[7]
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        bias.new_empty(bias.shape) if bias is not None and of_bias else query.new_empty(0),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)  # a logsumexp that nobody uses costs no array of zeros
    ctx.save_for_backward(*output, *inputs[:_TENSORS])


def _gradient(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Any, ...]:
    out, logsumexp, *tensors = ctx.saved_tensors
    bias, sinks = tensors[3], tensors[7]
    if dout is None:
        dout = torch.zeros_like(out)
    of_bias = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, dbias, dsinks = attention_backward(dout, dlogsumexp, out, logsumexp, of_bias, *tensors, *ctx.options)
    none = (None,) * len(ctx.options)
    return (dq, dk, dv, dbias if of_bias else None, None, None, None, None if sinks is None else dsinks, None, *none)


attention.register_autograd(_gradient, setup_context=_setup)


def drawn_seed(seed: Tensor | None, rate: float, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """int32 seeds of dropout: the caller's, or new ones from torch's generator; None where nothing is dropped."""
    if not rate:
        return None
    if seed is None:
        bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device)
    elif seed.is_floating_point() or seed.is_complex():
        raise ShapeError(f"flash_attention: `dropout_seed` has dtype {seed.dtype}; pass integers, or None.")
    else:
        bits = (seed.to(device, torch.int64) + 2**31) % 2**32 - 2**31
    return bits.to(torch.int32)


def wishes(implementation: str | None, block_size: int | None, config: Any) -> tuple[str, str, int, list[int]]:
    """(precision, implementation, block size, fields of a config) as operators take them: the caller's, or the ambient ones."""
    fields: list[int] = []
    if config is not None:
        if block_size is not None:
            raise KernelError(
                f"flash_attention: `block_size` is {block_size} and `config` is {config}; pass one of them, since a config names its own blocks."
            )
        if not isinstance(config, AttentionGpuConfig):
            raise KernelError(f"flash_attention: `config` is a {type(config).__name__}; pass an AttentionGpuConfig.")
        fields = [int(getattr(config, field.name)) for field in _FIELDS]
    elif block_size is not None and (isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1):
        raise KernelError(
            f"flash_attention: `block_size` is {block_size!r}; pass a positive number of elements, such as 128, or None."
        )
    if torch.compiler.is_compiling():
        return "default", implementation or "", block_size or 0, fields
    ambient = current_config()
    # Said here, since autograd's backward runs in threads that do not know of the ambient configuration.
    if implementation is None and ambient.implementation in {impl.name for impl in ATTENTION.implementations}:
        implementation = ambient.implementation
    if implementation is None and not ambient.use_flash:
        implementation = XLA.name
    if not fields:
        block_size = block_size or ambient.block_size
    return ambient.precision.products, implementation or "", block_size or 0, fields


def checked_window(window: Any) -> tuple[int | None, int | None]:
    """(left, right), None for an unbounded side."""
    if torch.compiler.is_compiling():
        return (None, None) if window is None else tuple(window)  # type: ignore[return-value]
    return check_window(window) or (None, None)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int | None, int | None] | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: AttentionGpuConfig | None = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> Any:
    """Exact attention in memory linear in the sequences; see `vishwamai.flash_attention`, whose arguments these are.

    Query, key and value may have any strides in which the elements of a head lie side by side (transposed views, parts of one tensor): they are not copied on a GPU.

    Args:
      query: `[batch, heads, q_len, qk_dim]`, bfloat16, float16 or float32 (float64 on the CPU).
      key, value: `[batch, kv_heads, kv_len, qk_dim]` and `[batch, kv_heads, kv_len, v_dim]`; `heads` is a multiple of `kv_heads`.
      bias: added to the scaled logits; broadcasts to `[batch, heads, q_len, kv_len]`. Its gradient is computed if it requires one.
      mask: bool, True = attend; broadcasts the same way.
      causal, causal_align, window, segment_ids, softcap, sinks, scale, return_lse, layout: as there.
      dropout_rate: share of the probabilities to drop, in [0, 1).
      dropout_seed: integers `[batch, heads, 2]`, of which 32 bits count: the same drop the same positions, here and in JAX, where they are
        `vishwamai.core.dropout.seeds(dropout_key, batch, heads)`. None draws them from torch's generator of the query's device.
      block_size: edge of the tiles, in elements.
      config: tiles of the Triton kernels; excludes `block_size`.
      implementation: name of the implementation to use, or None for the best one.

    Returns:
      `out`, `[batch, heads, q_len, v_dim]` in `layout` and the query's dtype; with `return_lse`, the pair of it and the natural logsumexp
      `[batch, heads, q_len]`, float32 (float64 for float64). Both have gradients.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 100, 4, 64)
    >>> flash_attention(q, k[:, :, :2], v[:, :, :2], causal=True, window=(15, 0), layout="bshd").shape
    torch.Size([1, 100, 4, 64])
    """
    if causal_align not in ("top_left", "bottom_right"):
        raise ShapeError(f"flash_attention: `causal_align` is {causal_align!r}; pass 'top_left' or 'bottom_right'.")
    check_rate(dropout_rate)
    if segment_ids is not None and (not isinstance(segment_ids, (tuple, list)) or len(segment_ids) != 2):
        raise ShapeError("flash_attention: `segment_ids` is no pair; pass (q_ids, kv_ids).")
    left, right = checked_window(window)
    q_ids, kv_ids = segment_ids if segment_ids is not None else (None, None)
    heads = query.shape[2 if layout == "bshd" else 1] if query.dim() == 4 else 0
    seed = drawn_seed(dropout_seed, dropout_rate, (query.shape[0], heads, 2), query.device) if query.dim() else None
    precision, name, size, fields = wishes(implementation, block_size, config)
    out_dtype = query.dtype
    query, key, value = bridge.narrowed(query, key, value)
    out, logsumexp = attention(
        query, key, value, bias, mask, q_ids, kv_ids, sinks, seed,
        causal, causal_align == "bottom_right", left, right, softcap, scale, float(dropout_rate),
        layout or "", precision, name, size, fields,
    )  # fmt: skip
    out = out.to(out_dtype)
    return (out, logsumexp) if return_lse else out
