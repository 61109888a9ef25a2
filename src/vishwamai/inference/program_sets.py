"""A directory with all programs of a server, compiled elsewhere: `vishwamai compile` writes it, `serve` reads it.

The compiler of TPUs needs none, so programs are compiled for shapes on devices that libtpu describes, and a start on
the chip reads them. `programs.json` has what decides them, by name, so that a start that they do not fit says which
entry differs. Each program is a file of `kept_programs`. It is machine code: its directory is as trusted as this
package, and one that another user could have written is declined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import vishwamai
from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.compiled import in_words, tracing_for
from vishwamai.core import caches
from vishwamai.core.config import current_config
from vishwamai.core.errors import DeviceError
from vishwamai.core.hardware import tpu_for
from vishwamai.core.target import Target
from vishwamai.core.types import PyTree
from vishwamai.inference import kept_programs
from vishwamai.inference.assembly import assemble
from vishwamai.inference.compiled_function import cached
from vishwamai.inference.load import Load, form_of_directory
from vishwamai.inference.pools import kv_dtype_of
from vishwamai.inference.programs import Programs
from vishwamai.inference.sharding import logical_rules
from vishwamai.models.shapes import decoder_shapes

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from vishwamai.models import Decoder, ModelConfig

FILE = "programs.json"
"""The file that describes the others."""

_FORMAT = 1

_JAX = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings of JAX that change what is traced."""

_VARIABLES = ("XLA_FLAGS", "VISHWAMAI_CPU_ISA", "VISHWAMAI_CPU_THREADS")
"""Variables of the environment that change programs of a CPU."""

OPTIONS = {
    "dtype": "--dtype",
    "quantize": "--quantize",
    "kv_dtype": "--kv-dtype",
    "max_sequences": "--max-sequences",
    "max_tokens": "--step-tokens",
    "max_length": "--max-length",
    "page_size": "--page-size",
    "step_sizes": "--mixed-tokens or --itl",
    "num_states": "--num-states",
    "num_pages": "--memory",
    "drafts": "--guesses or --draft-tokens",
    "mesh": "--mesh",
    "adapters": "--max-adapters and --max-adapter-rank",
}
"""The options of commands that decide an entry of `fingerprint`."""


def fingerprint(load: Load) -> dict[str, str]:
    """What decides the programs of a load, by name: its devices, the versions and the source that trace and compile
    them, the configuration of JAX and of kernels, the model's configuration, and every size and dtype.
    """
    limits, on_tpu = load.limits, load.devices[0].platform == "tpu"
    values: dict[str, object] = {"devices": _devices_text(load)}
    values |= {name: importlib.metadata.version(name) for name in kept_programs.PACKAGES}
    source = kept_programs.source_digest()
    if on_tpu:
        compiler = libtpu.identity()
        values |= {"libtpu": compiler["libtpu"], "options of libtpu": compiler.get("options", [])}
    else:
        source = hashlib.sha256(repr(kept_programs.source_of_cpu()).encode()).hexdigest()
        values |= {name: os.environ.get(name) for name in _VARIABLES}
    values |= {"vishwamai": f"{vishwamai.__version__} ({source[:12]})"}
    values |= {name: jax.config.values[name] for name in _JAX}
    with load.optimization.of_kernels.kernels():
        values |= _fields("kernels", current_config())
    values |= {
        "dtype": load.dtype,
        "quantize": load.quantize,
        "kv_dtype": load.kv_dtype,
        "max_sequences": limits.max_sequences,
        "max_tokens": limits.max_tokens,
        "max_length": limits.max_length,
        "page_size": limits.page_size,
        "step_sizes": limits.mixed_sizes,
        "num_states": load.num_states,
        "num_pages": load.num_pages,
        "drafts": load.drafts,
        "mesh": load.mesh,
        "adapters": load.adapters,
    }
    values |= _fields("model", load.config)
    values |= {} if load.draft is None else _fields("draft", load.draft.config)
    return {name: str(value) for name, value in values.items()}


