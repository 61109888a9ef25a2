"""A head of its own in the files of a model whose `config.json` says that the embedding table is the head."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vishwamai.models.families import FAMILIES
from vishwamai.models.parameters import TOP_TENSORS
from vishwamai.models.shards import Stored, read_index
from vishwamai.models.text_part import text_tensors

_ROWS = 8192  # compared at a time, so that memory does not grow with the vocabulary


def end_name(family: str, parameter: str) -> str:
    """The tensor of a parameter outside the layers in files of a family; "" where it has none."""
    entry = {**TOP_TENSORS, **FAMILIES[family].tensors}[parameter]
    return "" if entry is None else entry.name


def has_own_head(directory: Path, family: str) -> bool:
    """Whether the files of a family's model have a head that differs from the embedding table. transformers 5 then uses
    that head, as training that writes both and forgets the key means it.
    """
    names = ("model.safetensors", "model.safetensors.index.json")
    if not any((directory / name).is_file() for name in names):
        return False
    index = text_tensors(read_index(directory))
    head, table = (index.get(end_name(family, name)) for name in ("head", "embed"))
    return head is not None and table is not None and not _equal(head, table)


def _equal(first: Stored, second: Stored) -> bool:
    if first.shape != second.shape:
        return False
    a, b = first.read(), second.read()
    return all(np.array_equal(a[i : i + _ROWS], b[i : i + _ROWS]) for i in range(0, len(a), _ROWS))
