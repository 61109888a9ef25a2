"""The activations' peers: `jax.nn` and torch; their sample is some of the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

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
from vishwamai.core.dropout import seeds

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 256


def _jax(case: Case) -> Callable[[jax.Array], jax.Array]:
    if case.call.__name__ == "silu":
        return jax.nn.silu
    if case.call.__name__ == "relu2":
        return lambda x: jnp.square(jax.nn.relu(x))
    return lambda x: jax.nn.gelu(x, approximate=case.options.get("approximate", False))


def _torch(case: Case) -> Callable[..., Tensor]:
    def call(x: Tensor, *key: Tensor) -> Tensor:
        import torch.nn.functional as F

        if case.call.__name__ == "silu":
            return F.silu(x)
        if case.call.__name__ == "relu2":
            return F.relu(x).square()
        y = F.gelu(x, approximate="tanh" if case.options.get("approximate") else "none")
        return F.dropout(y, case.options["rate"]) if key else y

    return call


class _Activation(Subject):
    def peers(self, case: Case) -> list[Peer]:
        if "key" in case.arrays:  # dropout: each framework has its own random numbers
            return [torch_peer("torch gelu, dropout", case, _torch(case), checked=False)]
        return [
            jax_peer(f"jax.nn {case.call.__name__}", case, _jax(case)),
            torch_peer(f"torch {case.call.__name__}", case, _torch(case)),
        ]

    def in_torch(self, case: Case) -> Peer | None:
        if "key" not in case.arrays:
            return super().in_torch(case)
        from vishwamai.torch import fused_gelu_dropout

        ours = ours_in_torch(case, lambda x, key, **options: fused_gelu_dropout(x, seed=key, **options))
        assert ours is not None

        def prepare(arrays: Arrays) -> tuple[object, ...]:
            """With the seeds that JAX draws of the key."""
            bits = seeds(jax.random.wrap_key_data(arrays["key"]), 1, 1)
            return ours.prepare({**arrays, "key": np.asarray(bits, np.int64).reshape(2)})

        return dataclasses.replace(ours, prepare=prepare)

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        rows = None if "key" in arrays or not case.arrays["x"].shape else sample_of_rows(case, arrays, ("x",), _ROWS)
        return rows or super().sample(case, arrays)

    def smaller(self, case: Case, share: float) -> Case | None:
        return fewer_rows(case, share, ("x",))


SUBJECT = _Activation()
