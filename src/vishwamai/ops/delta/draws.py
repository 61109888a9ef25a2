"""Random calls of the recurrences: lengths at the edges of chunks, decays from none to all, packed sequences."""

from __future__ import annotations

from vishwamai.core.cases import Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.delta.cases import delta_case, state_space_case


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    key_heads = d.choose((1, 1, 2))
    shape = d.choose((1, 1, 2)), key_heads * d.choose((1, 2, 3)), d.choose((1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 130))
    options = {
        "key_heads": key_heads,
        "dtype": d.dtype(),
        "state": d.flag(),
        "segments": d.flag(),
        "return_state": d.flag(),
        "config": d.choose((None, None, 16, 32, 7)),
    }
    dims = d.size(80), d.size(80)
    if d.flag(4):
        return state_space_case("", shape, *dims, skip=d.flag(), **options)
    decay = d.choose((None, 0.0, 0.1, 1.0, 30.0, 200.0))
    return delta_case(
        "", shape, *dims, linear=d.flag(4), decay=decay, channels=d.flag(), beta=d.choose((None, 0, 0.5, 1)), **options
    )
