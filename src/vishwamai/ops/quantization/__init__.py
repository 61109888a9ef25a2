"""Arrays of few bits: rounding to them and back."""

from vishwamai.ops.quantization.api import dequantize, fake_quantize, quantize

__all__ = ["dequantize", "fake_quantize", "quantize"]
