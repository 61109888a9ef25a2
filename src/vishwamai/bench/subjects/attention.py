"""Attention's peers: `jax.nn.dot_product_attention` and torch's SDPA; its sample is some query rows of one group of
heads.

The sample replaces the causal mask and the window by the same positions written out as a bool mask, so that they too
are checked against something that does not share their code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, halvings, ours_in_torch, resized, to_torch
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.ops.attention import flash_attention

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64
_LAID_OUT = frozenset({"query", "key", "value"})
_GEOMETRY = ("causal", "causal_align", "window", "block_mask", "block_size")


def _length(case: Case, name: str) -> int:
    return case.arrays[name].shape[1 if case.options.get("layout") == "bshd" else 2]


def _heads_axis(case: Case) -> int:
    return 2 if case.options.get("layout") == "bshd" else 1


def _offset(case: Case) -> int:
    bottom = case.options.get("causal_align") == "bottom_right"
    return _length(case, "key") - _length(case, "query") if bottom else 0


def _live(case: Case) -> np.ndarray | None:
    """`[queries, keys]`, True in the blocks that a plain block mask leaves; None without one."""
    mask = case.options.get("block_mask")
    if not isinstance(mask, np.ndarray) or mask.ndim != 2:
        return None
    block = case.options.get("block_size", 128)
    rows, columns = (block, block) if isinstance(block, int) else block
    return np.kron(mask, np.ones((rows, columns), bool))[: _length(case, "query"), : _length(case, "key")]


def visible(case: Case, rows: np.ndarray) -> np.ndarray | None:
    """`[rows, keys]`, True where causal mask, window and block mask let a query row see a key; None without either."""
    causal, window, live = case.options.get("causal", False), case.options.get("window"), _live(case)
    if not causal and window is None and live is None:
        return None
    distance = np.arange(_length(case, "key"))[None, :] - (rows[:, None] + _offset(case))
    seen = distance <= 0 if causal else np.ones_like(distance, bool)
    left, right = window or (None, None)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen if live is None else seen & live[rows]


class _Attention(Subject):
    def peers(self, case: Case) -> list[Peer]:
        options, arrays = case.options, case.arrays
        extra = set(arrays) - {"query", "key", "value", "bias", "mask"}
        blocks = "block_mask" in options
        if blocks and _live(case) is None:
            return []
        extended = extra or any(options.get(name) for name in ("softcap", "dropout_rate", "return_lse", "segment_ids"))
        if extended or _offset(case):
            return []
        peer_list = []
        window = options.get("window")
        whole_window = window is None or None not in window
        if arrays["key"].shape == arrays["value"].shape and whole_window and not blocks:
            peer_list.append(_jax_peer(case))
        if "bias" not in arrays:
            peer_list.append(_torch_peer(case))
        return peer_list

    def in_torch(self, case: Case) -> Peer | None:
        if "block_mask" not in case.options:
            return super().in_torch(case)
        from vishwamai.torch import block_sparse_attention

        options = dict(case.options)  # the mask stays what it is: the host reads it
        call = functools.partial(block_sparse_attention, block_mask=options.pop("block_mask"))
        return ours_in_torch(dataclasses.replace(case, options=options), call)

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        q_len, axis = _length(case, "query"), _heads_axis(case)
        dense = "block_mask" not in case.options or _live(case) is not None
        if case.options.get("dropout_rate") or not dense:  # a function of the absolute head and row
            return super().sample(case, arrays)
        seq = 3 - axis
        group = arrays["query"].shape[axis] // arrays["key"].shape[axis]
        rows = np.sort(np.random.default_rng(0).choice(q_len, min(q_len, _ROWS), replace=False))
        chosen: Arrays = {}
        for name, x in arrays.items():
            if name == "query":
                chosen[name] = np.take(x[:1], range(group), axis).take(rows, seq)
            elif name in ("key", "value"):
                chosen[name] = np.take(x[:1], range(1), axis)
            elif name in ("bias", "mask"):
                x = x[(0,) * (x.ndim - 4)] if x.ndim > 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)
                x = x[:1, : group if x.shape[1] > 1 else 1]
                chosen[name] = x[:, :, rows] if x.shape[2] > 1 else x
            elif name == "sinks":
                chosen[name] = x[..., :group]
            else:
                raise AssertionError(f"attention has no array {name!r}")
        seen = visible(case, rows)
        if seen is not None:
            chosen["mask"] = seen[None, None] & chosen.get("mask", True)
        options = {name: value for name, value in case.options.items() if name not in _GEOMETRY}
        if "segment_ids" in options:
            q_ids, kv_ids = options["segment_ids"]
            options["segment_ids"] = (q_ids[:1, rows], kv_ids[:1])
        inits = {
            name: dataclasses.replace(case.arrays[name], shape=x.shape)
            if name in case.arrays
            else ArrayInit(x.shape, "bool", "mask")
            for name, x in chosen.items()
        }

        def pick(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
            out, *lse = outputs
            heads = np.take(out[:1], range(group), axis).take(rows, seq)
            return (heads, *(x[:1, :group][:, :, rows] for x in lse))

        call = flash_attention if "block_mask" in case.options else case.call
        return Sample(
            dataclasses.replace(case, call=call, arrays=inits, options=options),
            chosen,
            pick,
            f"{len(rows)} of {q_len} query rows of {group} of {arrays['query'].shape[axis]} heads",
        )

    def gradient_sample(self, case: Case, arrays: Arrays) -> Sample:
        options = {"segment_ids", "dropout_rate", "return_lse"} & set(case.options)
        if options or {"bias", "sinks"} & set(arrays):  # gradients of their own, summed over heads
            return super().gradient_sample(case, arrays)
        axis = _heads_axis(case)
        heads, kv_heads = arrays["query"].shape[axis], arrays["key"].shape[axis]
        group = heads // kv_heads

        def take(x: np.ndarray, count: int) -> np.ndarray:
            return np.take(x[:1], range(count), axis)

        counts = {"query": group, "key": 1, "value": 1, "cotangent_0": group}
        chosen = {name: take(arrays[name], count) for name, count in counts.items()}
        if "mask" in arrays:
            x = arrays["mask"]
            x = x.reshape((1,) * (4 - x.ndim) + x.shape)
            chosen["mask"] = x[:1, : group if x.shape[1] > 1 else 1]
        inits = {name: dataclasses.replace(case.arrays[name], shape=x.shape) for name, x in chosen.items()}
        return Sample(
            dataclasses.replace(case, arrays=inits),
            chosen,
            lambda outputs: tuple(take(x, count) for x, count in zip(outputs, (group, 1, 1), strict=True)),
            f"all gradients of {group} of {heads} heads",
        )

    def smaller(self, case: Case, share: float) -> Case | None:
        q_len, k_len = _length(case, "query"), _length(case, "key")
        if q_len != k_len or {"bias", "mask", "segment_ids"} & {*case.arrays, *case.options}:
            return None
        window = case.options.get("window")
        reach = max((side for side in window or () if side is not None), default=0)
        # Under half of a window the shorter case would be another one: the window has to stay in play.
        new = halvings(q_len, share, floor=max(128, 2 * reach), power=1.0 if reach else 2.0)
        if new == q_len:
            return None
        seq = 3 - _heads_axis(case)
        axes = {name: {seq: new} for name in ("query", "key", "value")}
        return resized(case, axes, f"cut to {new} of {q_len}")


def _jax_peer(case: Case) -> Peer:
    """jax.nn keeps heads behind the sequence; the arrays are laid out for it beforehand."""
    swap: Callable[[np.ndarray], np.ndarray] = (
        (lambda x: x) if _heads_axis(case) == 2 else (lambda x: np.swapaxes(x, 1, 2))
    )
    options = case.options
    window = options.get("window")

    def prepare(arrays: Arrays) -> tuple[object, ...]:
        query, key, value = (np.ascontiguousarray(swap(arrays[name])) for name in ("query", "key", "value"))
        return query, key, value, arrays.get("bias"), arrays.get("mask")

    def attention(
        query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, mask: jax.Array | None
    ) -> jax.Array:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=options.get("scale"),
            is_causal=options.get("causal", False),
            local_window_size=window,
        )

    names = ("query", "key", "value", "bias", "mask")
    return Peer("jax.nn.dot_product_attention", "jax", prepare, attention, swap, names, _LAID_OUT)


def _torch_peer(case: Case) -> Peer:
    options = case.options
    swapped = _heads_axis(case) == 2
    written_out = {"window", "block_mask"} & set(options) or "mask" in case.arrays
    grouped = case.arrays["query"].shape[_heads_axis(case)] != case.arrays["key"].shape[_heads_axis(case)]

    def prepare(arrays: Arrays) -> tuple[object, ...]:
        import torch

        tensors = [to_torch(arrays[name]) for name in ("query", "key", "value")]
        if swapped:
            tensors = [x.transpose(1, 2) for x in tensors]
        mask = None
        if written_out:  # SDPA has no window: its user writes the positions out
            seen = visible(case, np.arange(_length(case, "query")))
            parts = [x for x in (seen, arrays.get("mask")) if x is not None]
            mask = torch.from_numpy(parts[0] if len(parts) == 1 else parts[0] & parts[1])
        return (*tensors, mask)

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        import torch.nn.functional as F

        causal = options.get("causal", False) and mask is None
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=options.get("scale"), enable_gqa=grouped
        )

    def restore(out: np.ndarray) -> np.ndarray:
        return np.swapaxes(out, 1, 2) if swapped else out

    names = ("query", "key", "value", "mask")
    return Peer("torch scaled_dot_product_attention", "torch", prepare, attention, restore, names, _LAID_OUT)


SUBJECT = _Attention()
