"""`flash_attention_varlen`: attention of packed sequences, each over its own keys, as FlashAttention's users know it; a custom operator with gradients.

On a GPU the kernels of `flash_attention` read where each sequence begins and work within it, so the cost is that of the sequences and nothing is said
to the host. On the CPU the sequences are computed one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.attention import gpu
from vishwamai.ops.attention.checks import check_rate
from vishwamai.ops.attention.gpu import Memory, Packed
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.torch import bridge
from vishwamai.torch.attention import checked_window, chosen, described, drawn_seed, rows, wishes

NAME = "flash_attention_varlen"


def _fail(text: str) -> None:
    raise ShapeError(f"{NAME}: {text}")


def _spec(
    tensors: tuple[Tensor | None, ...], batch: int, q_len: int, kv_len: int, options: tuple[Any, ...]
) -> AttentionSpec:
    """The spec of `batch` sequences of these lengths."""
    arrays: list[ArraySpec | None] = []
    for x, length in zip(tensors[:3], (q_len, kv_len, kv_len), strict=True):
        described_x = array_spec(x)
        arrays.append(ArraySpec((batch, described_x.shape[1], length, described_x.shape[2]), described_x.dtype))
    sinks, seed = (None if x is None else array_spec(x) for x in tensors[3:])
    if seed is not None:
        seed = ArraySpec((batch, *seed.shape[1:]), seed.dtype)
    causal, bottom_right, left, right, softcap, scale, rate, precision = options
    return described(
        (*arrays, None, None, None, None, sinks, seed),
        causal, bottom_right, left, right, softcap, scale, rate, "bhsd", precision,
    )  # fmt: skip


def _check(query: Tensor, key: Tensor, value: Tensor, q_starts: Tensor, kv_starts: Tensor, seed: Tensor | None) -> int:
    """The number of sequences.

    Raises:
      ShapeError: the tensors do not fit one another.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            _fail(f"`{name}` has shape {tuple(x.shape)}; pass packed sequences, [total, heads, head_dim].")
    if key.shape[0] != value.shape[0]:
        _fail(f"`key` has {key.shape[0]} positions and `value` {value.shape[0]}; pass as many.")
    for name, x in (("cu_seqlens_q", q_starts), ("cu_seqlens_k", kv_starts)):
        if x.dim() != 1 or len(x) < 2 or x.is_floating_point():
            _fail(
                f"`{name}` is {x.dtype} of shape {tuple(x.shape)}; pass integers [batch + 1], from 0 to the last sequence's end."
            )
    batch = len(q_starts) - 1
    if len(kv_starts) != batch + 1:
        _fail(f"`cu_seqlens_q` has {batch + 1} entries and `cu_seqlens_k` {len(kv_starts)}; pass as many.")
    if seed is not None and seed.shape != (batch, query.shape[1], 2):
        _fail(
            f"`dropout_seed` has shape {tuple(seed.shape)}; pass integers [batch, heads, 2], here {(batch, query.shape[1], 2)}."
        )
    return batch


def _starts(name: str, starts: Tensor, longest: int, total: int) -> list[int]:
    """The starts as numbers, checked; for tensors on the CPU, where they can be read."""
    values = starts.tolist()
    lengths = [b - a for a, b in zip(values, values[1:], strict=False)]
    if values[0] != 0 or min(lengths) < 0 or values[-1] > total:
        _fail(f"`cu_seqlens_{name}` is {values[:8]} ...; pass starts that rise from 0 to {total} at most.")
    if max(lengths) > longest:
        _fail(f"`max_seqlen_{name}` is {longest}, but a sequence has {max(lengths)} positions; pass the longest.")
    return values


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """One sequence that has queries: its number, and its positions."""

    number: int
    q: slice
    kv: slice

    def operands(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None
    ) -> Operands:
        q, k, v = (x[at].transpose(0, 1)[None] for x, at in ((query, self.q), (key, self.kv), (value, self.kv)))
        seeds = None if seed is None else seed[self.number : self.number + 1].contiguous().view(torch.uint32)
        return Operands(q, k, v, sinks=None if sinks is None else sinks[None], dropout_seed=seeds)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.stop - self.q.start, self.kv.stop - self.kv.start


