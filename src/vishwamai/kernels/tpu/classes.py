"""Operations as objects: options once, arrays at every call."""

from __future__ import annotations

import dataclasses
from typing import Any

from vishwamai.core.arguments import checked
from vishwamai.core.config import check_block_size, kernel_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.kernels import functions


def _check_block_size(kernel: str, block_size: int | None) -> None:
    if block_size is not None:
        check_block_size(f"{kernel}: `block_size`", block_size)


@checked
@dataclasses.dataclass(frozen=True)
class TPUGEMMKernel:
    """A matrix product with its options.

    Attributes:
      block_size: about how many rows and columns a tile has; None takes the tuned ones.
      use_bfloat16: round float32 operands to bfloat16 before they are multiplied; None takes the ambient setting.
      precision: mode of float32 products; None takes the ambient one.

    >>> import jax.numpy as jnp
    >>> TPUGEMMKernel(use_bfloat16=True)(jnp.ones((2, 64, 32)), jnp.ones((32, 8))).shape
    (2, 64, 8)
    """

    block_size: int | None = None
    use_bfloat16: bool | None = None
    precision: PrecisionConfig | str | None = None

    def __post_init__(self) -> None:
        _check_block_size("TPUGEMMKernel", self.block_size)
        resolve_precision(self.precision, PrecisionConfig.DEFAULT)

    def __call__(self, a: object, b: object, **options: Any) -> Any:
        """`a @ b`; options as `vishwamai.gemm`."""
        options.setdefault("precision", self.precision)
        return functions.gemm(a, b, block_size=self.block_size, use_bfloat16=self.use_bfloat16, **options)


@checked
@dataclasses.dataclass(frozen=True)
class TPUAttentionKernel:
    """Attention with its options.

    Attributes:
      use_flash: False computes by the plain reference that holds the score matrix.
      block_size: edge of the tiles; None takes the tuned ones.
      causal: query i sees no key after it.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 4, 32, 64))
    >>> TPUAttentionKernel(use_flash=True)(x, x, x).shape
    (2, 4, 32, 64)
    """

    use_flash: bool = True
    block_size: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        _check_block_size("TPUAttentionKernel", self.block_size)

    def __call__(self, query: object, key: object, value: object, mask: object = None, **options: Any) -> Any:
        """Attention of `[batch, heads, seq, head_dim]` arrays; options as `vishwamai.flash_attention`."""
        options.setdefault("causal", self.causal)
        return functions.flash_attention(
            query, key, value, mask, block_size=self.block_size, use_flash=self.use_flash, **options
        )


@checked
@dataclasses.dataclass(frozen=True)
class TPULayerNormKernel:
    """Layer normalization with its options.

    Attributes:
      eps: added to the variance.
      use_fused_ops: False leaves the operation to XLA.
      strict: raise instead of falling back to XLA where the kernel declines.

    >>> import jax.numpy as jnp
    >>> TPULayerNormKernel(eps=1e-5)(jnp.ones((3, 128)), jnp.ones(128)).shape
    (3, 128)
    """

    eps: float = 1e-6
    use_fused_ops: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ShapeError(f"TPULayerNormKernel: `eps` is {self.eps!r}; pass a number of 0 or more, such as 1e-6.")

    def __call__(self, x: object, scale: object = None, bias: object = None, **options: Any) -> Any:
        """The normalized `x`; options as `vishwamai.layer_norm`."""
        options.setdefault("eps", self.eps)
        with kernel_config(strict=True) if self.strict else kernel_config():
            return functions.layer_norm(x, scale, bias, use_fused_ops=self.use_fused_ops, **options)
