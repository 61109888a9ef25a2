"""The grouped product's peer: a loop over the groups in torch. (`jax.lax.ragged_dot` multiplies every row with every
matrix.) Its sample is some of the groups, with their rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, halvings, resized, torch_peer
from vishwamai.core.cases import Case

if TYPE_CHECKING:
    from torch import Tensor

_GROUPS = 4


def _every_row_has_a_group(case: Case) -> bool:
    sizes = case.options["group_sizes"]
    return set(case.options) == {"group_sizes"} and sizes.ndim == 1 and sizes.sum() == case.arrays["lhs"].shape[0]


def _first(case: Case, count: int) -> Case:
    """The first `count` groups, with their rows."""
    sizes = case.options["group_sizes"]
    rows = int(sizes[:count].sum())
    axes = {name: {0: count if name == "rhs" else rows} for name in case.arrays}
    smaller = resized(case, axes, f"cut to {count} of {len(sizes)} groups")
    return dataclasses.replace(smaller, options={"group_sizes": sizes[:count]})


class _Grouped(Subject):
    def peers(self, case: Case) -> list[Peer]:
        if not _every_row_has_a_group(case):
            return []
        rows = [int(size) for size in case.options["group_sizes"]]

        def loop(lhs: Tensor, rhs: Tensor) -> Tensor:
            import torch

            return torch.cat([x @ y for x, y in zip(torch.split(lhs, rows), rhs, strict=True)])

        return [torch_peer("torch, a loop", case, loop)]

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        return self._some_groups(case, arrays) or super().sample(case, arrays)

    def gradient_sample(self, case: Case, arrays: Arrays) -> Sample:
        return self._some_groups(case, arrays) or super().gradient_sample(case, arrays)

    def _some_groups(self, case: Case, arrays: Arrays) -> Sample | None:
        """None where there are no more groups than a sample takes."""
        if not _every_row_has_a_group(case) or len(case.options["group_sizes"]) <= _GROUPS:
            return None
        part = _first(case, _GROUPS)
        rows = part.arrays["lhs"].shape[0]
        chosen = {name: x[: part.arrays[name].shape[0]] for name, x in arrays.items()}

        def pick(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
            return tuple(y[: _GROUPS if y.ndim == 3 else rows] for y in outputs)  # matrices of groups, or rows

        return Sample(part, chosen, pick, f"{_GROUPS} of {len(case.options['group_sizes'])} groups")

    def smaller(self, case: Case, share: float) -> Case | None:
        if not _every_row_has_a_group(case):
            return None
        groups = len(case.options["group_sizes"])
        count = halvings(groups, share, floor=_GROUPS)
        return None if count == groups else _first(case, count)


SUBJECT = _Grouped()
