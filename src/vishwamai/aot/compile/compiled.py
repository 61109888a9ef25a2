"""Compile a function for a TPU you do not have, with the compiler that the TPU would use.

`jax.jit` takes the devices to compile for from the shardings of the arguments; libtpu describes devices of any topology
without having one. So the arguments' shapes are placed on described devices, the function is lowered and compiled as it
would be there, and the executable, which cannot run here, tells its memory, its cost and its final program. See
https://docs.jax.dev/en/latest/aot.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from vishwamai.aot.compile import diagnose, libtpu
from vishwamai.aot.compile.kernel_memory import refuse_too_large
from vishwamai.aot.compile.options.config import RuntimeConfig, compiler_options_of
from vishwamai.core.arguments import checked
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import KernelError, ShapeError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.hlo import parse_module
from vishwamai.core.numbers import human
from vishwamai.core.target import Target
from vishwamai.core.types import Device, PyTree

__all__ = ["Compiled", "Cost", "Memory", "compile_for", "place"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one device while the program runs, in bytes."""

    arguments: int
    outputs: int
    temporaries: int
    code: int
    aliased: int
    """Outputs that reuse donated arguments."""
    limit: int
    """What the compiler lets one device use."""

    @property
    def total(self) -> int:
        """arguments + outputs + temporaries + code - aliased."""
        return self.arguments + self.outputs + self.temporaries + self.code - self.aliased

    @property
    def fits(self) -> bool:
        """Whether all of it fits the device together."""
        return self.total <= self.limit

    def __str__(self) -> str:
        return (
            f"{human(self.total)} of {human(self.limit)} HBM ({'fits' if self.fits else 'does not fit'}): "
            f"arguments {human(self.arguments)}, outputs {human(self.outputs)}, temporaries {human(self.temporaries)}, "
            f"code {human(self.code)}"
            + (f", {human(self.aliased)} of the outputs in donated arguments" if self.aliased else "")
        )


@dataclasses.dataclass(frozen=True)
class Cost:
    """The compiler's own count for one device; kernels take part with the `cost_estimate` of their pallas_call, or not
    at all.

    Attributes:
        flops: multiplications and additions; `transcendentals`: exp, tanh, ...
        bytes_accessed: bytes read and written by all operations together.
        seconds: XLA's roofline guess ("optimal_seconds"), None where it gives none.
    """

    flops: float
    transcendentals: float
    bytes_accessed: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class KernelMemory:
    """Scoped VMEM of one kernel or fusion in the compiled program, bytes per core."""

    name: str
    vmem: int
    pallas: bool


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for `chip`, which need not be here.

    Attributes:
        chip: the chip; `devices`: how many devices the program spans.
        memory: HBM use of one device; `cost`: XLA's count; `compiled`: the `jax.stages.Compiled`.
    """

    chip: TpuChip
    devices: int
    memory: Memory
    cost: Cost
    compiled: jax.stages.Compiled = dataclasses.field(repr=False)

    @functools.cached_property
    def text(self) -> str:
        """The optimised HLO.

        Raises:
            KernelError: libtpu put asynchronous SparseCore copies into the program, which jaxlib cannot read back.
        """
        try:
            return self.compiled.as_text() or ""
        except jax.errors.JaxRuntimeError as error:
            first = str(error).splitlines()[0][:200]
            raise KernelError(f"the program compiled, but jaxlib cannot read its text back: {first}") from error

    @functools.cached_property
    def kernels(self) -> tuple[KernelMemory, ...]:
        """Every kernel (and fusion that takes VMEM) with its scoped VMEM, in program order."""
        return tuple(_kernels(self.text))


_CONFIG = re.compile(r"backend_config=(\{.*\})")


def _kernels(text: str) -> Iterator[KernelMemory]:
    for instruction in parse_module(text).by_name.values():
        match = _CONFIG.search(instruction.attributes)
        if match is None:
            continue
        pallas = instruction.target == "tpu_custom_call"
        config, _ = json.JSONDecoder().raw_decode(match[1])
        # memory_space 1 is VMEM, as in the layouts' S(1)
        used = sum(int(m["size"]) for m in config.get("used_scoped_memory_configs", ()) if m.get("memory_space") == "1")
        if pallas or used:
            yield KernelMemory(instruction.name, used, pallas)


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _sharding(leaf: Any, devices: tuple[Device, ...], target: str) -> jax.sharding.Sharding:
    """Where an argument lies on the target: its own NamedSharding carried over axis by axis, else replicated."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        mesh = sharding.mesh
        if mesh.size != len(devices):
            raise ShapeError(
                f"compile_for: an argument of shape {tuple(leaf.shape)} is sharded over {mesh.size} devices "
                f"({dict(mesh.shape)}), but target {target!r} has {len(devices)}; name a topology of that many devices "
                '("v5e:2x4" has 8).'
            )
        shape = tuple(mesh.shape.values())
        placed = Mesh(np.asarray(devices, dtype=object).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)
        return NamedSharding(placed, sharding.spec)
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.asarray(devices, dtype=object), ("devices",)), PartitionSpec())


