"""A block of Llama 3 8B on the public operations, to be asked about without a TPU:

vishwamai explain examples/transformer_block.py:block --target v5e
vishwamai check   examples/transformer_block.py:block --target v5e --target v6e
vishwamai check   examples/transformer_block.py:gradients --target v5p
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import vishwamai

BATCH, TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE = 1, 2048, 4096, 32, 8, 128, 14336


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of `[batch, heads, tokens, head_dim]` (Su et al., "RoFormer", 2021), with Llama 3's base."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2])[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def block(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Attention and feed-forward, each behind a norm; `x` is `[batch, tokens, hidden]`."""
    batch, tokens, hidden = x.shape
    normed = vishwamai.rms_norm(x, weights["attention_norm"], eps=1e-5)
    qkv = vishwamai.gemm(normed, weights["qkv"])
    qkv = qkv.reshape(batch, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).swapaxes(1, 2)
    query, key, value = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
    mixed = vishwamai.flash_attention(rotate(query), rotate(key), value, causal=True)
    mixed = vishwamai.gemm(mixed.swapaxes(1, 2).reshape(batch, tokens, hidden), weights["output"])
    normed, x = vishwamai.rms_norm(mixed, weights["mlp_norm"], eps=1e-5, residual=x)
    gate = vishwamai.gemm(normed, weights["gate"], activation="silu")
    return x + vishwamai.gemm(gate * vishwamai.gemm(normed, weights["up"]), weights["down"])


def gradients(x: jax.Array, weights: dict[str, jax.Array]) -> Any:
    """Gradients of the weights, for a loss that sums the squares of the block's result."""
    return jax.grad(lambda weights: jnp.sum(jnp.square(block(x, weights).astype(jnp.float32))))(weights)


def example_args() -> tuple[Any, ...]:
    """The shapes of Llama 3 8B; `vishwamai check` and `explain` call this."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = {
        "attention_norm": array(HIDDEN),
        "qkv": array(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "output": array(HIDDEN, HIDDEN),
        "mlp_norm": array(HIDDEN),
        "gate": array(HIDDEN, WIDE),
        "up": array(HIDDEN, WIDE),
        "down": array(WIDE, HIDDEN),
    }
    return array(BATCH, TOKENS, HIDDEN), weights
