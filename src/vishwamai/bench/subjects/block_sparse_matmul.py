"""The block-sparse product's peer: torch's product with the dense weight, which one would run without blocks; its
sample is some of the rows.
"""

from __future__ import annotations

import numpy as np

from vishwamai.bench.subject import Arrays, Peer, Sample, Subject, sample_of_rows, to_torch
from vishwamai.core.cases import Case

_ROWS = 16


class _Sparse(Subject):
    def peers(self, case: Case) -> list[Peer]:
        indices = case.options["indices"]
        if set(case.options) != {"indices", "shape"} or not isinstance(indices, np.ndarray):
            return []
        rows, columns = case.options["shape"]
        _, height, width = case.arrays["values"].shape

        def prepare(arrays: Arrays) -> tuple[object, ...]:
            values = arrays["values"]
            dense = np.zeros((rows // height, columns // width, height, width), values.dtype)
            np.add.at(dense, (indices[:, 0], indices[:, 1]), values)  # a block may be there twice
            return to_torch(arrays["dense"]), to_torch(dense.swapaxes(1, 2).reshape(rows, columns))

        return [Peer("torch dense", "torch", prepare, lambda x, weight: x @ weight, arguments=("dense", "weight"))]

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        return sample_of_rows(case, arrays, ("dense",), _ROWS) or super().sample(case, arrays)


SUBJECT = _Sparse()
