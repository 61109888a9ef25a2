"""The normalizations' peers: plain jax.numpy under jit, and torch's own; their sample is some of the rows."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, fewer_rows, sample_of_rows, to_torch
from vishwamai.core.cases import Case
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.norm import layer_norm

_ROWS = 256
_NAMES = ("x", "scale", "offset", "residual")


def _prepare(arrays: Arrays) -> tuple[np.ndarray | None, ...]:
    return tuple(arrays.get(name) for name in _NAMES)


def _jax(layer: bool, eps: float) -> Callable[..., PyTree]:
    def norm(x: AnyArray, scale: AnyArray, offset: AnyArray, residual: AnyArray) -> PyTree:
        total = x if residual is None else x + residual
        s = total.astype(jnp.float32)
        if layer:
            s = s - jnp.mean(s, axis=-1, keepdims=True)
        y = s * lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + eps)
        y = y if scale is None else y * scale
        y = y if offset is None else y + offset
        y = y.astype(x.dtype)
        return y if residual is None else (y, total)

    return norm


def _torch(layer: bool, eps: float) -> Callable[..., PyTree]:
    import torch.nn.functional as F

    def norm(x: AnyArray, scale: AnyArray, offset: AnyArray, residual: AnyArray) -> PyTree:
        total = x if residual is None else x + residual
        shape = x.shape[-1:]
        y = F.layer_norm(total, shape, scale, offset, eps) if layer else F.rms_norm(total, shape, scale, eps)
        return y if residual is None else (y, total)

    return norm


class _Norm(Subject):
    def peers(self, case: Case) -> list[Peer]:
        layer, eps = case.call is layer_norm, case.options.get("eps", 1e-6)
        name = "layer_norm" if layer else "rms_norm"
        peer_list = [Peer("jax.numpy", "jax", _prepare, _jax(layer, eps), arguments=_NAMES)]
        if layer or "offset" not in case.arrays:

            def prepare(arrays: Arrays) -> tuple[object, ...]:
                return tuple(None if a is None else to_torch(a) for a in _prepare(arrays))

            peer_list.append(
                Peer(f"torch {name}", "torch", prepare, lambda *args: _torch(layer, eps)(*args), arguments=_NAMES)
            )
        return peer_list

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        return sample_of_rows(case, arrays, ("x", "residual"), _ROWS) or super().sample(case, arrays)

    def smaller(self, case: Case, share: float) -> Case | None:
        return fewer_rows(case, share, ("x", "residual"))


SUBJECT = _Norm()
