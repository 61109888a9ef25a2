"""`apply_rope` and `rope_tables` of torch tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.spec import array_spec
from vishwamai.ops.rope.api import ROPE
from vishwamai.ops.rope.scaling import MRopeScaling, NtkScaling, RopeScaling, parse_scaling
from vishwamai.ops.rope.spec import (
    SIGNATURES,
    Operands,
    Outputs,
    RopeSpec,
    check,
    check_positions,
    describe,
    needs_separate_calls,
)
from vishwamai.ops.rope.tables import check_frequencies, fixed_point
from vishwamai.torch import bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.sharding import is_dtensor, placed_like
from vishwamai.torch.torch_private import constant_result, only_computes


def _pack(spec: RopeSpec, tensors: Operands) -> Operands:
    """Any strides will do, of heads whose features lie side by side and are aligned."""

    def ready(x: Tensor | None) -> Tensor | None:
        return x if x is None or (x.stride(-1) == 1 and x.data_ptr() % 16 == 0) else x.contiguous()

    return Operands(ready(tensors.query), ready(tensors.key), tensors.cos.contiguous(), tensors.sin.contiguous())


_rope = TorchOperator(
    ROPE,
    Outputs,
    lambda call: SIGNATURES[call.layout],
    describe,
    gradients=("query", "key"),
    saves=lambda call: ("cos", "sin"),
    stand_ins={"query": "d_query", "key": "d_key"},
    pack=_pack,
)


# What the host computes of a scaling, apart, so that the compiler takes it for numbers.


@constant_result
def _checked(name: str, head_dim: int, theta: float, scaling: object, rotary_dim: int | None) -> tuple[Any, ...]:
    """(rotary_dim, theta, the length from which frequencies change, the factor on cos and sin, the coordinate of each
    pair under `MRopeScaling`, the factor of `NtkScaling`).
    """
    parsed, rotary_dim, theta = check_frequencies(name, head_dim, theta, scaling, rotary_dim)
    coordinates = parsed.coordinates.astype(float).tolist() if isinstance(parsed, MRopeScaling) else None
    factor = parsed.factor if isinstance(parsed, NtkScaling) else None
    return rotary_dim, theta, parsed.threshold, float(parsed.magnitude), coordinates, factor


@constant_result
def _frequencies(scaling: Any, rotary_dim: int, theta: float, length: int) -> list[float]:
    """Radians a position."""
    return parse_scaling(scaling).frequencies(rotary_dim, theta, length).tolist()


@constant_result
def _turns(scaling: Any, rotary_dim: int, theta: float, length: int) -> list[float]:
    """Turns a position, whole numbers below 2^53, see `fixed_point`."""
    return fixed_point(parse_scaling(scaling).frequencies(rotary_dim, theta, length)).astype(float).tolist()


@functools.cache  # for ever, since a CUDA graph reads that memory whenever it is replayed
def _placed(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


_placed_op: Any = torch.library.custom_op(
    "vishwamai::constants",
    lambda numbers, dtype, device: _placed(tuple(numbers), dtype, device).clone(),
    mutates_args=(),
    schema="(float[] numbers, ScalarType dtype, Device device) -> Tensor",
)
_placed_op.register_fake(lambda numbers, dtype, device: torch.empty(len(numbers), dtype=dtype, device=device))


def _constants(numbers: list[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    """The numbers on a tensor's device, to be read only. They are copied there once: a CUDA graph cannot capture a copy
    from the host.
    """
    if only_computes((like,)):
        return _placed(tuple(numbers), dtype, like.device)
    return _placed_op(numbers, dtype, like.device)  # a compiler or a transform must not see what is kept


def _check_count(positions: int, device: Any) -> None:
    if not 0 <= positions < 2**31:
        raise ShapeError(f"rope_tables: `positions` is {positions}; pass a number of positions from 0 to 2^31 - 1.")
    try:
        torch.empty(0, device=device)
    except Exception as error:
        first = str(error).splitlines()[0]
        raise DeviceError(
            f"rope_tables: torch has no `device` {device!r} here ({first}); pass 'cpu', 'cuda:0' or None."
        ) from error


@checked
def rope_tables(
    positions: Tensor | int,
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin for `apply_rope(..., tables=...)`: made once, they serve every layer of a model.

    Args:
      positions: argument of `vishwamai.apply_rope`; or a number of positions, counted from 0.
      head_dim: features of a head.
      theta: argument of `vishwamai.apply_rope`.
      scaling: argument of `vishwamai.apply_rope`.
      rotary_dim: argument of `vishwamai.apply_rope`.
      device: the tables' device, where `positions` is a number.

    Returns:
      Two float32 tensors `[batch or 1, seq, rotary_dim / 2]`.

    >>> cos, sin = rope_tables(100, 64)
    >>> cos.shape
    torch.Size([1, 100, 32])
    """
    if not isinstance(positions, Tensor) and not torch.compiler.is_compiling():
        _check_count(positions, device)
    head_dim, theta, rotary_dim = map(bridge.constant, (head_dim, theta, rotary_dim))
    settings = _checked("rope_tables", head_dim, theta, scaling, rotary_dim)
    rotated, theta, threshold, magnitude, coordinates, factor = settings
    length = None
    if not isinstance(positions, Tensor):
        length, positions = positions, torch.arange(positions, device=device)
    elif positions.is_floating_point() or positions.dim() not in (1, 2, 3):
        raise ShapeError(
            f"rope_tables: `positions` is {positions.dtype} of shape {tuple(positions.shape)}; pass integers [seq] or "
            "[batch, seq]."
        )
    elif positions.dim() == 3 and (coordinates is None or positions.shape[0] != 3):
        raise ShapeError(
            f"rope_tables: `positions` has shape {tuple(positions.shape)}; three axes mean [3, batch, seq], with "
            "`MRopeScaling`."
        )
    if positions.dim() == 3:
        chosen = positions[_constants(coordinates, torch.int64, positions)].movedim(0, -1)
    else:
        chosen = torch.atleast_2d(positions)[..., None]

    def angles(length: int) -> Tensor:
        """Without whole turns, `[..., pairs]`: the same bits as `vishwamai.ops.rope.tables` has."""
        turns = _constants(_turns(scaling, rotated, theta, length), torch.int64, chosen)
        fraction = (chosen.long() * turns << 16) >> 32  # modulo 2^64: a whole turn
        return fraction.float() * (2 * math.pi / 2.0**32)

    if threshold is None:
        table = angles(0)
    elif length is not None or not positions.numel():
        table = angles(bridge.constant(length or 0))
    else:
        longest = positions.max() + 1
        if factor is not None:
            # The base itself depends on the length, so these frequencies are found on the device.
            stretch = factor * longest.float() / threshold - (factor - 1)
            power = torch.arange(0, rotated, 2, device=positions.device, dtype=torch.float64) / (rotated - 2)
            plain = _constants(_frequencies(scaling, rotated, theta, threshold), torch.float32, chosen)
            long = chosen.float() * (torch.exp(torch.log(stretch) * -power.float()) * plain)
        else:
            long = angles(threshold + 1)
        table = torch.where(longest > threshold, long, angles(threshold))
    return torch.cos(table) * magnitude, torch.sin(table) * magnitude


