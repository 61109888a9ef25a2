"""`CodeTensor`s in a file: a safetensors file whose metadata has the formats, so that every reader of such files sees
plain arrays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import jax.numpy as jnp

from vishwamai.core.arguments import described
from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.core.quantized.code_tensor import CodeFormat, CodeTensor

_KEY = "vishwamai.codes"
_FIELDS = ("codes", "scales", "zeros")


def save_codes(path: str | os.PathLike[str], tensors: Mapping[str, CodeTensor]) -> None:
    """Writes quantized weights by name into one safetensors file.

    The arrays are `NAME.codes`, `NAME.scales` and, with zero points, `NAME.zeros`. The metadata entry
    "vishwamai.codes" has the matrix and the format of each name, as JSON.

    Args:
      path: a file, which is replaced.
      tensors: weights by name.

    Raises:
      ShapeError: a value is not a CodeTensor.
      KernelError: the file cannot be written.

    >>> import tempfile, os, jax.numpy as jnp
    >>> from vishwamai import CodeFormat, load_codes, quantize
    >>> weight = quantize(jnp.ones((16, 4)), CodeFormat("int3", bits=3), axis=-2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_codes(os.path.join(folder, "w.safetensors"), {"w": weight})
    ...     print(load_codes(os.path.join(folder, "w.safetensors")))
    {'w': CodeTensor(int3[16,4], bits=3, block_size=None)}
    """
    from safetensors import SafetensorError
    from safetensors.flax import save_file

    path = _checked("save_codes", path)
    if not isinstance(tensors, Mapping):
        raise ShapeError(f"save_codes: `tensors` is {described(tensors)}; pass a dict of CodeTensors by name.")
    arrays, about = {}, {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, CodeTensor):
            raise ShapeError(f"save_codes: {name!r} is a {type(tensor).__name__}; pass CodeTensors, from `quantize`.")
        parts = {field: getattr(tensor, field) for field in _FIELDS}
        arrays |= {f"{name}.{field}": part for field, part in parts.items() if part is not None}
        about[name] = {"matrix": tensor.matrix, "format": tensor.format.to_json()}
    try:
        save_file(arrays, path, {_KEY: json.dumps(about)})
    except SafetensorError as error:
        raise KernelError(f"save_codes: {path} cannot be written: {error}") from error


def load_codes(path: str | os.PathLike[str]) -> dict[str, CodeTensor]:
    """The quantized weights of a file that `save_codes` wrote, bit for bit.

    Raises:
      KernelError: the file cannot be read, or has no such weights.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from vishwamai import CodeFormat, load_codes, quantize, save_codes
    >>> weight = quantize(jnp.ones((16, 4)), CodeFormat("int3", bits=3), axis=-2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_codes(os.path.join(folder, "codes.safetensors"), {"up": weight})
    ...     weights = load_codes(os.path.join(folder, "codes.safetensors"))
    >>> weights["up"].shape
    (16, 4)
    """
    from safetensors import SafetensorError, safe_open

    path = _checked("load_codes", path)
    try:
        opened = safe_open(path, "flax")
    except (OSError, SafetensorError) as error:
        raise KernelError(f"load_codes: {path} cannot be read: {error}; pass a file of `save_codes`.") from error
    with opened as file:
        names = set(file.keys())
        about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
        missing = [name for name in about if not {f"{name}.codes", f"{name}.scales"} <= names]
        if not about or missing:
            lack = f"the arrays of {', '.join(missing)}" if missing else f"the metadata entry {_KEY!r}"
            raise KernelError(f"load_codes: {path} lacks {lack}; pass a file that `save_codes` wrote.")

        def tensor(name: str, entry: dict) -> CodeTensor:
            codes, scales = (jnp.asarray(file.get_tensor(f"{name}.{field}")) for field in _FIELDS[:2])
            zeros = jnp.asarray(file.get_tensor(f"{name}.zeros")) if f"{name}.zeros" in names else None
            k, n = entry["matrix"]
            return CodeTensor(codes, scales, zeros, (k, n), CodeFormat.from_json(entry["format"]))

        return {name: tensor(name, entry) for name, entry in about.items()}


def _checked(function: str, path: object) -> str:
    if not isinstance(path, (str, os.PathLike)) or not path:
        raise ShapeError(f"{function}: `path` is {described(path)}; pass the path of a file.")
    return os.fspath(path)
