"""Random calls of the causal convolution: filters longer than the sequence, states, packed sequences."""

from __future__ import annotations

from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.conv.api import causal_conv1d


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    dtype = d.dtype()
    batch, seq, channels, width = d.choose((1, 2, 3)), d.size(200), d.size(130), d.choose((1, 2, 3, 4, 4, 7))
    arrays = {
        "x": ArrayInit((batch, seq, channels), dtype),
        "weight": ArrayInit((channels, width), d.choose((dtype, "float32")), scale=0.5),
    }
    if d.flag():
        arrays["bias"] = ArrayInit((channels,), d.choose((dtype, "float32")))
    if d.flag():
        arrays["initial_state"] = ArrayInit((batch, width - 1, channels), dtype)
    if d.flag():
        arrays["segment_ids"] = ArrayInit((batch, seq), "int32", "segments")
    options = {"activation": d.choose((None, "silu", *ACTIVATIONS)), "return_state": d.flag()}
    return Case("", "causal_conv1d", causal_conv1d, arrays, options)
