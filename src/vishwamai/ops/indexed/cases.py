"""Cases of attention over chosen tokens: small ones for the contract suite, and layers of real models."""

from __future__ import annotations

from typing import Any

import jax

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.ops.indexed.api import indexed_attention


def latent_keys(query: jax.Array, key: jax.Array, indices: jax.Array, **how: Any) -> jax.Array:
    """`indexed_attention` over keys whose first features are the values."""
    return indexed_attention(query, key, None, indices, **how)


def indexed_case(
    name: str,
    shape: tuple[int, int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    dtype: str = "float32",
    *,
    kv_heads: int = 1,
    latent: bool = False,
    shared: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    """A case of `indexed_attention`.

    Args:
      shape: (batch, heads, queries).
      lengths: number of keys, and of entries for each query. The entries are numbers from -8 to 8, so that some name no
        key, and some a key twice.
      dims: features of a key and of a value.
      latent: the values are the keys' first features.
      shared: all batches have the same indices.
    """
    batch, _, queries = shape
    keys, chosen = lengths
    arrays = {"query": ArrayInit((*shape, dims[0]), dtype), "key": ArrayInit((batch, kv_heads, keys, dims[0]), dtype)}
    if latent:
        options["value_dim"] = dims[1]
    else:
        arrays["value"] = ArrayInit((batch, kv_heads, keys, dims[1]), dtype)
    arrays["indices"] = ArrayInit((1 if shared else batch, queries, chosen), "int32", "integers")
    call: Any = latent_keys if latent else indexed_attention
    return Case(name, "indexed_attention", call, arrays, options, frozenset(tags))


CASES = (
    *(indexed_case(f"indexed {t}", (2, 4, 37), (9, 5), (24, 40), t, kv_heads=2) for t in ("float32", "bfloat16")),
    indexed_case("latent", (2, 3, 20), (40, 7), (24, 16), latent=True, scale=0.3),
    indexed_case("latent bfloat16", (1, 8, 33), (12, 16), (40, 32), "bfloat16", latent=True),
    indexed_case("a key for each head", (1, 3, 10), (6, 4), (8, 16), kv_heads=3),
    indexed_case("shared indices", (3, 2, 5), (9, 4), (16, 8), shared=True),
    indexed_case("one query", (4, 4, 1), (9, 6), (16, 16), kv_heads=2),
    indexed_case("float16", (1, 2, 7), (9, 5), (16, 16), "float16"),
    indexed_case("float64", (1, 2, 7), (9, 5), (16, 8), "float64"),
    indexed_case("nothing chosen", (1, 2, 3), (9, 0), (8, 8)),
    indexed_case("no keys", (1, 2, 3), (0, 4), (8, 8)),
    indexed_case("no queries", (2, 2, 0), (9, 4), (8, 8)),
    # A step of decoding at 32,768 tokens.
    indexed_case(
        "DeepSeek V3.2", (1, 128, 8), (262144, 2048), (576, 512), "bfloat16", latent=True, scale=0.1, tags=("model",)
    ),
    indexed_case("GLM-5", (1, 64, 8), (262144, 2048), (576, 512), "bfloat16", latent=True, scale=0.1, tags=("model",)),
)

FACTS = Facts(
    small=Case(
        "small",
        "indexed_attention",
        indexed_attention,
        {
            "query": ArrayInit((8, 4, 6, 8)),
            "key": ArrayInit((8, 2, 9, 8)),
            "value": ArrayInit((8, 2, 9, 16)),
            "indices": ArrayInit((8, 6, 5), "int32", "integers"),
        },
    ),
    batched=("query", "key", "value", "indices"),
    poison=Poison("indexed float32", "query"),
)
