"""Kernels and operations of one's own: `compile_tpu_kernel`, `tpu_custom_call`, `register_tpu_op`.

A TPU runs a custom call when XLA meets a Pallas kernel in a program; no other custom call can be given to it. So a
kernel here is a function of jax.numpy, which XLA compiles, or a Pallas body, which Mosaic compiles; it is known by a
name, and `tpu_custom_call` calls it by that name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental import pallas as pl

from vishwamai.core.arguments import checked
from vishwamai.core.errors import DeviceError, KernelError, ShapeError, UnsupportedError, VishwamaiError
from vishwamai.core.spec import as_array, as_jax_dtype
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.kernels.decorators import translated
from vishwamai.kernels.tpu.register import RegisteredOp, register_tpu_op

__all__ = ["TPUKernel", "compile_tpu_kernel", "register_tpu_op", "registered", "tpu_custom_call"]

_REGISTRY: dict[str, TPUKernel | RegisteredOp] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class TPUKernel:
    """A compiled kernel; call it with arrays of the declared shapes and dtypes.

    Attributes:
      name: key of `tpu_custom_call`.
      function: the traceable function behind it; on a platform without Mosaic a Pallas body runs in the interpreter.
      inputs, outputs: the declared shapes and dtypes.
      target: the chip it was compiled for, None for the local device.
      program: the `jax.stages.Compiled` of the local device; for a target the `vishwamai.aot.Compiled`, with its memory
        and cost.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    target: str | None
    program: Any

    def __call__(self, *operands: Any) -> Any:
        """The result: an array, or a tuple of them where several outputs were declared.

        Raises:
          ShapeError: the operands are not as declared.
          DeviceError: it was compiled for a TPU you do not have.
        """
        operands = tuple(jnp.asarray(x) for x in operands)
        _compare(
            self.name, "operand", operands, self.inputs, "pass arrays as declared, or compile the kernel for these"
        )
        if any(isinstance(x, jax.core.Tracer) for x in operands):
            return _one_or_all(self.function(*operands))
        if self.target is not None:
            raise DeviceError(
                f"{self.name}: it was compiled for {self.target}, which is not here; compile it without `target` to "
                "run it on this machine."
            )
        return _one_or_all(self.program(*operands))


@checked
def compile_tpu_kernel(
    name: str,
    fn: Callable[..., Any],
    input_shapes: Sequence[Sequence[int]],
    output_shapes: Sequence[Sequence[int]],
    input_dtypes: Sequence[Any],
    output_dtypes: Sequence[Any],
    *,
    target: str | None = None,
    pallas: bool | None = None,
    **pallas_options: Any,
) -> TPUKernel:
    """Compiles a function of jax.numpy or a Pallas body for declared shapes and dtypes, which are checked.

    Args:
      name: the kernel's name in the program and for `tpu_custom_call`.
      fn: `fn(*arrays) -> array or tuple`; or a Pallas body `fn(*input_refs, *output_refs)`, which writes its outputs.
      input_shapes: a shape for every input; `input_dtypes`: their dtypes.
      output_shapes: a shape for every output; `output_dtypes`: their dtypes.
      target: a TPU to compile for that need not be here ("v5e"; needs libtpu); None for the local device.
      pallas: bool, True where `fn` is a Pallas body; None reads it from the number of its parameters (inputs, or inputs
        and outputs).
      **pallas_options: `grid`, `in_specs`, `out_specs`, `scratch_shapes`, `compiler_params` ... of `pl.pallas_call`.

    Returns:
      the kernel. Where there is no TPU, a Pallas body runs in Pallas' interpreter: right, and slow.

    Raises:
      UnsupportedError: at a call, when a Pallas body is differentiated; `register_tpu_op` takes a gradient.
      ShapeError: the declared shapes and dtypes are not those of `fn`.
      KernelError: `fn` cannot be traced or compiled, or `pallas_options` were given for a function of jax.numpy.
      DeviceError: the target is unknown, libtpu is missing, or the kernel does not fit the chip.

    >>> def add_one(x_ref, y_ref):
    ...     y_ref[...] = x_ref[...] + 1
    >>> kernel = compile_tpu_kernel("add_one", add_one, [(8, 128)], [(8, 128)], [jnp.float32], [jnp.float32])
    >>> float(kernel(jnp.ones((8, 128)))[0, 0])
    2.0
    >>> compile_tpu_kernel("product", jnp.matmul, [(8, 4), (4, 2)], [(8, 3)], ["float32"] * 2, ["float32"])
    Traceback (most recent call last):
    vishwamai.core.errors.ShapeError: product: output 0 is float32[8,2], but float32[8,3] is declared; ...
    """
    for side, shapes, dtypes in (("input", input_shapes, input_dtypes), ("output", output_shapes, output_dtypes)):
        if len(shapes) != len(dtypes):
            raise ShapeError(
                f"compile_tpu_kernel: {name}: {len(shapes)} {side}_shapes and {len(dtypes)} {side}_dtypes are given; "
                "pass one dtype a shape."
            )
    inputs = _declared("input", input_shapes, input_dtypes)
    outputs = _declared("output", output_shapes, output_dtypes)
    if not outputs:
        raise ShapeError(f"compile_tpu_kernel: {name}: `output_shapes` is empty; declare at least one output.")
    if pallas is None:
        pallas = _is_body(name, fn, len(inputs), len(outputs))
    if pallas_options and not pallas:
        raise KernelError(
            f"compile_tpu_kernel: {name}: {', '.join(pallas_options)} are options of Pallas, but `fn` is a function of "
            "jax.numpy; write it as a body (*input_refs, *output_refs), or leave them out."
        )
    function = _named(name, _from_body(name, fn, outputs, pallas_options) if pallas else fn)
    try:
        results = jax.tree.leaves(jax.eval_shape(function, *inputs))
        _compare(name, "output", results, outputs, "declare what the function returns")
        if target is None:
            program: Any = jax.jit(function).lower(*inputs).compile()
        else:
            from vishwamai import aot

            program = aot.compile_for(function, *inputs, target=target)
    except VishwamaiError:
        raise
    except Exception as error:
        raise translated(name, error) from error
    kernel = _REGISTRY[name] = TPUKernel(name, function, inputs, outputs, target, program)
    return kernel