def _in_order(tree: object, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices in the order of the first mesh that is made of them, such as a ring; else as they are."""
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and mesh.size == len(devices) and set(mesh.devices.flat) == set(devices):
            return tuple(mesh.devices.flat)
    return devices


@checked
def place(tree: PyTree, target: str) -> PyTree:
    """The shapes of a tree of arguments, placed on the devices of a target.

    Arrays and `jax.ShapeDtypeStruct`s become ShapeDtypeStructs; everything else (static arguments) stays. A
    NamedSharding over several devices is carried over by mesh axis, whatever its mesh was made of; anything else is
    replicated over the topology. A mesh of the target's own devices (`parallel.make_mesh(topology=...)`) keeps their
    order.

    Raises:
        ShapeError: a sharding spans another number of devices than the target has.
        DeviceError: libtpu is missing, or it knows no such target.

    Example:
        >>> placed = place({"x": jax.ShapeDtypeStruct((8,), "float32"), "n": 3}, "v5e")  # doctest: +SKIP
        >>> placed["n"], placed["x"].sharding.num_devices  # doctest: +SKIP
        (3, 1)
    """
    devices = _in_order(tree, libtpu.devices_for(target))

    def place_leaf(leaf: Any) -> object:
        if not _is_array(leaf):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf, devices, target), weak_type=weak)

    return jax.tree.map(place_leaf, tree)


def _lower(
    fn: Callable[..., object], target: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> jax.stages.Lowered:
    args, kwargs = place((args, kwargs), target)
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    if not any(_is_array(leaf) for leaf in jax.tree.leaves((args, kwargs))):
        # Without an array argument nothing would name the device; the outputs can.
        call = functools.partial(jitted, *args, **kwargs)
        device = SingleDeviceSharding(libtpu.describe_device(target))
        jitted, args, kwargs = jax.jit(lambda: call(), out_shardings=device), (), {}
    if not hasattr(jitted, "trace"):
        return jitted.lower(*args, **kwargs)  # type: ignore[attr-defined]
    traced = jitted.trace(*args, **kwargs)
    refuse_too_large(traced.jaxpr.jaxpr, Target.parse_chip(target))
    return traced.lower()


@contextlib.contextmanager
def tracing_for(target: str) -> Iterator[None]:
    """Traces the block for `target`: our kernels see it as the ambient target, others through Pallas'
    `get_tpu_info()`.
    """
    chip, topology = Target.parse_chip(target), Target.parse_tpu(target).topology
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernel_config(target=chip.name))
        if topology is None and jax.sharding.get_abstract_mesh().empty:
            device = jax.sharding.AbstractDevice(chip.device_kinds[0], chip.cores_per_device, "tpu")
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


@contextlib.contextmanager
def in_words(chip: TpuChip, arguments: object = ()) -> Iterator[None]:
    """Raises what the compiler says inside the block in our own words; other errors pass. `arguments`: the program's,
    whose shardings an error may name.
    """
    try:
        yield
    except Exception as error:
        if diagnose.from_compiler(error):
            shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
            named = [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
            raise diagnose.translate(error, chip, named) from error
        raise


@checked
def compile_for(
    fn: Callable[..., object],
    *args: object,
    target: str = "v5e",
    compiler_options: Mapping[str, object] | RuntimeConfig | None = None,
    **kwargs: object,
) -> Compiled:
    """Compiles `fn(*args, **kwargs)` for a TPU chip or topology that need not be here.

    The tiles and implementations are those that the target would choose: it is the ambient `target` while `fn` is
    traced. While libtpu compiles, what is written to file descriptor 2 is left out: its C++ code prints stack traces.

    Args:
        fn: a function, jitted or not.
        *args: its arguments: arrays or `jax.ShapeDtypeStruct`s (only shape, dtype and sharding matter), or static
            values.
        target: "v4", "v5e", "v5p", "v6e", "tpu7x" for one device, or a topology "v5e:4x4" for all devices of it.
            Arguments may then carry NamedShardings over as many devices, of `mesh_for(target, axes)` or any other mesh.
        compiler_options: options of libtpu's compiler by name, or a `RuntimeConfig`. A dict is checked as
            `vishwamai.performance.configure_runtime_options` does.
        **kwargs: keyword arguments of `fn`.

    Returns:
        The compiled program with its memory, cost and text.

    Raises:
        DeviceError: libtpu is missing, the target is unknown, or the program does not fit (VMEM, SMEM or HBM: the text
            says which allocation).
        UnsupportedError: the compiler cannot build an operation of a kernel, or split a kernel over devices.
        KernelError: the compiler rejects for another reason.
        ConfigError: `compiler_options` has an option that the installed libtpu lacks, or a value that it does not take.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        >>> program = compile_for(lambda a, b: a @ b, x, x, target="v5e")  # doctest: +SKIP
        >>> program.memory.arguments >> 20, program.memory.fits  # doctest: +SKIP
        (4, True)
    """
    chip = Target.parse_chip(target)
    devices = len(libtpu.devices_for(target))
    options: dict[str, str | bool] = {**compiler_options_of("compile_for", compiler_options)}
    with tracing_for(target), in_words(chip, (args, kwargs)):
        lowered = _lower(fn, target, args, kwargs)
        with libtpu.quiet_compiler():
            return described(lowered.compile(compiler_options=options), chip, devices)


def described(compiled: jax.stages.Compiled, chip: TpuChip, devices: int) -> Compiled:
    """A program that was compiled for `devices` devices of a chip, with its memory and cost."""
    return Compiled(chip, devices, memory_of(compiled, chip), _cost(compiled), compiled)


def memory_of(compiled: jax.stages.Compiled, chip: TpuChip) -> Memory:
    """The memory of one device for a program that was compiled for a chip."""
    stats = compiled.memory_analysis()
    assert stats is not None  # libtpu always gives it
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        limit=chip.hbm_usable_bytes,
    )


def _cost(compiled: jax.stages.Compiled) -> Cost:
    costs = compiled.cost_analysis() or {}
    return Cost(
        flops=float(costs.get("flops", 0.0)),
        transcendentals=float(costs.get("transcendentals", 0.0)),
        bytes_accessed=float(costs.get("bytes accessed", 0.0)),
        seconds=costs.get("optimal_seconds"),
    )
