"""The index of a quantized checkpoint as that of a plain one: which tensors make up a weight, by its format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vishwamai.core.errors import ShapeError
from vishwamai.models.published import codebooks, eight_bits, float4, torchao, words
from vishwamai.models.published.decoded import Decoded, Index
from vishwamai.models.published.settings import Settings

if TYPE_CHECKING:
    from vishwamai.models.shards import Stored


@dataclasses.dataclass(frozen=True)
class Form:
    """The tensors of a weight.

    Attributes:
      parts: endings of their names; the first is the one by which a weight is recognised.
      decode: function of the tensors by ending, the module's name and the settings to the weight.
      options: endings of tensors that a weight may have.
      name: ending of the plain weight.
    """

    parts: tuple[str, ...]
    decode: Callable[[Mapping[str, Stored], str, Settings], Decoded]
    options: tuple[str, ...] = ()
    name: str = ".weight"


_ORDERED = (".weight_zero_point", ".weight_g_idx")
_ROWS = Form((".weight_scale", ".weight"), eight_bits.modelopt)
_NVFP4 = Form((".weight_scale_2", ".weight_scale", ".weight"), float4.modelopt)
_WORDS = (".qweight", ".qzeros", ".scales")
FORMS: Mapping[str, tuple[Form, ...]] = {
    "fp8": (
        _NVFP4,
        Form((".weight_scale_inv", ".weight"), eight_bits.float8),
        Form((".weight_scale", ".weight"), eight_bits.float8),
    ),
    "modelopt": (_NVFP4, _ROWS),
    "compressed-tensors": (
        Form((".weight_global_scale", ".weight_packed", ".weight_scale"), float4.compressed_global, (".weight_shape",)),
        Form((".weight_packed", ".weight_scale"), float4.compressed, (".weight_shape", *_ORDERED)),
        Form((".weight_scale", ".weight"), eight_bits.compressed, _ORDERED),
    ),
    "gptq": (Form(_WORDS, words.gptq, (".g_idx",)),),
    "awq": (Form(_WORDS, words.awq),),
    "mxfp4": (Form(("_blocks", "_scales"), float4.experts, name=""),),
    "bitsandbytes": (
        *(
            Form(
                (codebooks.STATE + kind, ".weight", ".weight.absmax", ".weight.quant_map"),
                codebooks.decode,
                (".weight.nested_absmax", ".weight.nested_quant_map"),
            )
            for kind in codebooks.TYPES
        ),
        Form((".SCB", ".weight"), eight_bits.bytes_of_rows, (".weight_format",)),
    ),
    "torchao": (
        Form(
            ("._weight_qdata", "._weight_scale"),
            torchao.decode,
            ("._weight_zero_point", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale"),
        ),
    ),
}
"""The forms of weights by `quant_method`, those with more tensors first."""

_OF_ACTIVATIONS = tuple(
    f".{name}_{kind}" for name in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point", "global_scale")
)
"""Endings of tensors that say how activations, keys and values are rounded."""


def check_settings(values: Mapping[str, object], source: str) -> Settings:
    """`quantization_config` as the decoders of weights read it.

    Raises:
      UnsupportedError: the format, or an option of it, is not read; the text names it.
    """
    settings = Settings(values, source)
    if not isinstance(settings.method, str) or settings.method not in FORMS:
        raise settings.unsupported("quant_method", settings.method, ", ".join(FORMS))
    settings.check()
    return settings


def decode_index(index: Mapping[str, Stored], values: Mapping[str, object] | None, source: str) -> Index:
    """The index of a checkpoint with its quantized weights as plain ones.

    Args:
      index: all tensors by name.
      values: `quantization_config` of `config.json`, or None.
      source: name of that file, for errors.

    Raises:
      UnsupportedError: the format, or an option of it, is not known; the text names it.
      ShapeError: a tensor of a weight is missing, or does not fit the others.
    """
    if values is None:
        return index
    settings = check_settings(values, source)
    plain = {key: stored for key, stored in index.items() if not key.endswith(_OF_ACTIVATIONS)}
    if len(plain) < len(index):
        settings.log_activations()
    decoded: dict[str, Decoded] = {}
    for form in FORMS[settings.method]:
        for first in [key for key in plain if key.endswith(form.parts[0])]:
            stem = first.removesuffix(form.parts[0])
            absent = [stem + ending for ending in form.parts if stem + ending not in plain]
            if absent:
                raise ShapeError(
                    f"{index[first].path}: tensor `{absent[0]}` is missing; `{first}` of a {settings.method} "
                    "checkpoint needs it."
                )
            parts = {ending: plain.pop(stem + ending) for ending in form.parts}
            parts |= {ending: plain.pop(stem + ending) for ending in form.options if stem + ending in plain}
            decoded[stem + form.name] = form.decode(parts, stem, settings)
    return {**plain, **decoded}
