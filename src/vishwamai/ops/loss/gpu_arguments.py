"""The arguments of the loss's backward Triton kernel that are one number for each token, bundled."""

from __future__ import annotations

from typing import NamedTuple

from vishwamai.core.types import AnyArray


class Tokens(NamedTuple):
    """Labels, results and their cotangents, `[groups, tokens]`; the last may be None."""

    labels_ptr: AnyArray
    logsumexp_ptr: AnyArray
    dlogsumexp_ptr: AnyArray
    dlabel_ptr: AnyArray
    dsum_ptr: AnyArray
