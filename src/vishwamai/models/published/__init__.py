"""Quantized checkpoints as people publish them: their tensors seen as the plain ones that the decoder expects.

Each format stores a weight as several tensors. `decode_index` replaces them by one `Decoded`: values and scales, as a
`QTensor` has them. It is held so (`quantize="keep"` of `from_pretrained`), or read as the plain weight that it stands
for, which takes the memory of the dtype that is asked for.

A weight is recognised by its tensors, so lists of modules that are left out are not read. 4-bit numbers with zero
points are held as int8: `q - zero` lies in [-16, 15], which int4 does not have.
"""

from vishwamai.models.published.decoded import Computed, Decoded, Index
from vishwamai.models.published.index import check_settings, decode_index

__all__ = ["Computed", "Decoded", "Index", "check_settings", "decode_index"]