def _sequences(q: list[int], kv: list[int]) -> Iterator[_Sequence]:
    for number in range(len(q) - 1):
        if q[number + 1] > q[number]:
            yield _Sequence(number, slice(q[number], q[number + 1]), slice(kv[number], kv[number + 1]))


def _packed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> Operands:
    """The tensors as the kernels take them."""
    q, k, v = (rows(x).transpose(0, 1)[None] for x in (query, key, value))
    return Operands(
        q,
        k,
        v,
        sinks=None if sinks is None else sinks.contiguous()[None],
        dropout_seed=None if seed is None else seed.contiguous().view(torch.uint32),
    )


def _memory(q_starts: Tensor, kv_starts: Tensor, bottom_right: bool) -> Memory:
    q, kv = (x.to(torch.int32).contiguous() for x in (q_starts, kv_starts))
    return Memory(True, Packed(q, kv, bottom_right))


@torch.library.custom_op("vishwamai::attention_varlen", mutates_args=())
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    bottom_right: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    dropout_rate: float,
    precision: str,
    implementation: str,
    block_size: int,
    config: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(out `[total, heads, v_dim]`, logsumexp `[heads, total]`). See `flash_attention_varlen`."""
    tensors = (query, key, value, sinks, dropout_seed)
    batch = _check(query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_seed)
    if bridge.platform_of(query) == "cuda":
        # The band of each sequence is the kernel's affair.
        options = (causal, False, left, right, softcap, scale, dropout_rate, precision)
        spec = _spec(tensors, batch, max_seqlen_q, max_seqlen_k, options)
        choice = chosen(spec, query, implementation, block_size, config)
        memory = _memory(cu_seqlens_q, cu_seqlens_k, bottom_right)
        return gpu.attend(spec, choice.config, _packed(*tensors), True, memory)
    options = (causal, bottom_right, left, right, softcap, scale, dropout_rate, precision)
    out, logsumexp = _empty(query, value)
    out.zero_()
    logsumexp.fill_(float("-inf"))
    q = _starts("q", cu_seqlens_q, max_seqlen_q, len(query))
    kv = _starts("k", cu_seqlens_k, max_seqlen_k, len(key))
    for sequence in _sequences(q, kv):
        spec = _spec(tensors, 1, *sequence.lengths, options)
        choice = chosen(spec, query, implementation, block_size, config)
        outputs, lse = bridge.forward(choice, spec, sequence.operands(*tensors), True)
        out[sequence.q] = outputs.out[0].transpose(0, 1)
        logsumexp[:, sequence.q] = lse[0]
    return out, logsumexp


def _empty(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((query.shape[1], query.shape[0]), dtype=wide)


@attention_varlen.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del key, rest
    return _empty(query, value)


@torch.library.custom_op("vishwamai::attention_varlen_backward", mutates_args=())
def attention_varlen_backward(
    dout: Tensor,
    dlogsumexp: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    dropout_seed: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    bottom_right: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    dropout_rate: float,
    precision: str,
    implementation: str,
    block_size: int,
    config: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (empty where there are none)."""
    tensors = (query, key, value, sinks, dropout_seed)
    batch = _check(query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_seed)
    if bridge.platform_of(query) == "cuda":
        options = (causal, False, left, right, softcap, scale, dropout_rate, precision)
        spec = _spec(tensors, batch, max_seqlen_q, max_seqlen_k, options)
        choice = chosen(spec, query, implementation, block_size, config)
        packed = _packed(*tensors)
        o, do = (rows(x).transpose(0, 1)[None] for x in (out, dout))
        of_lse = None if dlogsumexp is None else dlogsumexp.contiguous()
        found = gpu.gradients(
            spec, choice.config, packed, Outputs(o), logsumexp.contiguous(), Outputs(do, of_lse),
            _memory(cu_seqlens_q, cu_seqlens_k, bottom_right),
        )  # fmt: skip
        dq, dk, dv = (g.contiguous() for g in found[:3])
        return dq, dk, dv, query.new_empty(0) if sinks is None else found.sinks.reshape(sinks.shape)
    options = (causal, bottom_right, left, right, softcap, scale, dropout_rate, precision)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (query, key, value))
    dsinks = query.new_empty(0) if sinks is None else torch.zeros(sinks.shape, dtype=sinks.dtype)
    for sequence in _sequences(cu_seqlens_q.tolist(), cu_seqlens_k.tolist()):
        spec = _spec(tensors, 1, *sequence.lengths, options)
        spec = dataclasses.replace(spec, return_lse=dlogsumexp is not None)
        choice = chosen(spec, query, implementation, block_size, config)

        def of(x: Tensor, at: slice = sequence.q) -> Tensor:
            return x[at].transpose(0, 1)[None]

        lse = logsumexp[None, :, sequence.q]
        of_lse = None if dlogsumexp is None else dlogsumexp[None, :, sequence.q]
        outputs = Outputs(of(out), None if of_lse is None else lse)
        found = bridge.backward(
            choice, spec, sequence.operands(*tensors), outputs, lse.contiguous(), Outputs(of(dout), of_lse)
        )
        for total, at, part in (
            (dq, sequence.q, found.query),
            (dk, sequence.kv, found.key),
            (dv, sequence.kv, found.value),
        ):
            total[at] = part[0].transpose(0, 1)
        if sinks is not None:
            dsinks += found.sinks[0]
    return dq, dk, dv, dsinks


