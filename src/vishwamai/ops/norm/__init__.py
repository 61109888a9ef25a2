"""Layer and root-mean-square normalization."""

from vishwamai.ops.norm.api import NORM, layer_norm, rms_norm

__all__ = ["NORM", "layer_norm", "rms_norm"]
