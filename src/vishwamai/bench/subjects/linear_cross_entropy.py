"""The loss's peers: its plain form, which holds the logits, by jax.numpy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.bench.subject import Peer, Subject, fewer_rows, jax_peer, torch_peer
from vishwamai.core.cases import Case

if TYPE_CHECKING:
    from torch import Tensor


class _Loss(Subject):
    def peers(self, case: Case) -> list[Peer]:
        if set(case.arrays) != {"x", "weight", "labels"} or set(case.options) - {"reduction"}:
            return []
        reduction = case.options.get("reduction", "mean")

        def plain(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            z = jnp.dot(x, weight.T, preferred_element_type=jnp.float32)
            counts = labels != -100
            at_label = jnp.take_along_axis(z, jnp.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
            loss = jnp.where(counts, jax.nn.logsumexp(z, axis=-1) - at_label, 0.0)
            return loss if reduction == "none" else loss.sum() / (counts.sum() if reduction == "mean" else 1)

        def torch_plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            import torch.nn.functional as F

            z = (x @ weight.T).float()
            loss = F.cross_entropy(z.flatten(0, -2), labels.long().flatten(), reduction=reduction)
            return loss.reshape(labels.shape) if reduction == "none" else loss

        return [jax_peer("jnp logits, logsumexp", case, plain), torch_peer("torch cross_entropy", case, torch_plain)]

    def smaller(self, case: Case, share: float) -> Case | None:
        return fewer_rows(case, share, ("x", "labels"))


SUBJECT = _Loss()
