"""Packed weights kept in the user's cache, so that the next start maps them instead of reading, rounding and packing
again.

`<cache>/weights/<digest>/` has `weights.bin`, the arrays one after another, each at a multiple of 64 bytes so that XLA
reads them where they lie, and `index.json`: what they are, and what they were made of. The digest is of the instruction
set, its orders of packed weights, the version of this package, and the checkpoint's files: their sizes, times, inodes,
headers and samples. Files that came with a checkpoint are not taken for its weights, nor those that another user could
have written; what is damaged is made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.core import caches, ffi
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.types import PyTree
from vishwamai.models.config import read_config
from vishwamai.models.decoder import Decoder
from vishwamai.models.parameters import Parameter, parameter_path
from vishwamai.models.shifted_weight import ShiftedWeight
from vishwamai.models.variables import parameter_variables
from vishwamai.ops.matmul.packed_weight import DTYPES, PackedWeight, order

_ALIGNMENT = 64
_KINDS: dict[str, Callable[..., PyTree]] = {kind.__name__: kind for kind in (PackedWeight, PackedQTensor, QTensor)}


@dataclasses.dataclass(frozen=True)
class Form:
    """How weights are held: their dtype, `quantize` as of `from_pretrained`, and whether the head is int8."""

    dtype: str
    quantize: str | None
    int8_head: bool


def read_packed(checkpoint: Path, form: Form) -> Decoder | None:
    """The decoder over the kept file's own pages; None where there is none, it is damaged, or it was made of something
    else.
    """
    try:
        return _read(checkpoint, form)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _read(checkpoint: Path, form: Form) -> Decoder:
    origin = _origin(checkpoint, form)
    folder = _folder(origin)
    with caches.open_private(folder / "index.json") as file:
        index = json.load(file)
    digest, index = index["digest"], index["index"]
    with caches.open_private(folder / "weights.bin") as file:
        if digest != _digest(index) or index["made_of"] != origin or index["samples"] != _samples(file):
            raise ValueError("the files are damaged")
        data = np.memmap(file, np.uint8, "r")

    def array(entry: dict[str, Any]) -> jax.Array:
        dtype, shape = jnp.dtype(entry["dtype"]), tuple(entry["shape"])
        part = data[entry["offset"] : entry["offset"] + dtype.itemsize * math.prod(shape)]
        return jax.device_put(part.view(dtype).reshape(shape))

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> PyTree:
        del parameter
        entry = index["parameters"][parameter_path(name, None if layers is None else layers[0])]
        arrays = {field: array(value) for field, value in entry["arrays"].items()}
        shifts = arrays.pop("shifts", None)
        if entry["kind"] is None:
            return arrays["values"]
        meta = {field: tuple(v) if isinstance(v, list) else v for field, v in entry["meta"].items()}
        weight = _KINDS[entry["kind"]](**arrays, **meta)
        return weight if shifts is None else ShiftedWeight(weight, shifts)

    return Decoder(read_config(checkpoint), dtype=form.dtype, param_dtype=form.dtype, make=make)


def write_packed(model: Decoder, checkpoint: Path, form: Form) -> Path:
    """Keeps the weights of a packed decoder that was read from a checkpoint; the directory that has them.

    It is whole or absent, and takes the place of one that was made of something else.

    Raises:
      OSError: it cannot be written, or the disk would be left with less free space than the weights take.
    """
    parameters, arrays, end = {}, [], 0
    for name, _, layers, variable in parameter_variables(model):
        value, kind, meta, entries, shifts = variable.get_value(), None, {}, {}, {}
        if isinstance(value, ShiftedWeight):
            value, shifts = value.weight, {"shifts": value.shifts}
        fields = {"values": value}
        if type(value).__name__ in _KINDS:
            kind, fields = type(value).__name__, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        for field, part in (fields | shifts).items():
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
    origin = _origin(checkpoint, form)
    folder = _folder(origin)
    caches.private_directory(folder.parent)
    for entry in _stale(folder.parent, origin):
        shutil.rmtree(entry, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * end:
        raise OSError(f"{end} bytes are to be written, and the disk has {free} left")
    with caches.temporary_directory(folder.parent) as draft:
        inside = draft / "entry"
        inside.mkdir(mode=0o700)
        with open(inside / "weights.bin", "w+b") as file:
            for offset, part in arrays:
                file.seek(offset)
                file.write(np.asarray(part).reshape(-1).view(np.uint8).data)
            file.flush()
            samples = _samples(file)
        index = {"made_of": origin, "samples": samples, "parameters": parameters}
        (inside / "index.json").write_text(json.dumps({"digest": _digest(index), "index": index}), encoding="utf-8")
        for path in inside.iterdir():
            path.chmod(0o600)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(inside, folder)
    return folder


def _folder(origin: dict[str, object]) -> Path:
    root = caches.cache_directory("weights")
    if root is None:
        raise OSError(caches.no_directory("weights"))
    return root / _digest(origin)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _stale(root: Path, origin: dict[str, object]) -> list[Path]:
    """Entries of a checkpoint and a form that were made of other files or by another version."""
    entries = []
    for path in root.glob("*/index.json"):
        try:
            with caches.open_private(path) as file:
                source = json.load(file)["index"]["made_of"]
            same = all(source[key] == origin[key] for key in ("checkpoint", "isa", *_FORM))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        if same:
            entries.append(path.parent)
    return entries


_FORM = tuple(field.name for field in dataclasses.fields(Form))


def _origin(checkpoint: Path, form: Form) -> dict[str, object]:
    """What the weights depend on, as JSON gives it back."""
    files = sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors*"), *checkpoint.glob("*.gguf")])
    return {
        "version": vishwamai.__version__,
        "isa": ffi.isa(),
        "orders": {dtype: list(order(dtype, ffi.isa())) for dtype in DTYPES},
        **dataclasses.asdict(form),
        "checkpoint": str(checkpoint.resolve()),
        "files": [_fingerprint(path) for path in files],
    }


def _fingerprint(path: Path) -> list[str | int]:
    """A file's name, size, times and inode, and a digest of samples: a file of equal size and time is another one."""
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        return [path.name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, _samples(file)]


_SAMPLES, _SAMPLE = 64, 4096


def _samples(file: IO[bytes]) -> str:
    """A digest of a file's size and of blocks at its beginning, at its end and evenly between."""
    number = file.fileno()
    size = os.fstat(number).st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE)
    for place in sorted({last * i // _SAMPLES for i in range(_SAMPLES + 1)}):
        digest.update(os.pread(number, _SAMPLE, place))
    return digest.hexdigest()