def _declared(side: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The declared arrays."""
    for shape in shapes:
        if min(shape, default=0) < 0:
            raise ShapeError(f"compile_tpu_kernel: `{side}_shapes` has {tuple(shape)}; pass sizes of 0 or more.")
    checked_dtypes = [as_jax_dtype("compile_tpu_kernel", f"{side}_dtypes", dtype) for dtype in dtypes]
    return tuple(jax.ShapeDtypeStruct(tuple(s), d) for s, d in zip(shapes, checked_dtypes))


@checked
def tpu_custom_call(call_target_name: str, out_avals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Calls a kernel or an operation by its name.

    Args:
      call_target_name: the name given to `compile_tpu_kernel` or `register_tpu_op`.
      out_avals: expected results: anything with a shape and a dtype (`jax.ShapeDtypeStruct`) for each result.
      operands: the arrays.

    Returns:
      the results, a list.

    Raises:
      KernelError: nothing has this name; the text lists what has one.
      ShapeError: the results are not what `out_avals` expects, or the operands not what the kernel takes.

    >>> kernel = compile_tpu_kernel("double", lambda x: 2 * x, [(4,)], [(4,)], ["float32"], ["float32"])
    >>> tpu_custom_call("double", [jax.ShapeDtypeStruct((4,), "float32")], [jnp.ones(4)])
    [Array([2., 2., 2., 2.], dtype=float32)]
    """
    kernel = registered().get(call_target_name)
    if kernel is None:
        names = ", ".join(registered()) or "none yet"
        raise KernelError(
            f"tpu_custom_call: nothing is called {call_target_name!r}; make it by compile_tpu_kernel or "
            f"register_tpu_op. There are: {names}."
        )
    for aval in out_avals:
        if not (hasattr(aval, "shape") and hasattr(aval, "dtype")):
            raise ShapeError(f"tpu_custom_call: `out_avals` has {aval!r}; pass jax.ShapeDtypeStruct's.")
    operands = [as_array("tpu_custom_call", "operands", x) for x in operands]
    expected = tuple(jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(x.dtype)) for x in out_avals)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in operands]
    promised = kernel.outputs if isinstance(kernel, TPUKernel) else jax.tree.leaves(jax.eval_shape(kernel, *shapes))
    _compare(call_target_name, "result", promised, expected, "expect what the kernel returns in `out_avals`")
    return list(jax.tree.leaves(kernel(*operands)))


def registered() -> dict[str, TPUKernel | RegisteredOp]:
    """Everything that `tpu_custom_call` can call, by name."""
    from vishwamai.kernels.tpu import register

    return {**_REGISTRY, **register.OPERATIONS}


def _is_body(name: str, fn: Callable[..., object], inputs: int, outputs: int) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(fn).parameters.values()
    required = sum(p.kind in kinds and p.default is p.empty for p in parameters)
    if required == inputs and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    if required == inputs + outputs:
        return True
    raise KernelError(
        f"compile_tpu_kernel: {name}: `fn` takes {required} positional parameters, which is neither {inputs} (arrays) "
        f"nor {inputs + outputs} (the refs of a Pallas body); pass `pallas=True` or `pallas=False`."
    )


def _from_body(name: str, body: Callable[..., Any], outputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A function of arrays that runs the body: compiled by Mosaic on a TPU, by Pallas' interpreter elsewhere."""
    shape = outputs[0] if len(outputs) == 1 else outputs
    compiled = pl.pallas_call(body, out_shape=shape, name=name, **options)
    interpreted = pl.pallas_call(body, out_shape=shape, name=name, interpret=True, **options)

    @jax.custom_jvp
    def run(*arrays: Any) -> Any:
        return jax.lax.platform_dependent(*arrays, tpu=compiled, default=interpreted)

    @run.defjvp
    def _(primals: PyTree, tangents: PyTree) -> Any:
        raise UnsupportedError(
            f"{name}: a Pallas body has no derivative of its own; make an operation of it by register_tpu_op, which "
            "takes a `gradient`, or differentiates a default in jax.numpy."
        )

    return run


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*arrays: Any) -> Any:
        return function(*arrays)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def _one_or_all(results: object) -> Any:
    leaves = jax.tree.leaves(results)
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _text(x: AnyArray) -> str:
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}".replace(" ", "")


def _compare(name: str, side: str, actual: Sequence[Any], declared: Sequence[Any], fix: str) -> None:
    if len(actual) != len(declared):
        raise ShapeError(f"{name}: there are {len(actual)} {side}s, but {len(declared)} are declared; {fix}.")
    for i, (x, expected) in enumerate(zip(actual, declared)):
        if tuple(x.shape) != tuple(expected.shape) or jnp.dtype(x.dtype) != jnp.dtype(expected.dtype):
            raise ShapeError(f"{name}: {side} {i} is {_text(x)}, but {_text(expected)} is declared; {fix}.")
