"""What fits: the dtype of keys, the number of sequences and their length for the memory at hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from vishwamai.core.errors import DeviceError
from vishwamai.inference.load import Load
from vishwamai.inference.loading import plan_load
from vishwamai.models.config import read_config

COMMON, FEWEST, SHORTEST = 4096, 4, 512
"""Tokens that a sequence should have, sequences that should run at once, and the shortest length of a sequence."""


def fit_load(directory: str | Path, *, max_sequences: int = 32, max_length: int | None = None, **options: Any) -> Load:
    """`plan_load` of the first of these choices whose sequences all fit at their full length.

    1. As many sequences as may run, down to 4, of 4096 tokens or the model's own length.
    2. The same with keys and values in int8.
    3. Both again with sequences of half the length, down to 512 tokens.
    4. Two sequences, and then one, of the shortest length.

    Where a sequence of `COMMON` tokens fits, and no length was passed, the longest that the pages hold is allowed.

    Args:
      directory: argument of `plan_load`.
      max_sequences: most sequences at once.
      max_length: most tokens of a sequence; None: those of the model.
      options: further arguments of `plan_load`; a `kv_dtype` among them stays.

    Raises:
      DeviceError: nothing fits; the text is that of `plan_load` for the smallest choice.
    """
    common = min(max_length or COMMON, read_config(directory).max_positions)
    chosen = options.pop("kv_dtype", None)
    dtypes = (None, "int8") if chosen is None else (chosen,)
    lengths = list(itertools.takewhile(lambda n: n >= min(SHORTEST, common), (common >> i for i in itertools.count())))
    counts = [max_sequences]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    many, few = [n for n in counts if n >= min(FEWEST, max_sequences)], [n for n in counts if n < FEWEST]
    choices = [(length, dtype, count) for length in lengths for dtype in dtypes for count in many]
    choices += [(lengths[-1], dtypes[-1], count) for count in few]
    load, failure = None, None
    for length, dtype, count in choices:
        try:
            load = plan_load(directory, kv_dtype=dtype, max_sequences=count, max_length=length, **options)
        except DeviceError as error:
            failure = error
            continue
        if load.num_pages >= count * load.limits.pages_per_sequence:
            free = max_length is None and length == common
            return plan_load(directory, kv_dtype=dtype, max_sequences=count, **options) if free else load
    if load is not None:  # its sequences share pages
        return load
    assert failure is not None
    raise failure


def reason(load: Load, max_sequences: int) -> str:
    """What was chosen, for the first line of a command."""
    limits = load.limits
    text = (
        f"fits: {limits.max_sequences} sequences of up to {limits.max_length} tokens, keys and values in "
        f"{load.kv_dtype}"
    )
    fewer = [] if limits.max_sequences == max_sequences else [f"{max_sequences} sequences do not fit"]
    fewer += [] if load.kv_dtype == load.dtype else [f"keys and values in {load.dtype} do not fit"]
    return text + (f" ({'; '.join(fewer)})" if fewer else "")
