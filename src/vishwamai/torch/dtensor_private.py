"""DTensor's private names. No other file of the package uses them (ruff checks it).

torch has no public way to say what is asked for here: `experimental.register_sharding` lets DTensor remember answers
that are keyed by the tensors and the arguments from the first integer on, so a call with another flag, or with an
offset in place of a scale, would get the answer of the first.

`torch.distributed.tensor` is imported inside the functions, since it takes about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vishwamai.core.types import PyTree


class ShardedCall(NamedTuple):
    """DTensor's question for one call of an operator.

    Attributes:
      schema: the question itself, as DTensor asks it.
      arguments: every argument by its name; for a tensor its spec, with `shape`, `ndim` and `tensor_meta`.
      tensors: arguments that are tensors.
    """

    schema: Any
    arguments: dict[str, PyTree]
    tensors: dict[str, Any]


def read_call(schema: Any) -> ShardedCall:
    """The arguments of DTensor's question, by their names."""
    from torch.distributed.tensor._op_schema import OpStrategy

    names = [argument.name for argument in schema.op._schema.arguments]
    named = list(zip(names, schema.args_schema, strict=True))
    tensors = {name: x.strategies[0].output_spec for name, x in named if isinstance(x, OpStrategy)}
    return ShardedCall(schema, {**dict(named), **tensors}, tensors)


def answer(
    call: ShardedCall,
    placements: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    results: int,
    valid: Callable[[Sequence[Any], Any], bool],
) -> Any:
    """DTensor's form of what may be split.

    Args:
      placements: choices for each axis of the mesh: placements of the results, and of the tensors by their names.
      results: how many the operator has.
      valid: `(specs of the tensors, specs of the results) -> bool`, whether a combination over all mesh axes is legal.
    """
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    choices = [[*of_results, *(inputs.get(name) for name in call.arguments)] for of_results, inputs in placements]
    return expand_to_full_mesh_op_strategy(
        call.schema.get_mesh_from_args(), call.schema, choices, input_index=results, is_valid_strategy_cb=valid
    )


def register_strategy(operator: Any, strategy: Callable[[ShardedCall], Any]) -> None:
    """Makes `strategy` the answer for an operator; DTensor asks again for every other value of any argument."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    everything = RuntimeSchemaInfo(static_argnum=0, needs_pytree=True)
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(operator, lambda schema: strategy(read_call(schema)), everything)
