"""Random calls of the linear cross entropy: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from typing import Any

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.loss.api import linear_cross_entropy
from vishwamai.ops.loss.cases import Labels, Probabilities


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    tokens = (*((d.choose((1, 2, 3)),) if d.flag(3) else ()), d.size(300))
    vocab, features, dtype = d.size(1024), d.size(300), d.dtype()
    arrays: dict[str, ArrayInit] = {
        "x": ArrayInit((*tokens, features), dtype),
        "weight": ArrayInit((vocab, features), dtype, scale=2 * features**-0.5),
        "labels": Labels(tokens, "int32", "integers", vocab=vocab),
    }
    if d.flag(5):
        arrays["labels"] = Probabilities((*tokens, vocab), d.choose(("float32", dtype)))
    if d.flag(3):
        arrays["bias"] = ArrayInit((vocab,), dtype)
    options: dict[str, Any] = {"reduction": d.choose(("none", "sum", "mean")), "return_logsumexp": d.flag(3)}
    for name, value in (("softcap", 3.0), ("label_smoothing", 0.1), ("z_loss", 0.01)):
        if d.flag(3):
            options[name] = value
    return Case("", "linear_cross_entropy", linear_cross_entropy, arrays, options | d.precision(dtype))
