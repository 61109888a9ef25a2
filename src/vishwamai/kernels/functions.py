"""The operations under the names and keywords of the kernel modules; `tpu`, `gpu` and `cpu` offer them.

Each takes the options of the operation it names, too: `**options` goes there as it is. torch tensors go to the
operation of `vishwamai.torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import vishwamai
from vishwamai.core import callers
from vishwamai.core.arguments import checked
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import KernelError, ShapeError, UnsupportedError
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.core.value_checks import check_values


def _operation(name: str, *arrays: object, jax_only: bool = False) -> Callable[..., PyTree]:
    """`vishwamai`'s operation, or that of `vishwamai.torch` for torch tensors.

    Raises:
      UnsupportedError: torch tensors, for an operation or an option that `vishwamai.torch` has not.
    """
    if not any(type(x).__module__.partition(".")[0] == "torch" for x in arrays):
        return getattr(vishwamai, name)
    import vishwamai.torch as operations

    if jax_only or not hasattr(operations, name):
        subject = "these options are" if jax_only else "this operation is"
        raise UnsupportedError(f"{name}: {subject} for JAX arrays only; pass `jnp.asarray(tensor)`.")
    return getattr(operations, name)


def _tiles(name: str, block_size: int | None, options: Mapping[str, object]) -> dict[str, int]:
    """The field of the configuration that a `block_size` is.

    Raises:
      KernelError: a `config` names its tiles besides.
    """
    if block_size is None:
        return {}
    if options.get("config") is not None:
        raise KernelError(
            f"{name}: `block_size` is {block_size} and `config` is {options['config']}; pass one of them."
        )
    return {"block_size": block_size}


@checked
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    block_size: int | None = None,
    use_flash: bool = True,
    **options: Any,
) -> Any:
    """Attention in linear memory; `vishwamai.flash_attention` with the mask in fourth place.

    Args:
      query: `[batch, heads, q_len, head_dim]`.
      key: `[batch, kv_heads, kv_len, head_dim]`.
      value: `[batch, kv_heads, kv_len, v_dim]`.
      mask: bool, True = attend; integers, 1 = attend and 0 = hide; or floating numbers, which are added to the scaled
        logits as `bias` is (0 = attend, -inf or a large negative number = hide). It broadcasts to
        `[batch, heads, q_len, kv_len]`. A warning names floating zeros and ones, which hide nothing.
      block_size: edge of the tiles, in elements; None takes the tuned ones, which are seldom slower.
      use_flash: False computes by the plain reference that holds the score matrix.
      **options: `causal`, `window`, `bias`, `softcap` and the others of `vishwamai.flash_attention`.

    Returns:
      `[batch, heads, q_len, v_dim]` in the query's dtype.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 100, 64))
    >>> flash_attention(x, x, x, block_size=128, causal=True).shape
    (1, 4, 100, 64)
    """
    requested: dict[str, Any] = _tiles("flash_attention", block_size, options) | (
        {} if use_flash else {"use_flash": False}
    )
    operation = _operation("flash_attention", query, key, value)
    mask, added = _mask_and_bias(mask)
    if added is not None:
        options["bias"] = added if options.get("bias") is None else options["bias"] + added
    with kernel_config(**requested):
        return operation(query, key, value, mask=mask, **options)


def _mask_and_bias(mask: AnyArray) -> tuple[AnyArray, AnyArray]:
    """(bool mask or None, what is added to the logits or None) of a mask of any kind.

    Raises:
      ShapeError: integers other than 0 and 1, where they are known.
    """
    if mask is None:
        return None, None
    of_jax = not type(mask).__module__.startswith("torch")
    if of_jax:
        mask = as_array("flash_attention", "mask", mask)
    kind = str(mask.dtype).removeprefix("torch.")
    if kind == "bool":
        return mask, None
    if "float" in kind:
        if of_jax:
            check_values(_warn_of_zeros_and_ones, mask)
        else:
            _warn_of_zeros_and_ones(mask)
        return None, mask
    if of_jax:
        check_values(_check_integers, mask)
    else:
        _check_integers(mask)
    return mask != 0, None


def _warn_of_zeros_and_ones(mask: AnyArray) -> None:
    """Warns of a floating mask, of NumPy or torch, that looks like one of 0 and 1."""
    if bool(((mask == 1) | (mask == 0)).all()) and bool((mask == 1).any()):
        kind = str(mask.dtype).removeprefix("torch.")
        callers.warn(
            f"flash_attention: `mask` is {kind} and has zeros and ones alone; floating numbers are added to the "
            "logits, so it hides nothing. If ones mean attend, pass `mask != 0`."
        )


def _check_integers(mask: AnyArray) -> None:
    """Checks an integer mask, of NumPy or torch."""
    if not bool(((mask == 1) | (mask == 0)).all()):
        kind = str(mask.dtype).removeprefix("torch.")
        raise ShapeError(
            f"flash_attention: `mask` is {kind} and has numbers other than 0 and 1; pass bool or 0 and 1 to say what "
            "attends, or floating numbers to add to the logits."
        )


@checked
def gemm(a: Any, b: Any, *, block_size: int | None = None, use_bfloat16: bool | None = None, **options: Any) -> Any:
    """Matrix product; `vishwamai.gemm` with a choice of the products' dtype.

    Args:
      a: `[..., M, K]`.
      b: `[..., K, N]`.
      block_size: about how many rows and columns a tile has; None takes the tuned ones.
      use_bfloat16: True rounds float32 operands to bfloat16 before they are multiplied; sums and the result stay
        float32. None takes the ambient setting.
      **options: `bias`, `activation`, `transpose_a`, `out_dtype` and the others of `vishwamai.gemm`.

    >>> import jax.numpy as jnp
    >>> gemm(jnp.ones((5, 300)), jnp.ones((300, 7)), use_bfloat16=True, activation="relu").dtype
    dtype('float32')
    """
    requested: dict[str, Any] = _tiles("gemm", block_size, options) | (
        {} if use_bfloat16 is None else {"use_bfloat16": use_bfloat16}
    )
    operation = _operation("gemm", a, b)
    with kernel_config(**requested):
        return operation(a, b, **options)


@checked
def layer_norm(x: Any, scale: Any = None, bias: Any = None, *, use_fused_ops: bool = True, **options: Any) -> Any:
    """Layer normalization over the last axis; `vishwamai.layer_norm` with its offset called `bias`.

    Args:
      x: `[..., features]`.
      scale: `[features]`, or None for 1.
      bias: `[features]`, or None for 0.
      use_fused_ops: False leaves the operation to XLA instead of a kernel that reads memory once.
      **options: `eps`, `residual` and the others of `vishwamai.layer_norm`.

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.ones((4, 256)), jnp.ones(256), jnp.zeros(256)).shape
    (4, 256)
    """
    if not use_fused_ops:
        options.setdefault("implementation", "xla")
    return _operation("layer_norm", x, jax_only=not use_fused_ops)(x, scale, bias, **options)


@checked
def block_sparse(dense: Any, sparse_values: Any, indices: Any, *, block_size: int | None = None, **options: Any) -> Any:
    """Product with a block-sparse matrix; `vishwamai.block_sparse_matmul`.

    Args:
      dense: `[..., rows]`.
      sparse_values: `[blocks, block_rows, block_columns]`, the blocks that are there.
      indices: `[blocks, 2]`, (block row, block column) of each; or the pair (row starts, block columns) of block CSR.
      block_size: required edge of the blocks; None takes any.
      **options: `shape`, `transpose`, `precision` and the others of `vishwamai.block_sparse_matmul`.

    Raises:
      ShapeError: the blocks have other edges than `block_size`.

    >>> import jax.numpy as jnp, numpy as np
    >>> block_sparse(jnp.ones((3, 4)), jnp.ones((1, 2, 2)), np.array([[1, 0]]), block_size=2, shape=(4, 2)).tolist()
    [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    """
    if not hasattr(sparse_values, "shape"):
        sparse_values = as_array("block_sparse", "sparse_values", sparse_values)
    if block_size is not None and tuple(sparse_values.shape[1:]) != (block_size, block_size):
        raise ShapeError(
            f"block_sparse: `sparse_values` has blocks of shape {tuple(sparse_values.shape[1:])}, but `block_size` is "
            f"{block_size}; pass blocks of ({block_size}, {block_size}), or leave `block_size` out."
        )
    return _operation("block_sparse_matmul", dense, sparse_values)(dense, sparse_values, indices, **options)