def _fields(prefix: str, value: Any) -> dict[str, str]:
    return {f"{prefix}.{field.name}": repr(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _devices_text(load: Load) -> str:
    """The chip; of several their number and the sides of their slice; of a CPU the processor."""
    mesh = load.device_mesh
    devices = load.devices[:1] if mesh is None else list(mesh.devices.flat)
    chip = tpu_for(devices[0].device_kind)
    if chip is None:
        kind = devices[0].device_kind
        if devices[0].platform == "cpu":
            kind = f"cpu {hashlib.sha256(repr(kept_programs.machine()).encode()).hexdigest()[:12]}"
        return kind if len(devices) == 1 else f"{len(devices)} devices of {kind}"
    if len(devices) == 1:
        return chip.name
    sides = "x".join(str(1 + max(side) - min(side)) for side in zip(*(device.coords for device in devices)))
    return f"{len(devices)} devices of {chip.name} in {sides}"


def _signature(arguments: tuple[PyTree, ...]) -> str:
    """A digest of the shapes and dtypes of arguments."""
    shapes = [(list(x.shape), x.dtype.name) for x in jax.tree.leaves(arguments)]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class ProgramSet:
    """Programs of a directory; as a `programs.Store` it reads each, and compiles one that cannot be read.

    Attributes:
      directory: folder that `write_set` wrote.
      entries: result of `fingerprint` for what was compiled.
      files: the file and the signature of each program, by its name.
      required: bool, True raises an error in place of compiling.
    """

    directory: Path
    entries: Mapping[str, str]
    files: Mapping[str, Mapping[str, str]] = dataclasses.field(repr=False)
    required: bool = False

    @staticmethod
    def read(directory: Path, required: bool = False) -> ProgramSet:
        """The set of a directory.

        Raises:
          DeviceError: it holds none, or another user could have written it.
        """
        path = directory / FILE
        if not path.exists():
            raise DeviceError(
                f"{directory} has no {FILE}; pass the directory that `vishwamai compile MODEL --output DIR` wrote."
            )
        try:
            with caches.open_private(path) as file:
                values = json.loads(file.read())
            if values["format"] != _FORMAT:
                raise ValueError(f"its format is {values['format']}, and this version reads {_FORMAT}")
            names = [entry["file"] for entry in values["programs"].values()]
            if any(Path(name).name != name for name in names):
                raise ValueError("it names files of another directory")
            return ProgramSet(directory, dict(values["entries"]), values["programs"], required)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DeviceError(f"{path} cannot be read: {error}; compile the programs again.") from error

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `plan_load` that follow from the memory at hand, as they were compiled."""
        numbers = {name: int(self.entries[name]) for name in ("num_pages", "max_length", "num_states")}
        mesh = self.entries["mesh"]
        return numbers | {"num_states": numbers["num_states"] or None, "mesh": None if mesh == "None" else mesh}

    def differences(self, load: Load) -> list[str]:
        """Why the programs are not those of a load, an entry each with what to do; empty where they are."""
        actual = fingerprint(load)
        names = dict.fromkeys((*self.entries, *actual))
        pairs = {name: (actual.get(name, "absent"), self.entries.get(name, "absent")) for name in names}
        return [_difference(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]

    def __call__(
        self,
        name: str,
        function: jax.stages.Wrapped,
        arguments: tuple[PyTree, ...],
        on_read: Callable[[], None],
        mesh: Mesh | None = None,
    ) -> Callable[..., PyTree]:
        try:
            if name not in self.files:
                raise ValueError("it is not in the set")
            if self.files[name]["arguments"] != _signature(arguments):
                raise ValueError("its arguments have other shapes")
            place = mesh if mesh is not None else next(iter(kept_programs.devices_of(arguments)))
            program = kept_programs.read_program(self.directory / self.files[name]["file"], arguments, place)
        except Exception as error:  # what is damaged raises anything
            text = f"{self.directory}: the program '{name}' cannot be loaded ({error})"
            if self.required:
                raise DeviceError(f"{text}; compile the programs again, or leave out --require-programs.") from error
            caches.warn_once(f"{text}; it is compiled again.")
            return cached(name, function, arguments, on_read, mesh)
        on_read()
        return program


def _difference(name: str, actual: str, compiled: str) -> str:
    if name in kept_programs.PACKAGES or name == "libtpu":
        fix = "" if compiled == "absent" else f" (pip install {name}=={compiled})"
    elif name in OPTIONS:
        several = " and " in OPTIONS[name] or " or " in OPTIONS[name] or name == "num_pages"
        fix = f" (see {OPTIONS[name]})" if several else f" (pass {OPTIONS[name]} {compiled})"
        fix = f" (leave out {OPTIONS[name]})" if compiled == "None" and not several else fix
    else:
        fix = ""
    short = [value if len(value) < 80 else f"{value[:76]}..." for value in (actual, compiled)]
    return f"{name} is {short[0]} here and {short[1]} in the programs{fix}"


@dataclasses.dataclass(frozen=True)
class Written:
    """A program of a set, its bytes on disk, and the seconds that tracing and compiling it took."""

    name: str
    bytes: int
    seconds: float


def write_set(
    load: Load, directory: Path, on_program: Callable[[int, int, str], None] | None = None
) -> tuple[Written, ...]:
    """Compiles every program of a load, for its target or this machine, into a new directory, which is whole or absent.

    Args:
      load: result of `plan_load`. Without a target its weights are loaded, too.
      directory: folder that is absent or empty.
      on_program: argument of `Engine`.

    Raises:
      DeviceError: the directory cannot be written, or a program does not fit the target.
      ShapeError: as `Load.engine`.
    """
    entries: dict[Written, dict[str, str]] = {}

    def store(
        name: str,
        function: jax.stages.Wrapped,
        arguments: tuple[PyTree, ...],
        on_read: object,
        mesh: Mesh | None = None,
    ) -> None:
        start = time.monotonic()
        lowered = function.lower(*arguments)
        with contextlib.nullcontext() if load.target is None else libtpu.quiet_compiler():
            program = kept_programs.writable(lowered)
        path = folder / f"{len(entries):03}.program"
        if kept_programs.write_program(path, program, arguments):
            entry = Written(name, path.stat().st_size, time.monotonic() - start)
            entries[entry] = {"file": path.name, "arguments": _signature(arguments)}

    directory = Path(os.path.realpath(directory))
    with caches.writing(directory, "compile"), caches.temporary_directory(directory.parent) as temporary:
        folder = temporary / "programs"
        caches.private_directory(folder)
        if load.target is None:
            dataclasses.replace(load, store=store).engine(on_program)
        else:
            target_programs(load, on_program, store)
        description = {
            "format": _FORMAT,
            "target": load.target or jax.default_backend(),
            "entries": fingerprint(load),
            "programs": {entry.name: values for entry, values in entries.items()},
        }
        caches.write(folder / FILE, json.dumps(description, indent=1) + "\n")
        folder.rename(directory)
    return tuple(entries)


def target_programs(load: Load, on_program: Callable[[int, int, str], None] | None, store: object) -> Programs:
    """Compiles the programs of a load for its target, with shapes in place of arrays; reads headers only.

    Raises:
      VishwamaiError: as `write_set`.
    """
    assert load.target is not None
    mesh, chip, keys = load.device_mesh, Target.parse_chip(load.target), load.optimization.of_kernels

    def shapes(directory: Path, config: ModelConfig) -> Decoder:
        quantize = form_of_directory(load.quantize, directory, load.directory)
        place = SingleDeviceSharding(load.devices[0]) if mesh is None else (mesh, logical_rules(config, mesh))
        return decoder_shapes(directory, config, jnp.dtype(load.dtype), quantize, place)

    @contextlib.contextmanager
    def kernels() -> Iterator[None]:
        target = chip.name if mesh is None else load.target or chip.name
        with tracing_for(target), keys.kernels(), in_words(chip):
            yield

    return assemble(
        shapes(load.directory, load.config),
        None if load.draft is None else shapes(load.draft.directory, load.draft.config),
        load.limits,
        num_pages=load.num_pages,
        kv_dtype=kv_dtype_of(load.kv_dtype),
        sample=(),
        mesh=mesh,
        num_states=load.num_states,
        optimization=keys,
        adapters=load.adapters,
        drafts=load.drafts,
        on_program=on_program,
        kernels=kernels,
        store=store,
    )
