"""The gated unit's peers: two products and an elementwise function, by jax.numpy and by torch; its sample is some of
the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.bench.subject import (
    Arrays,
    Peer,
    Sample,
    Subject,
    fewer_rows,
    jax_peer,
    ours_in_torch,
    sample_of_rows,
    torch_peer,
)
from vishwamai.core.cases import Case

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 16


def _jax(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    g, u = (jnp.dot(x, w, preferred_element_type=jnp.float32) for w in (gate, up))
    return (jax.nn.silu(g) * u).astype(x.dtype)


def _torch(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.silu(x @ gate) * (x @ up)


class _Gated(Subject):
    def peers(self, case: Case) -> list[Peer]:
        if set(case.arrays) != {"x", "gate", "up"} or set(case.options) - {"activation"}:
            return []
        if case.options.get("activation", "silu") != "silu":
            return []
        return [
            jax_peer("jax.nn.silu(x @ gate) * (x @ up)", case, _jax),
            torch_peer("torch silu(x @ gate) * (x @ up)", case, _torch),
        ]

    def in_torch(self, case: Case) -> Peer | None:
        from vishwamai.torch import QTensor, gated_linear_unit

        def unit(x: Tensor, gate: Any = None, up: Any = None, joint: Any = None, **options: Any) -> Tensor:
            return gated_linear_unit(x, (gate, up) if joint is None else joint, **options)

        def int8(
            x: Tensor, gate: Any, up: Any, gate_scales: Any, up_scales: Any, format: str, **options: Any
        ) -> Tensor:
            pairs = (gate, gate_scales), (up, up_scales)
            weights = (QTensor(w, s.detach(), format, -2, None) for w, s in pairs)  # constants, as in the case
            return gated_linear_unit(x, tuple(weights), **options)

        if "config" in case.options or case.options.get("format", "int8") != "int8":  # others' bytes are not the values
            return None
        return ours_in_torch(case, int8 if "format" in case.options else unit)

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        return sample_of_rows(case, arrays, ("x",), _ROWS) or super().sample(case, arrays)

    def smaller(self, case: Case, share: float) -> Case | None:
        return fewer_rows(case, share, ("x",))


SUBJECT = _Gated()
