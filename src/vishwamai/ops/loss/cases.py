"""Cases of the loss: small ones for the contract suite, and the last layers of real models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.ops.loss.api import linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Labels(ArrayInit):
    """Labels 0 ... vocab-1, every eighth of them ignored.

    Attributes:
      vocab: size of the vocabulary.
    """

    vocab: int = 1

    def make(self, rng: np.random.Generator) -> np.ndarray:
        labels = rng.integers(0, self.vocab, self.shape).astype(np.int32)
        return np.where(rng.random(self.shape) < 1 / 8, np.int32(-100), labels)


@dataclasses.dataclass(frozen=True)
class Probabilities(ArrayInit):
    """Probabilities of all entries, some of them 0; a row's sum is from 0.5 to 1."""

    def make(self, rng: np.random.Generator) -> np.ndarray:
        raw = np.maximum(rng.standard_normal(self.shape), 0.0) + 1e-6
        return (raw / raw.sum(-1, keepdims=True) * rng.uniform(0.5, 1.0, (*self.shape[:-1], 1))).astype(self.dtype)


def _case(
    name: str,
    tokens: tuple[int, ...],
    vocab: int,
    features: int,
    dtype: str = "float32",
    *,
    bias: bool = False,
    class_weights: bool = False,
    soft: str | None = None,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    arrays: dict[str, ArrayInit] = {
        "x": ArrayInit((*tokens, features), dtype),
        # Weights of variance 4/features give logits of some size, so that the softmax is neither even nor saturated.
        "weight": ArrayInit((vocab, features), dtype, scale=2 * features**-0.5),
        "labels": Labels(tokens, "int32", "integers", vocab=vocab),
    }
    if soft is not None:
        arrays["labels"] = Probabilities((*tokens, vocab), soft)
    if bias:
        arrays["bias"] = ArrayInit((vocab,), dtype)
    if class_weights:
        arrays["class_weights"] = ArrayInit((vocab,), "float32", "positive")
    return Case(name, "linear_cross_entropy", linear_cross_entropy, arrays, options, frozenset(tags))


_EVERYTHING: dict[str, Any] = {
    "bias": True,
    "softcap": 3.0,
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "return_logsumexp": True,
}

CASES = (
    _case("each token (5, 7) 50 words", (5, 7), 50, 40, reduction="none"),
    _case("700 words float32", (150,), 700, 100),
    _case("700 words bfloat16", (2, 75), 700, 100, "bfloat16", reduction="sum"),
    _case("everything float32", (70,), 600, 48, reduction="sum", **_EVERYTHING),
    _case("everything bfloat16", (2, 65), 300, 48, "bfloat16", reduction="none", **_EVERYTHING),
    _case("class weights float32", (3, 21), 90, 40, class_weights=True, z_loss=0.01),
    _case("class weights bfloat16", (40,), 300, 48, "bfloat16", class_weights=True, reduction="sum"),
    _case("probabilities float32", (3, 20), 700, 40, soft="float32", **_EVERYTHING),
    _case("probabilities bfloat16", (33,), 90, 48, "bfloat16", soft="bfloat16"),
    _case("one token", (1,), 130, 24),
    _case("float16", (9,), 70, 32, "float16"),
    _case("float64", (9,), 70, 32, "float64", **_EVERYTHING),
    _case("high", (20,), 150, 64, precision="high"),
    _case("no tokens", (0, 3), 20, 16, reduction="none"),
    # 4096 tokens of real models; the logits alone would be 0.8 GiB in float32 for GPT-2, 2.0 for Llama 3, 3.9 for Gemma
    # 2.
    _case("GPT-2 small", (4096,), 50257, 768, "bfloat16", tags=("model",)),
    _case("Llama 3 8B", (4096,), 128256, 4096, "bfloat16", tags=("model", "long")),
    _case("Gemma 2 9B", (4096,), 256000, 3584, "bfloat16", softcap=30.0, z_loss=1e-4, tags=("model", "long")),
)

_SMALL = Case(
    "small",
    "linear_cross_entropy",
    linear_cross_entropy,
    {
        "x": ArrayInit((8, 6, 40)),
        "weight": ArrayInit((50, 40), scale=0.3),
        "labels": Labels((8, 6), "int32", "integers", vocab=50),
        "bias": ArrayInit((50,)),
    },
    {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none", "return_logsumexp": True},
)

_SOFT = dict.fromkeys(("probabilities float32", "probabilities bfloat16"), "`labels` are probabilities")

FACTS = Facts(
    small=_SMALL,
    batched=("x", "labels"),
    poison=Poison("each token (5, 7) 50 words", "x"),
    declines={
        "pallas_tpu": {
            "float16": "`x` is float16",
            "float64": "`x` is float64",
            "high": 'precision="high"',
            "no tokens": "there are no tokens",
            **_SOFT,
        },
        "native_cpu": {
            "no tokens": "there are no tokens",
            **_SOFT,
        },
        "triton": {
            **_SOFT,
            "float64": "`x` is float64",
            "no tokens": "there are no tokens",
        },
    },
    # Three bfloat16 products for one of float32 keep 16 bits; the reference on a CPU keeps 24.
    coarser={"high": dict.fromkeys(("native_cpu", "triton"), 2.0**-16)},
    # The gather of a token's class weight goes to the SparseCore.
    unreadable=frozenset(
        (f"class weights {dtype}", chip) for dtype in ("float32", "bfloat16") for chip in ("v5p", "v6e", "tpu7x")
    ),
)
