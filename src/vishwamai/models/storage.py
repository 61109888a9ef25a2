"""How the weight of a product is held quantized: a `QTensor` whose scales are shared along its axis -2, or one whose
blocks are shifted too; its parts as entries of the parameters' tables, and where they lie on a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import FORMATS, ZERO_FORMATS, QTensor
from vishwamai.models.parameters import Parameter
from vishwamai.models.shifted_weight import ShiftedWeight
from vishwamai.ops.quantization import quantize
from vishwamai.ops.quantization.search import searched
from vishwamai.parallel import LogicalRules

KEEP = "keep"
"""What `quantize` says to hold a published checkpoint in its own numbers."""

KEEP_PACKED = "keep packed"
"""As `KEEP`, of weights that are then packed for a CPU: 4-bit numbers with zero points are uint4, which only packed
weights may be, and not int8.
"""


@dataclasses.dataclass(frozen=True)
class Storage:
    """A format of `QTensor`, the neighbours along axis -2 that share a scale (None: all of them), and whether they
    share a shift as well (`ShiftedWeight`).

    >>> print(Storage("int4", 32))
    int4 in blocks of 32
    """

    format: str
    block_size: int | None = None
    shifted: bool = False

    def __str__(self) -> str:
        if self.block_size is None:
            return self.format
        return f"{self.format} in blocks of {self.block_size}{' with shifts' if self.shifted else ''}"

    @classmethod
    def of(cls, weight: QTensor | ShiftedWeight) -> Storage:
        """How a weight is held that is not packed."""
        if isinstance(weight, ShiftedWeight):
            return dataclasses.replace(cls.of(weight.tensor), shifted=True)
        return cls(weight.format, weight.block_size)

    def parts(self, parameter: Parameter) -> tuple[Parameter, ...]:
        """The entries of the values, of the scales and of the shifts; the axis that shares one scale is never split."""
        *lead, rows, columns = parameter.shape
        blocks = 1 if self.block_size is None else -(-rows // self.block_size)
        axes = parameter.axes if self.block_size else (*parameter.axes[:-2], None, parameter.axes[-1])
        of_blocks = dataclasses.replace(parameter, shape=(*lead, blocks, columns), axes=axes)
        return (parameter, of_blocks, *[of_blocks] * self.shifted)

    def tensor(self, values: Any, scales: Any, shifts: Any = None) -> QTensor | ShiftedWeight:
        """The weight of its parts, which may be shapes or shardings."""
        weight = QTensor(values, scales, self.format, -2, self.block_size)
        return ShiftedWeight(weight, shifts) if self.shifted else weight

    def shapes(self, parameter: Parameter) -> QTensor | ShiftedWeight:
        """The shapes of the parts."""
        form = (FORMATS | ZERO_FORMATS)[self.format]
        dtypes = (form.dtype, form.scale_dtype, "float32")
        return self.tensor(*(jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(self.parts(parameter), dtypes)))

    def shardings(
        self,
        mesh: Mesh,
        rules: LogicalRules,
        parameter: Parameter,
        layers: int,
        where: str,
        function: str = "from_pretrained",
    ) -> QTensor | ShiftedWeight:
        """Where the parts lie, split by the same rules; the arguments are those of `parameter_sharding`.

        Raises:
          ShapeError: as `parameter_sharding`, or a mesh axis cuts through blocks; the text names the parameter.
        """
        of_values, *of_blocks = self.parts(parameter)
        values = parameter_sharding(mesh, rules, of_values, layers, where, function)
        rows, name = parameter.shape[-2], parameter.axes[-2]
        parts = math.prod(mesh.shape[axis] for axis in (() if name is None else rules[name]))
        if self.block_size and parts > 1 and rows % (parts * self.block_size):
            raise ShapeError(
                f"{function}: {where} has {rows} rows ({name!r}) in blocks of {self.block_size} that share scales, and "
                f"the mesh splits them into {parts} parts of {rows // parts}; choose a mesh whose parts are multiples "
                f"of {self.block_size}, map {name!r} to None, or leave the weights unquantized (quantize=None)."
            )
        places = (parameter_sharding(mesh, rules, x, layers, f"{where} (scales)", function) for x in of_blocks)
        return self.tensor(values, *places)

    def quantize(self, value: jax.Array, shardings: QTensor | ShiftedWeight | None = None) -> QTensor:
        """A weight `[..., in, out]` rounded to the format.

        Args:
          shardings: places of the result, of a weight whose axis -2 is whole on each device: every device rounds its
            part, so the numbers are those of one device.
        """

        if shardings is None:
            return _rounded(self, None)(value)
        weight = _rounded(self, value.sharding)(value)
        return jax.tree.map(jax.device_put, weight, shardings)


@functools.lru_cache(maxsize=64)
def _rounded(storage: Storage, sharding: jax.sharding.Sharding | None) -> Callable[[jax.Array], QTensor]:
    """`Storage.quantize` of arrays with this sharding: one function, so that weights of one shape compile once."""

    def run(x: jax.Array) -> QTensor:
        if storage.format in ("int4", "uint4") and storage.block_size is not None:
            return searched(x, storage.format, storage.block_size)
        return quantize(x, storage.format, axis=-2, block_size=storage.block_size)

    if sharding is None:
        return jax.jit(run)
    assert isinstance(sharding, NamedSharding)
    spec = sharding.spec
    return jax.jit(jax.shard_map(run, mesh=sharding.mesh, in_specs=spec, out_specs=spec))


QUANTIZATIONS: dict[str, Storage] = {
    "int8": Storage("int8"),
    "int4": Storage("int4", 32),
    "fp8": Storage("fp8_e4m3"),
}
"""What `quantize` makes of a weight."""

PACKED: dict[str, Storage | str] = {"int8": Storage("int8", 32), "int4": Storage("uint4", 32), KEEP: KEEP_PACKED}
"""What stands for it where weights are packed for a CPU, whose kernels round activations in the weight's blocks."""

HEAD = Storage("int8", 32)
"""The head next to such weights."""


def parameter_sharding(
    mesh: Mesh, rules: LogicalRules, parameter: Parameter, layers: int, where: str, function: str = "from_pretrained"
) -> NamedSharding:
    """Where a parameter lies; with more than one of `layers`, it has a leading axis for them.

    Args:
      where, function: names of the parameter and of the caller in errors.
    """
    shape = parameter.shape if layers == 1 else (layers, *parameter.shape)
    return rules.sharding(mesh, parameter.axes, shape, where=where, function=function)
