"""The matrix product's peers: `jnp.matmul` with the same epilogue under jit, and torch's; their sample is some rows and
columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, halvings, resized, to_torch, torch_peer
from vishwamai.core.cases import Case
from vishwamai.ops.matmul import gemm
from vishwamai.ops.matmul.packed_weight import PackedWeight, pack_weight

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _COLUMNS = 64, 256
_NAMES = ("a", "b", "bias", "scale_a", "scale_b")
_JAX: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda z: z,
    "relu": jax.nn.relu,
    "relu2": lambda z: jnp.square(jax.nn.relu(z)),
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def _prepare(arrays: Arrays) -> tuple[np.ndarray | None, ...]:
    return tuple(arrays.get(name) for name in _NAMES)


def _out_dtype(case: Case) -> jnp.dtype:
    """The dtype of the result, as the operation itself says."""
    return jax.eval_shape(lambda arrays: case.run(arrays), case.shapes()).dtype


def _jax_gemm(case: Case) -> Callable[..., jax.Array]:
    options, out_dtype = case.options, _out_dtype(case)
    wide = jnp.int32 if case.arrays["a"].dtype == case.arrays["b"].dtype == "int8" else jnp.float32

    def product(
        a: jax.Array, b: jax.Array, bias: jax.Array | None, scale_a: jax.Array | None, scale_b: jax.Array | None
    ) -> jax.Array:
        a = a.swapaxes(-1, -2) if options.get("transpose_a") else a
        b = b.swapaxes(-1, -2) if options.get("transpose_b") else b
        z = jnp.matmul(a, b, preferred_element_type=wide)
        if scale_a is not None:
            z = z * (scale_a[..., :, None] if scale_a.ndim else scale_a)
        if scale_b is not None:
            z = z * (scale_b[..., None, :] if scale_b.ndim else scale_b)
        z = z if bias is None else z + bias[..., None, :]
        return _JAX[options.get("activation")](z).astype(out_dtype)

    return product


def _torch_gemm(case: Case) -> Callable[..., Tensor]:
    import torch
    import torch.nn.functional as F

    options = case.options
    activations: dict[str | None, Callable[[Tensor], Tensor]] = {
        None: lambda z: z,
        "relu": F.relu,
        "relu2": lambda z: F.relu(z) ** 2,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }

    def product(a: Tensor, b: Tensor, bias: Tensor | None, scale_a: object, scale_b: object) -> Tensor:
        del scale_a, scale_b
        a = a.mT if options.get("transpose_a") else a
        b = b.mT if options.get("transpose_b") else b
        z = torch.matmul(a, b) if bias is None else torch.matmul(a, b) + bias
        return activations[options.get("activation")](z)

    return product


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    import torch

    return torch.ops.aten._int_mm(a, b)


def packed(case: Case) -> dict[str, Peer]:
    """Rows times a plain weight that was packed once: `PackedWeight`, and oneDNN's packed weight as torch's compiler
    calls it, which oneDNN has not for bfloat16 on a CPU without AVX-512. Packing is not timed.
    """
    count = case.arrays["a"].shape[0]

    def ours(arrays: Arrays) -> tuple[object, ...]:
        return arrays["a"], pack_weight(arrays["b"])

    def run(a: jax.Array, weight: PackedWeight) -> jax.Array:
        return gemm(a, weight, implementation="native_cpu")

    def theirs(arrays: Arrays) -> tuple[object, ...]:
        import torch

        weight = to_torch(arrays["b"]).T.contiguous()
        return to_torch(arrays["a"]), torch.ops.mkldnn._reorder_linear_weight(weight, count)

    def linear(a: Tensor, weight: Tensor) -> Tensor:
        import torch

        return torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")

    peers = {"ours": Peer("packed", "jax", ours, run)}
    if case.arrays["b"].dtype != "bfloat16" or _packs_bfloat16():
        peers["torch packed"] = Peer("torch, weight packed by oneDNN", "torch", theirs, linear)
    return peers


def _packs_bfloat16() -> bool:
    """Whether torch's oneDNN takes bfloat16 on this CPU."""
    import torch

    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class _Matmul(Subject):
    slack = 1.2

    def peers(self, case: Case) -> list[Peer]:
        if "b" not in case.arrays:  # a quantized weight of several arrays
            return []
        peer_list = [Peer("jnp.matmul", "jax", _prepare, _jax_gemm(case), arguments=_NAMES)]
        dtypes = {case.arrays[name].dtype for name in ("a", "b")}
        plain = not {"scale_a", "scale_b"} & set(case.arrays) and "out_dtype" not in case.options
        if plain and dtypes in ({"float32"}, {"bfloat16"}):

            def prepare(arrays: Arrays) -> tuple[object, ...]:
                return tuple(None if x is None else to_torch(x) for x in _prepare(arrays))

            peer_list.append(
                Peer("torch matmul", "torch", prepare, lambda *args: _torch_gemm(case)(*args), arguments=_NAMES)
            )
        if plain and dtypes == {"int8"} and len(case.arrays["a"].shape) == len(case.arrays["b"].shape) == 2:
            peer_list.append(torch_peer("torch _int_mm", case, _int_mm))
        return peer_list

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        options = case.options
        row_axis = -1 if options.get("transpose_a") else -2
        column_axis = -2 if options.get("transpose_b") else -1
        m, n = arrays["a"].shape[row_axis], arrays["b"].shape[column_axis]
        rng = np.random.default_rng(0)
        rows = np.sort(rng.choice(m, min(m, _ROWS), replace=False))
        columns = np.sort(rng.choice(n, min(n, _COLUMNS), replace=False))
        chosen = {"a": np.take(arrays["a"], rows, row_axis), "b": np.take(arrays["b"], columns, column_axis)}
        for name, index, size in (("bias", columns, n), ("scale_a", rows, m), ("scale_b", columns, n)):
            if name in arrays:
                x = arrays[name]
                chosen[name] = np.take(x, index, -1) if x.ndim and x.shape[-1] == size else x
        inits = {name: dataclasses.replace(case.arrays[name], shape=x.shape) for name, x in chosen.items()}
        return Sample(
            dataclasses.replace(case, arrays=inits),
            chosen,
            lambda outputs: tuple(np.take(np.take(out, rows, -2), columns, -1) for out in outputs),
            f"{len(rows)} of {m} rows, {len(columns)} of {n} columns",
        )

    def smaller(self, case: Case, share: float) -> Case | None:
        if case.options.get("transpose_a"):
            return None
        axes: dict[str, dict[int, int]] = {}
        notes = []
        b = case.arrays["b"]
        if len(b.shape) == 3 and b.shape[0] > 2:  # experts: fewer of them, because their weights cost memory too
            share *= b.shape[0] / 2
            axes = {"a": {0: 2}, "b": {0: 2}}
            notes.append(f"2 of {b.shape[0]} experts")
        tokens = case.arrays["a"].shape[-2]
        new = halvings(tokens, min(share, 1.0), floor=min(tokens, 64))
        if new != tokens:
            axes.setdefault("a", {})[len(case.arrays["a"].shape) - 2] = new
            if "scale_a" in case.arrays and case.arrays["scale_a"].shape[-1:] == (tokens,):
                axes["scale_a"] = {len(case.arrays["scale_a"].shape) - 1: new}
            notes.append(f"{new} of {tokens} tokens")
        return resized(case, axes, "cut to " + ", ".join(notes)) if notes else None


SUBJECT = _Matmul()
