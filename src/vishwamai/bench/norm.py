"""The normalizations' peers: plain jax.numpy under jit, and torch's own; their sample is some of the rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, halvings, resized, to_torch
from vishwamai.core.cases import Case
from vishwamai.ops.norm import layer_norm

_ROWS = 256
_NAMES = ("x", "scale", "offset", "residual")


def _prepare(arrays: Arrays) -> tuple[Any, ...]:
    return tuple(arrays.get(name) for name in _NAMES)


def _jax(layer: bool, eps: float) -> Any:
    def norm(x: Any, scale: Any, offset: Any, residual: Any) -> Any:
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


def _torch(layer: bool, eps: float) -> Any:
    import torch.nn.functional as F

    def norm(x: Any, scale: Any, offset: Any, residual: Any) -> Any:
        total = x if residual is None else x + residual
        shape = x.shape[-1:]
        y = F.layer_norm(total, shape, scale, offset, eps) if layer else F.rms_norm(total, shape, scale, eps)
        return y if residual is None else (y, total)

    return norm


class _Norm(Subject):
    def peers(self, case: Case) -> list[Peer]:
        layer, eps = case.call is layer_norm, case.options.get("eps", 1e-6)
        name = "layer_norm" if layer else "rms_norm"
        found = [Peer("jax.numpy", "jax", _prepare, _jax(layer, eps), arguments=_NAMES)]
        if layer or "offset" not in case.arrays:

            def prepare(arrays: Arrays) -> tuple[Any, ...]:
                return tuple(None if a is None else to_torch(a) for a in _prepare(arrays))

            found.append(
                Peer(f"torch {name}", "torch", prepare, lambda *args: _torch(layer, eps)(*args), arguments=_NAMES)
            )
        return found

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        shape = case.arrays["x"].shape
        count = int(np.prod(shape[:-1]))
        if count <= _ROWS:
            return super().sample(case, arrays)
        rows = np.sort(np.random.default_rng(0).choice(count, _ROWS, replace=False))

        def take(x: np.ndarray) -> np.ndarray:
            return x.reshape(count, shape[-1])[rows]

        chosen = {name: take(a) if name in ("x", "residual") else a for name, a in arrays.items()}
        inits = {name: dataclasses.replace(case.arrays[name], shape=a.shape) for name, a in chosen.items()}
        return Sample(
            dataclasses.replace(case, arrays=inits),
            chosen,
            lambda outputs: tuple(map(take, outputs)),
            f"{_ROWS} of {count} rows",
        )

    def smaller(self, case: Case, share: float) -> Case | None:
        tokens = case.arrays["x"].shape[0]
        new = halvings(tokens, share, floor=128)
        if new == tokens:
            return None
        axes = {name: {0: new} for name in ("x", "residual") if name in case.arrays}
        return resized(case, axes, f"cut to {new} of {tokens} tokens")


SUBJECT = _Norm()
