"""Arrays of few bits: rounding to them and back."""

from vishwamai.ops.quantization.api import dequantize, fake_quantize, quantize
from vishwamai.ops.quantization.code_files import load_codes, save_codes

__all__ = ["dequantize", "fake_quantize", "load_codes", "quantize", "save_codes"]
