"""Packed weights kept beside their checkpoint, so that the next start maps them instead of reading, rounding and
packing again.

`DIR/.vishwamai/<form>/` has `weights.bin`, the arrays one after another, each at a multiple of 64 bytes so that XLA
reads them where they lie, and `index.json`: what they are, and what they were made of. They serve the instruction set,
its orders of packed weights, the files and the version of this package that they were made with; where one of those is
another, they are made again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.core import caches, ffi
from vishwamai.core.packed_qtensor import PackedQTensor
from vishwamai.core.qtensor import QTensor
from vishwamai.models.checkpoint import held_parameters
from vishwamai.models.config import read_config
from vishwamai.models.decoder import Decoder
from vishwamai.models.parameters import Parameter, parameter_path
from vishwamai.ops.matmul.packed_weight import DTYPES, PackedWeight, order

_ALIGNMENT = 64
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (PackedWeight, PackedQTensor, QTensor)}


@dataclasses.dataclass(frozen=True)
class Form:
    """How weights are held: their dtype, `quantize` as of `from_pretrained`, and whether the head is int8."""

    dtype: str
    quantize: str | None
    int8_head: bool

    def directory(self, checkpoint: Path) -> Path:
        """Where the packed weights of a checkpoint are kept in this form."""
        return checkpoint / ".vishwamai" / f"{self.quantize or self.dtype}-{ffi.isa()}"


def read_packed(checkpoint: Path, form: Form) -> Decoder | None:
    """The decoder over the kept file's own pages; None where there is none, or it was made of something else."""
    folder = form.directory(checkpoint)
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        data = np.memmap(folder / "weights.bin", np.uint8, "r")
    except (OSError, ValueError):
        return None
    if index.get("made_of") != _made_of(checkpoint, form) or index.get("bytes") != data.size:
        return None

    def array(entry: dict[str, Any]) -> jax.Array:
        dtype, shape = jnp.dtype(entry["dtype"]), tuple(entry["shape"])
        part = data[entry["offset"] : entry["offset"] + dtype.itemsize * math.prod(shape)]
        return jax.device_put(part.view(dtype).reshape(shape))

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        del parameter
        entry = index["parameters"][parameter_path(name, None if layers is None else layers[0])]
        arrays = {field: array(value) for field, value in entry["arrays"].items()}
        if entry["kind"] is None:
            return arrays["values"]
        meta = {field: tuple(v) if isinstance(v, list) else v for field, v in entry["meta"].items()}
        return _KINDS[entry["kind"]](**arrays, **meta)

    return Decoder(read_config(checkpoint), dtype=form.dtype, param_dtype=form.dtype, make=make)


def write_packed(model: Decoder, checkpoint: Path, form: Form) -> Path:
    """Keeps the weights of a packed decoder that was read from a checkpoint; the directory that has them.

    It is whole or absent, and takes the place of one that was made of something else.

    Raises:
      OSError: it cannot be written, or the disk would be left with less free space than the weights take.
    """
    folder, parameters, arrays, end = form.directory(checkpoint), {}, [], 0
    for name, _, layers, held in held_parameters(model):
        value, kind, meta, entries = held.get_value(), None, {}, {}
        fields = {"values": value}
        if type(value).__name__ in _KINDS:
            kind, fields = type(value).__name__, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        for field, part in fields.items():
            if not isinstance(part, jax.Array):
                meta[field] = part
                continue
            end += -end % _ALIGNMENT
            entries[field] = {"dtype": part.dtype.name, "shape": list(part.shape), "offset": end}
            arrays.append((end, part))
            end += part.dtype.itemsize * part.size
        parameters[parameter_path(name, None if layers is None else layers[0])] = {
            "kind": kind,
            "meta": meta,
            "arrays": entries,
        }
    folder.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * end:
        raise OSError(f"{end} bytes are to be written, and the disk has {free} left")
    index = {"made_of": _made_of(checkpoint, form), "bytes": end, "parameters": parameters}
    with caches.temporary_directory(folder.parent) as draft:
        made = draft / "made"
        made.mkdir()
        with open(made / "weights.bin", "wb") as file:
            for offset, part in arrays:
                file.seek(offset)
                file.write(np.asarray(part).reshape(-1).view(np.uint8).data)
        (made / "index.json").write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    return folder


def _made_of(checkpoint: Path, form: Form) -> dict[str, Any]:
    """What the weights depend on, as JSON gives it back."""
    files = sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors*")])
    stats = [(path.name, path.stat()) for path in files]
    return {
        "version": vishwamai.__version__,
        "isa": ffi.isa(),
        "orders": {dtype: list(order(dtype, ffi.isa())) for dtype in DTYPES},
        **dataclasses.asdict(form),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
    }
