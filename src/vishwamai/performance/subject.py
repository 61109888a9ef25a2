"""What `TPUProfiler` profiles: a model as a function of its state and inputs, and the values of those inputs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import described
from vishwamai.core.errors import ShapeError, VishwamaiError
from vishwamai.core.types import PyTree

if TYPE_CHECKING:
    from flax import linen
    from jax.typing import DTypeLike

NAME = "profile_execution"
"""The method that errors name."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is profiled: a function of `state` and `inputs`. `tokens`: integers below this are legal inputs."""

    name: str
    run: Callable[..., PyTree]
    state: tuple[PyTree, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    tokens: int
    devices: int

    @property
    def shapes(self) -> tuple[PyTree, ...]:
        """The arguments without values."""
        return (*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state), *self.inputs)


def _linen_variables(model: linen.Module, inputs: Sequence[jax.ShapeDtypeStruct], seed: int) -> PyTree:
    try:
        return jax.jit(model.init)(jax.random.key(seed), *(jnp.zeros(x.shape, x.dtype) for x in inputs))
    except VishwamaiError:
        raise
    except Exception as error:  # of the caller's own model
        raise not_taken(error) from error


def not_taken(error: Exception) -> ShapeError:
    text = str(error).strip() or type(error).__name__
    return ShapeError(f"{NAME}: `model` does not take inputs of `input_shape`: {text}")


def subject_of(model: Any, input_shape: object, dtype: np.dtype | None, seed: int) -> Subject:
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        inputs = _inputs(input_shape, dtype or np.dtype(np.float32))
        name = _called(type(model).__name__, inputs)
        return Subject(name, model.apply, (_linen_variables(model, inputs, seed),), inputs, 2, 1)
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    if nnx is None or not isinstance(model, nnx.Module):
        inputs = _inputs(input_shape, dtype or np.dtype(np.float32))
        name = getattr(model, "__name__", type(model).__name__)
        return Subject(_called(name, inputs), lambda *inputs: model(*inputs), (), inputs, 2, 1)
    from vishwamai.models import Decoder

    tokens = model.config.vocab_size if isinstance(model, Decoder) else 2
    inputs = _inputs(input_shape, dtype or np.dtype(np.int32 if isinstance(model, Decoder) else np.float32))
    graph, state = nnx.split(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            raise ShapeError(
                f"{NAME}: `model`{jax.tree_util.keystr(path)} is {described(leaf)}; pass a module with its parameters."
            )
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    devices = max((len(sharding.device_set) for sharding in shardings), default=1)
    name = _called(type(model).__name__, inputs)
    return Subject(name, lambda state, *inputs: nnx.merge(graph, state)(*inputs), (state,), inputs, tokens, devices)


def _called(name: str, inputs: Sequence[jax.ShapeDtypeStruct]) -> str:
    name = name.replace("<lambda>", "lambda")
    return f"{name}({', '.join(f'{shape.dtype}{list(shape.shape)}' for shape in inputs)})"


def _inputs(shapes: Any, dtype: np.dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The inputs that `input_shape` describes."""
    several = isinstance(shapes, (tuple, list)) and len(shapes) > 0 and not _is_size(shapes[0])
    inputs = []
    for entry in shapes if several else (shapes,):
        shape = entry.shape if isinstance(entry, jax.ShapeDtypeStruct) else entry
        if not isinstance(shape, (tuple, list)) or not all(map(_is_size, shape)):
            raise ShapeError(
                f"{NAME}: `input_shape` is {described(shapes)}; pass a shape such as (8, 128), a "
                "jax.ShapeDtypeStruct, or a tuple of these."
            )
        entry_dtype = number_dtype(entry.dtype) if isinstance(entry, jax.ShapeDtypeStruct) else dtype
        inputs.append(jax.ShapeDtypeStruct(tuple(int(size) for size in shape), entry_dtype))
    return tuple(inputs)


def _is_size(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 2**31)


def number_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        parsed = jnp.dtype(dtype)
    except Exception as error:
        raise ShapeError(f"TPUProfiler: `dtype` is {described(dtype)}; pass a dtype such as 'float32'.") from error
    if not (jnp.issubdtype(parsed, jnp.number) or parsed == np.bool_):
        raise ShapeError(f"TPUProfiler: dtype {parsed} is not one of numbers; pass one such as 'float32' or 'int32'.")
    return jax.dtypes.canonicalize_dtype(parsed)


def input_values(subject: Subject, seed: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)

    def random_array(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.inexact):
            numbers = rng.standard_normal(shape.shape, np.float32)
        else:
            numbers = rng.integers(0, 2 if shape.dtype.itemsize == 1 else subject.tokens, shape.shape)
        return jax.device_put(numbers.astype(shape.dtype))

    return tuple(map(random_array, subject.inputs))