@checked
def apply_rope(
    x: Tensor | Sequence[Tensor],
    positions: Tensor | None = None,
    *,
    tables: tuple[Tensor, Tensor] | None = None,
    theta: float = 10000.0,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
) -> Any:
    """Rotary position embedding of queries, or of queries and keys in one pass over memory; see `vishwamai.apply_rope`.

    Arguments are those of JAX's, except for `tables` of `rope_tables` in place of a cache; `x` may have any strides (a
    transposed view costs no copy), and the result is contiguous. float64 is for the CPU, with float32 angles. Under
    `torch.compile(dynamic=True)` a scaling is an object, such as `YarnScaling`, not a dictionary.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    >>> apply_rope(x, torch.tensor([1]), theta=100.0).flatten()
    tensor([-1.9841,  1.5907,  2.4624,  4.1797])
    """
    pair = isinstance(x, (tuple, list))
    if pair and len(x) != 2:
        raise ShapeError(f"apply_rope: `x` is a sequence of {len(x)}; pass a tensor, or a pair (query, key).")
    query: Any = x[0] if pair else x
    key: Any = x[1] if pair else None
    if not torch.compiler.is_compiling():  # a compiled call is checked when it runs
        check(array_spec(query), None if key is None else array_spec(key), layout)
    batch, head_dim = query.shape[0], query.shape[3]
    length = query.shape[2 if layout == "bhsd" else 1]
    if tables is None:
        head_dim, theta, rotary_dim = map(bridge.constant, (head_dim, theta, rotary_dim))
        *_, coordinates, _ = _checked("apply_rope", head_dim, theta, scaling, rotary_dim)
        if not torch.compiler.is_compiling():
            check_positions(positions, batch, length, coordinates is not None)
        if is_dtensor(positions):
            raise ShapeError(
                "apply_rope: `positions` is a DTensor; pass a tensor that every process has whole, or `tables` that "
                "are DTensors."
            )
        how: Any = {"theta": theta, "scaling": scaling, "rotary_dim": rotary_dim, "device": query.device}
        tables = rope_tables(length if positions is None else positions, head_dim, **how)
    elif positions is not None or scaling is not None or rotary_dim is not None or theta != 10000.0:
        raise ShapeError(
            "apply_rope: `tables` bring positions, theta, scaling and rotary_dim; pass those to `rope_tables`."
        )
    cos, sin = tables
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, batch) and table.shape[1] == length
        if not fits or table.shape != cos.shape or not 2 <= 2 * table.shape[2] <= head_dim or table.requires_grad:
            raise ShapeError(
                f"apply_rope: {name} of `tables` has shape "
                f"{tuple(table.shape)}{' and wants a gradient' if table.requires_grad else ''}; pass what "
                f"`rope_tables` gives for {length} positions of {batch} batch elements and {head_dim} features."
            )
    rest = placed_like(query, cos), placed_like(query, sin), interleaved, layout
    if key is not None and needs_separate_calls(query, key, layout):
        return _rope(query, None, *rest)[0], _rope(key, None, *rest)[0]
    turned = _rope(query, key, *rest)
    return tuple(turned) if pair else turned[0]