@attention_varlen_backward.register_fake
def _(
    dout: Any, dlse: Any, out: Any, lse: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any, *rest: Any
) -> Any:
    del dout, dlse, out, lse, rest
    empty = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), empty


_TENSORS = 7


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:_TENSORS])


def _gradient(ctx: Any, dout: Tensor | None, dlogsumexp: Tensor | None) -> tuple[Any, ...]:
    out, logsumexp, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = attention_varlen_backward(dout, dlogsumexp, out, logsumexp, *tensors, *ctx.options)
    return dq, dk, dv, None if tensors[3] is None else dsinks, *(None,) * (3 + len(ctx.options))


attention_varlen.register_autograd(_gradient, setup_context=_setup)


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: AttentionGpuConfig | None = None,
    implementation: str | None = None,
) -> Any:
    """Attention of sequences of any lengths, packed one behind the other: those of queries see the keys of the sequence of the same number.

    Blocks of other sequences are not visited: the time is that of the sequences, and nothing is padded.

    Args:
      query: `[total_q, heads, qk_dim]`, bfloat16, float16 or float32 (float64 on the CPU).
      key, value: `[total_k, kv_heads, qk_dim]` and `[total_k, kv_heads, v_dim]`.
      cu_seqlens_q, cu_seqlens_k: integers `[batch + 1]`, where each sequence begins, and the last one's end. What lies behind that sees nothing.
      max_seqlen_q, max_seqlen_k: the longest sequences' lengths, or more. Where one is longer, the CPU raises an error; on a GPU, which is not asked,
        the results of all that lies beyond become NaN (of keys: of the keys' gradients; the keys themselves are all seen).
      causal_align: as in `flash_attention` for each sequence by itself, but "bottom_right" by default, as FlashAttention has it.
      causal, window, softcap, sinks, scale, return_lse: as in `flash_attention`.
      dropout_rate, dropout_seed: as in `flash_attention`, with rows and columns counted within each sequence.
      block_size, config, implementation: as in `flash_attention`.

    Returns:
      `out`, `[total_q, heads, v_dim]`; with `return_lse`, the pair of it and the natural logsumexp `[heads, total_q]`.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> q, k, v = torch.randn(3, 10, 2, 16)
    >>> starts = torch.tensor([0, 3, 10])
    >>> out = flash_attention_varlen(q, k, v, starts, starts, 7, 7, causal=True)
    >>> torch.equal(out[0], v[0]) and torch.equal(out[3], v[3])
    True
    """
    if causal_align not in ("top_left", "bottom_right"):
        raise ShapeError(f"{NAME}: `causal_align` is {causal_align!r}; pass 'top_left' or 'bottom_right'.")
    check_rate(dropout_rate)
    left, right = checked_window(window)
    shape = (cu_seqlens_q.shape[0] - 1, query.shape[1], 2)
    seed = drawn_seed(dropout_seed, dropout_rate, shape, query.device)
    precision, name, size, fields = wishes(implementation, block_size, config)
    out_dtype = query.dtype
    query, key, value = bridge.narrowed(query, key, value)
    out, logsumexp = attention_varlen(
        query, key, value, sinks, seed, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k),
        causal, causal_align == "bottom_right", left, right, softcap, scale, float(dropout_rate),
        precision, name, size, fields,
    )  # fmt: skip
    out = out.to(out_dtype)
    return (out, logsumexp) if return_lse else out
