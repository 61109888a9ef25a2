"""Cases of the block-sparse product: small ones for the contract suite, and a layer of a real model with a sparse
weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.core.types import PyTree
from vishwamai.ops.sparse.api import block_sparse_matmul
from vishwamai.ops.sparse.patterns import bigbird, block_indices, local


def _case(
    name: str,
    mask: np.ndarray,
    block: tuple[int, int],
    batch: tuple[int, ...],
    dtype: str = "float32",
    *,
    indices: PyTree = None,
    transpose: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: Any,
) -> Case:
    coordinates = block_indices(mask) if indices is None else indices
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    blocks = len(coordinates[1]) if isinstance(coordinates, tuple) else len(coordinates)
    arrays = {
        "dense": ArrayInit((*batch, shape[1 if transpose else 0]), dtype),
        "values": ArrayInit((blocks, *block), dtype, scale=0.1),
    }
    options = {"indices": coordinates, "shape": shape, **options} | ({"transpose": True} if transpose else {})
    return Case(name, "block_sparse_matmul", block_sparse_matmul, arrays, options, frozenset(tags))


def _mask(*rows: str) -> np.ndarray:
    return np.array([[letter == "#" for letter in row] for row in rows])


_HOLES = _mask("#.#", "...", "##.")  # a row without blocks, and every column with another count
_EMPTY_COLUMN = _mask("#..#", "#..#", "...#")
_CSR = np.array([0, 2, 2, 4]), np.array([0, 2, 0, 1])
_TWICE = np.array([[1, 0], [0, 1], [1, 0], [0, 0], [1, 1]])

CASES = (
    _case("holes bf16", _HOLES, (128, 128), (2, 50), "bfloat16"),
    _case("tall blocks, an empty column, transposed", _EMPTY_COLUMN, (256, 128), (24,), transpose=True),
    _case("unsorted and twice", np.ones((2, 2), bool), (128, 128), (17,), indices=_TWICE),
    _case("rows of blocks (CSR)", _HOLES, (128, 128), (3, 8), "bfloat16", indices=_CSR),
    _case("small blocks", local(5, 1, 1), (16, 8), (33,)),
    _case("float16", _HOLES, (32, 32), (20,), "float16"),
    _case("float64", _HOLES, (8, 12), (5, 7), "float64"),
    _case("one row", _HOLES, (16, 24), ()),
    _case("no blocks", np.zeros((2, 3), bool), (8, 8), (4,)),
    _case(
        "a 4096 x 4096 weight with a quarter of its blocks, 512 tokens",
        bigbird(32, 3, 1, 4),
        (128, 128),
        (512,),
        "bfloat16",
        tags=("model",),
    ),
)

_SMALL = Case(
    "small",
    "block_sparse_matmul",
    block_sparse_matmul,
    {"dense": ArrayInit((8, 6, 256)), "values": ArrayInit((4, 128, 128), scale=0.1)},
    {"indices": np.array([[0, 1], [1, 0], [0, 0], [1, 2]]), "shape": (256, 384)},
)

FACTS = Facts(
    small=_SMALL,
    batched=("dense",),
    poison=Poison("unsorted and twice", "dense"),
    declines={
        "pallas_tpu": {
            "small blocks": "the blocks are 16 x 8",
            "one row": "the blocks are 16 x 24",
            "float16": "`dense` is float16",
            "float64": "`dense` is float64",
            "no blocks": "an array is empty",
        },
        "triton": {
            "float64": "`dense` is float64",
            "no blocks": "an array is empty",
        },
    },
    # An `async-update` of five operands.
    unreadable=frozenset({("one row", "tpu7x")}),
)
