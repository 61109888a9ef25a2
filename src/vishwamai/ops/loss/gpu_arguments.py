"""The arguments of the loss's backward Triton kernel that are one number for each token, bundled."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Labels, results and their cotangents, `[groups, tokens]`; the last may be None."""

    labels_ptr: Any
    logsumexp_ptr: Any
    dlogsumexp_ptr: Any
    dlabel_ptr: Any
    dsum_ptr: Any
