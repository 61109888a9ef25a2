"""The cross entropy of hidden states through a model's head, over the devices of a mesh."""

from __future__ import annotations

from typing import Any

import vishwamai
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import in_dtype
from vishwamai.models.config import ModelConfig
from vishwamai.training.packing import IGNORED


def cross_entropy(
    config: ModelConfig, hidden: Any, head: Any, labels: Any, axes: MeshAxes = ONE_DEVICE, **options: Any
) -> Any:
    """`linear_cross_entropy` of hidden states `[batch, seq, hidden]` after the last norm; the head is multiplied in
    their dtype, as it is for logits.

    Args:
      head: the device's part of `[vocab, hidden]`, as `axes` says.
      options: further options of `linear_cross_entropy`.
    """
    return vishwamai.linear_cross_entropy(
        hidden,
        head if axes.features else in_dtype(head, hidden.dtype),
        labels,
        softcap=config.final_logit_softcap,
        ignore_index=IGNORED,
        vocab_axis=axes.tensor,
        gather_axis=axes.features,
        **options,
    )
