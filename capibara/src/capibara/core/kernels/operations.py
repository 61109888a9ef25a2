"""The functions behind the methods: `vishwamai`'s operations under Capibara's keywords. Las funciones detrás de los
métodos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax.sharding import Mesh, PartitionSpec

import vishwamai
from vishwamai.core import callers
from vishwamai.core.spec import as_array
from vishwamai.kernels import KernelError, ShapeError
from vishwamai.ops.matmul.einsum import check_optimize
from vishwamai.parallel import ring_attention


def attention(
    query: Any, key: Any, value: Any, attention_mask: Any, dropout_key: Any, *, dropout_rate: float, causal: bool
) -> Any:
    """`vishwamai.flash_attention`; a mask of integers counts as bool."""
    return vishwamai.flash_attention(
        query,
        key,
        value,
        mask=boolean(attention_mask),
        causal=causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )


def boolean(mask: Any) -> Any:
    """A mask as bool, True = attend.

    Raises:
      ShapeError: it is floating, which might mean an additive bias.
    """
    if mask is None:
        return None
    mask = as_array("flash_attention", "attention_mask", mask)
    if mask.dtype == jnp.bool_:
        return mask
    if jnp.issubdtype(mask.dtype, jnp.integer):
        return mask.astype(jnp.bool_)
    raise ShapeError(
        f"flash_attention: `attention_mask` has dtype {mask.dtype}; pass bool or integers (nonzero = attend), such as "
        "`mask > 0` of 0 and 1, or `mask >= 0` of an additive mask."
    )


def sequence_parallel_attention(
    query: Any, key: Any, value: Any, attention_mask: Any, dropout_key: Any, *, dropout_rate: float, causal: bool
) -> Any:
    """Attention with the sequence split over all devices: `vishwamai.parallel.ring_attention`.

    Where the devices do not divide the keys, or a causal mask has another number of queries than of keys, each device
    has its rows and all keys: a mask says what a row sees, and dropout draws other bits on every device.
    """
    devices = jax.devices()
    rows, columns = query.shape[2], key.shape[2]
    if rows % len(devices):
        raise ShapeError(
            f"flash_attention: `sequence_parallel` splits {rows} query rows over {len(devices)} devices, which does "
            "not divide evenly; pad the sequence."
        )
    mesh = Mesh(np.array(devices), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    mask = boolean(attention_mask)
    if mask is not None:
        mask = jnp.reshape(mask, (1,) * (4 - mask.ndim) + mask.shape)
    split, unsplit = PartitionSpec(None, None, "sequence"), PartitionSpec()
    around = columns % len(devices) == 0 and (rows == columns or not causal)
    mask_spec = split if mask is not None and mask.shape[2] == rows else unsplit

    def one_device(query: Any, key: Any, value: Any, mask: Any, dropout_key: Any) -> Any:
        device = jax.lax.axis_index("sequence")
        if around:
            options = {"causal": causal, "dropout_rate": dropout_rate, "dropout_key": dropout_key}
            return ring_attention(query, key, value, None, mask, axis="sequence", **options)
        if causal:
            first = device * query.shape[2]
            seen = (first + jnp.arange(query.shape[2]))[:, None] >= jnp.arange(columns)
            mask = seen if mask is None else mask & seen
        device_key = None if dropout_key is None else jax.random.fold_in(dropout_key, device)
        return attention(query, key, value, mask, device_key, dropout_rate=dropout_rate, causal=False)

    keys = split if around else unsplit
    specs = (split, keys, keys, mask_spec, unsplit)
    return jax.shard_map(one_device, mesh=mesh, in_specs=specs, out_specs=split)(query, key, value, mask, dropout_key)


def matmul(a: Any, b: Any, *, transpose_a: bool, transpose_b: bool, implementation: str | None) -> Any:
    """`vishwamai.gemm`."""
    return vishwamai.gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b, implementation=implementation)


def einsum(*operands: Any, equation: str, optimize: Any) -> Any:
    """`vishwamai.einsum`."""
    return vishwamai.einsum(equation, *operands, optimize=optimize)


def frugal_path(equation: str, operands: Sequence[Any], optimize: Any) -> tuple[tuple[int, ...], ...]:
    """An order of contraction in which no intermediate result is larger than the largest operand (opt_einsum's
    `memory_limit`).
    """
    check_optimize(optimize, len(operands))
    shapes = [jnp.shape(x) for x in operands]
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimize, memory_limit="max_input")
    return tuple(map(tuple, path))


def layer_norm(x: Any, weight: Any, bias: Any, *, eps: float, implementation: str | None) -> Any:
    """`vishwamai.layer_norm`."""
    return vishwamai.layer_norm(x, weight, bias, eps=eps, implementation=implementation)


def gelu_dropout(x: Any, key: Any, *, rate: float, training: bool) -> Any:
    """`vishwamai.fused_gelu_dropout`."""
    return vishwamai.fused_gelu_dropout(x, rate, key=key, deterministic=not training)


def routing(
    tokens: Any, router_weights: Any, *, num_experts: int, top_k: int, load_balancing: bool, dtype: str | None
) -> Any:
    """`vishwamai.moe_routing`; without `load_balancing` the two losses are left out, and XLA does not compute them.

    Without `router_weights` the tokens are the logits where they have a feature for each expert; else the router is
    random, of a fixed seed, and a warning says so.
    """
    if num_experts < 1:
        raise KernelError(f"moe_routing_kernel: `num_experts` is {num_experts}; pass 1 or more.")
    if router_weights is None:
        width = tokens.shape[-1]
        if width == num_experts:
            router_weights = jnp.eye(num_experts, dtype=jnp.float32)
        else:
            callers.warn(
                f"moe_routing_kernel: there are no `router_weights`, and the tokens have {width} features for "
                f"{num_experts} experts, so they are not logits: a random router of seed 0 decides; pass "
                f"router_weights of shape ({width}, {num_experts})."
            )
            router_weights = jax.random.normal(jax.random.key(0), (width, num_experts)) * width**-0.5
    result = vishwamai.moe_routing(
        tokens if dtype is None else tokens.astype(dtype), router_weights, num_experts, top_k
    )
    return result if load_balancing else result._replace(load_balance_loss=None, z_loss=None)


LAYER_NORM_EPS = 1e-5
"""Added to the variance by every layer normalization of these kernels, unless a call says otherwise."""

BATCHED: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight=None, bias=None, eps=LAYER_NORM_EPS, **options: vishwamai.layer_norm(
        x, weight, bias, eps=eps, **options
    ),
    "rms_norm": lambda x, weight=None, **options: vishwamai.rms_norm(x, weight, **options),
    "matmul": vishwamai.gemm,
    "flash_attention": vishwamai.flash_attention,
    "gelu": vishwamai.gelu,
    "softmax": vishwamai.softmax,
}
"""What `batch_operations` can do, by name."""


def batch(inputs: Sequence[Any], parameters: Any, *, operation_type: str) -> list[Any]:
    """One operation on every input, in one program: inputs of one shape are stacked and mapped, others follow one
    another.

    Args:
      inputs: arrays, or tuples of arrays for operations of several.
      parameters: keywords of all calls (a dict), or of each (a list of dicts).
    """
    operation = BATCHED[operation_type]
    calls = [x if isinstance(x, (tuple, list)) else (x,) for x in inputs]
    shapes = {tuple((jnp.shape(x), str(jnp.result_type(x))) for x in call) for call in calls}
    if len(shapes) == 1 and isinstance(parameters, dict):
        stacked = [jnp.stack(column) for column in zip(*calls)]
        result = jax.vmap(lambda *arrays: operation(*arrays, **parameters))(*stacked)
        return [jax.tree.map(lambda y, i=i: y[i], result) for i in range(len(calls))]
    return [operation(*call, **keywords) for call, keywords in zip(calls, parameters_of(parameters, len(calls)))]


def parameters_of(parameters: Any, count: int) -> list[dict[str, Any]]:
    """The keywords of every call.

    Raises:
      KernelError: there are not as many as calls.
    """
    if parameters is None or isinstance(parameters, dict):
        return [parameters or {}] * count
    if len(parameters) != count:
        raise KernelError(
            f"batch_operations: {len(parameters)} `parameters` are given for {count} `inputs`; pass one dict for all, "
            "or one for each."
        )
    return list(parameters)
