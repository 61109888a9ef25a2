"""How the hidden states of a text become one vector, as the files of sentence-transformers say.

Reimers, Gurevych, "Sentence-BERT" (2019).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.values import read_json

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

MODES = ("mean", "cls", "last")
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
"""Modes by the names of sentence-transformers, older and newer."""


@checked
@dataclasses.dataclass(frozen=True)
class Pooling:
    """One vector of a text.

    Attributes:
      mode: "mean" (of all tokens), "cls" (the first token's state) or "last" (the last token's).
      normalize: the vector has length 1.

    >>> import jax.numpy as jnp
    >>> hidden = jnp.array([[[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]]])
    >>> mask = jnp.array([[True, True, False]])
    >>> [Pooling(mode, False)(hidden, mask)[0].tolist() for mode in MODES]
    [[2.0, 2.0], [3.0, 4.0], [1.0, 0.0]]
    """

    mode: str = "mean"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ShapeError(f"Pooling: `mode` is {self.mode!r}; pass {', '.join(MODES)}.")

    def __call__(
        self, hidden: Float[Array, "batch seq hidden"], mask: Bool[Array, "batch seq"]
    ) -> Float[Array, "batch hidden"]:
        """Vectors `[batch, hidden]`, float32 or wider, of hidden states; `mask` is True for tokens, which come first.

        A row without tokens gives 0 (mean) or the state of its first place.
        """
        hidden = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        if self.mode == "mean":
            weights = mask[:, :, None].astype(hidden.dtype)
            vectors = (hidden * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
        else:
            index = jnp.zeros_like(mask, jnp.int32)[:, 0]
            if self.mode == "last":
                index = jnp.maximum(mask.sum(axis=1, dtype=jnp.int32) - 1, 0)
            vectors = jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
        if self.normalize:
            vectors = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors


def read_mode(path: Path, prompts: bool = False) -> str:
    """The mode of a pooling's own `config.json`.

    Args:
      path: the file.
      prompts: the model has prompts, whose tokens must count.

    Raises:
      UnsupportedError: it is not one of `MODES`; the text names it.
    """
    values: dict[str, Any] = read_json(path)
    if prompts and values.get("include_prompt", True) is not True:
        raise UnsupportedError(
            f"{path}: `include_prompt` is {values['include_prompt']!r}; prompts are always included."
        )
    chosen = sorted(name for name, value in values.items() if name.startswith("pooling_mode_") and value is True)
    if isinstance(values.get("pooling_mode"), str):
        chosen = [values["pooling_mode"]]
    if len(chosen) != 1 or chosen[0] not in _FLAGS:
        raise UnsupportedError(f"{path}: the pooling is {chosen or 'none'}; one of {', '.join(_FLAGS)} is computed.")
    return _FLAGS[chosen[0]]
